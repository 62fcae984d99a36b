"""The declaration of the reference backend, and the op ``kda_gate``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.types import Backend, GateInputs

OPS = {
    "chunk_kda": True,
    "fused_recurrent_kda": True,
    "fused_decode_kda": False,
    "fused_decode_gated_delta_rule": False,
    "commit_records": False,
    "kda_gate": True,
    "chunk_gated_delta_rule": True,
    "fused_recurrent_gated_delta_rule": True,
    "kda_chunk_gate": False,
    "kda_chunk_intra": False,
    "kda_recompute_w_u": False,
    "delta_rule_chunk_state": False,
    "kda_chunk_output": False,
}


def test_every_op_is_there_with_its_backward(backend: Backend) -> None:
    assert {name: op.backward is not None for name, op in backend.ops.items()} == OPS
    assert backend.name == "reference" and backend.rank == 0
    assert set(backend.kinds) == {"numpy", "torch", "jax"}


def test_only_a_jax_tracer_is_refused(backend: Backend, make_call: Callable[..., Any]) -> None:
    request = make_call(T=1).request
    for name, op in backend.ops.items():
        for kind in ("numpy", "torch", "jax"):
            for traced in (False, True):
                asked = dataclasses.replace(request, op=name, kind=kind, traced=traced)
                codes = [reason.code for v in op.verifiers if (reason := v(asked)) is not None]
                assert codes == (["traced"] if kind == "jax" and traced else []), (name, kind, traced)


def test_meta_tensors_are_served_where_no_values_are_read() -> None:
    x = [torch.empty(1, 20, 1, 8, device="meta") for _ in range(4)] + [torch.empty(1, 20, 1, device="meta")]
    offsets = torch.tensor([0, 7, 20])
    call = partial(kdacore.chunk_kda, *x, cu_seqlens=offsets.to("meta"), output_final_state=True)
    o, state = call(cu_seqlens_cpu=offsets)
    assert o.is_meta and o.shape == (1, 20, 1, 8) and state.shape == (2, 1, 8, 8)
    with pytest.raises(kdacore.UnsupportedError, match=r"cu_seqlens on meta; wanted cu_seqlens_cpu"):
        call()
    pool, rows = torch.empty(5, 1, 8, 8, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(kdacore.UnsupportedError, match="state_indices on meta; wanted arrays with values"):
        kdacore.fused_recurrent_kda(*x, initial_state=pool, state_indices=rows)


def test_the_plugin_module_imports_nothing_heavy() -> None:
    code = (
        "import sys, kdacore_reference as p; p.make_backend();"
        "print([m for m in ('torch', 'jax', 'array_api_compat', 'kdacore_reference.recurrent',"
        " 'kdacore_reference.chunk_forward') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_first_call_imports_few_modules() -> None:
    code = (
        "import sys, numpy as np, kdacore;"
        "x = np.ones((1, 64, 2, 8), np.float32);"
        "kdacore.chunk_kda(x, x, x, -x, x[..., 0], backend='reference');"
        "print(*sorted(m.rpartition('.')[2] for m in sys.modules if m.startswith('kdacore_reference')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = "arrays chunk_forward gate intra kdacore_reference slabs"
    assert done.stdout.strip() == modules


@pytest.mark.jax_later
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("bias", ["none", "flat", "full"])
@pytest.mark.parametrize(
    "gate, A_log", [("log", False), ("softplus", True), ("sigmoid", True), ("sigmoid", False)]
)
def test_gate(
    gate: str, A_log: bool, bias: str, kind: str, make_call: Callable[..., Any], backend: Backend, error: Any
) -> None:
    call = make_call(B=2, T=37, H=3, K=10, gate=gate, lower_bound=-5.0 if gate == "sigmoid" else None)
    x = call.inputs
    if gate == "log":
        inputs = GateInputs(x.g)
    else:
        dt_bias = {"none": None, "flat": x.dt_bias.reshape(-1), "full": x.dt_bias}[bias]
        inputs = GateInputs(x.g, x.A_log if A_log else None, dt_bias)
    call = dataclasses.replace(call, inputs=inputs)
    dlog = call.rng.standard_normal(x.g.shape).astype(np.float32)
    other = call.of_kind(kind)
    op = backend.ops["kda_gate"]
    got = op.forward(other.request, other.inputs)
    assert str(got.dtype).endswith("float32")
    assert error(got, oracle_gate(call.request, inputs)) < 1e-6
    dother = dataclasses.replace(call, inputs=GateInputs(dlog)).of_kind(kind).inputs.g
    assert op.backward is not None
    grads = op.backward(other.request, other.inputs, dother)
    wanted = oracle_gate_backward(call.request, inputs, dlog)
    for name, want in wanted._asdict().items():
        value = getattr(grads, name)
        assert (value is None) == (want is None), name
        if want is not None:
            assert error(value, want) < 2e-5, name
