"""NumPy and torch callers who force backend="xla": right values, in their own arrays, nothing else
touched."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from pallas_cases import Case, build, error

import kdacore
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import OutputGrads

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "output_final_state": True,
    "backend": "xla",
}


def arrays(case: Case, names: tuple[str, ...] = NAMES) -> Any:
    request, inputs = build(case)
    return request, inputs, {n: getattr(inputs, n) for n in names}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numpy(dtype: str) -> None:
    request, inputs, x = arrays(Case(T=70, K=16, V=16, gate="softplus", dtype=dtype))
    x["v"] = np.concatenate([x["v"], x["v"]], -1)[..., :16]  # not contiguous
    o, state = kdacore.chunk_kda(**x, **FLAGS)
    want = oracle_forward(request, inputs)
    assert type(o) is np.ndarray and o.dtype == inputs.v.dtype
    assert error(o, want.o) < (2e-5 if dtype == "float32" else 4.5e-3)
    assert error(state, want.final_state) < 2e-5
    o[0] = 0  # the result is the caller's own


def as_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def test_torch_with_autograd_and_int64_packing() -> None:
    request, inputs, x = arrays(Case(lengths=(5, 0, 66), K=16, V=16, gate="softplus"))
    leaves = {n: as_torch(a).requires_grad_() for n, a in x.items()}
    cu = torch.tensor(inputs.cu_seqlens, dtype=torch.int64)
    o, state = kdacore.chunk_kda(**leaves, cu_seqlens=cu, **FLAGS)
    want = oracle_forward(request, inputs)
    assert error(o.detach(), want.o) < 2e-5
    (o.sum() + state.sum()).backward()
    grads = oracle_backward(request, inputs, OutputGrads(np.ones(o.shape), np.ones(state.shape)))
    for name, leaf in leaves.items():
        assert error(leaf.grad, getattr(grads, name)) < 5e-5, name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_decode_on_a_pool_in_place(kind: str) -> None:
    request, inputs, x = arrays(Case(op="fused_recurrent_kda", B=3, T=1, K=16, V=16, gate="softplus"))
    pool = np.random.default_rng(0).standard_normal((6, *request.state_shape[1:])).astype(np.float32)
    before = pool.copy()
    x |= {"initial_state": pool, "state_indices": np.array([4, -1, 2]), "out": np.zeros_like(inputs.v)}
    single = kdacore.chunk_kda(
        **{n: inputs[i] for i, n in enumerate(("q", "k", "v", "g", "beta", "A_log", "dt_bias"))},
        initial_state=np.stack([pool[4], 0 * pool[0], pool[2]]),
        **FLAGS,
    )
    if kind == "torch":
        x = {n: torch.from_numpy(a) for n, a in x.items()}
    o, state = kdacore.fused_recurrent_kda(**x, inplace_state=True, **FLAGS)
    assert o is x["out"] and state is x["initial_state"]
    assert error(o[[0, 2]], single[0][[0, 2]]) < 2e-5 and not o[1].any()
    assert error(pool[[4, 2]], single[1][[0, 2]]) < 2e-5
    untouched = [0, 1, 3, 5]
    assert np.array_equal(pool[untouched], before[untouched])


ENDS = """
import sys, torch, kdacore
sys.setswitchinterval(1000)  # this thread keeps Python's lock until the interpreter is gone
q = torch.randn(1, 5, 1, 16).requires_grad_()
g, beta = -torch.rand(1, 5, 1, 16), torch.rand(1, 5, 1)
KEPT = kdacore.chunk_kda(q, q, q, g, beta, output_final_state=True, backend="xla")
"""


@pytest.mark.exhaustive
def test_a_process_that_ends_right_after_a_torch_call() -> None:
    """XLA's threads must not be the ones to release torch's memory: three in four of these would
    abort."""
    command = [sys.executable, "-c", ENDS]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ)) for _ in range(2)]
    assert [(run.communicate()[1][-300:], run.returncode) for run in runs] == [(b"", 0)] * 2
