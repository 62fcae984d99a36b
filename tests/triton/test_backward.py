"""The chunk backward against the float64 oracle: every option, on whatever device there is.

Without a GPU the kernels run in Triton's interpreter, in float32 with exact dots.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kdacore_reference.oracle import oracle_backward, to_float64
from kdacore_triton.chunk_backward import backward

from kdacore import contract
from kdacore.ops import OPS
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Triton 3.6's interpreter turns a loop bound into an int in a way that NumPy < 2.4 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

BOUND = {torch.float32: 5e-5, torch.bfloat16: 8e-3, torch.float16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One call. ``gates`` names how the log decay is drawn when the gate is not computed in the kernel."""

    B: int = 1
    T: int = 70
    H: int = 1
    HV: int = 1
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype = torch.float32
    gate: str = "log"
    gates: str = "random"
    lower_bound: float | None = None
    bias: bool = True
    scalar: bool = False
    l2norm: bool = True
    beta: str = "rate"
    initial: bool = True
    final: bool = True
    v_first: bool = False
    state_dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    collinear: bool = False
    only_final: bool = False
    seed: int = 0

    @property
    def hard(self) -> bool:
        return self.gates != "random" or self.collinear


def log_decay(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if case.gates == "random":
        return -5.0 * rng.random(shape) ** 2
    if case.gates == "slow":
        return -1e-3 * rng.random(shape)
    if case.gates == "zero":
        return -1e-7 * rng.random(shape)
    if case.gates == "floor":
        return np.full(shape, -5.0)
    if case.gates == "mixed":
        return np.where(rng.random(shape) < 0.5, 0.0, -60.0)
    raise KeyError(case.gates)


def build(case: Case) -> tuple[Request, ChunkInputs, OutputGrads]:
    """The request, its inputs and the gradients that reach it, on DEVICE."""
    rng = np.random.default_rng(case.seed)
    B, H, HV, K, V = case.B, case.H, case.HV, case.K, case.V
    T, N = (sum(case.lengths), len(case.lengths)) if case.lengths else (case.T, B)

    def tensor(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(x)).to(device=DEVICE, dtype=dtype)

    q, k = rng.standard_normal((2, B, T, H, K))
    if case.collinear:
        k = rng.standard_normal((B, 1, H, K)) + 1e-2 * k
    if not case.l2norm:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = rng.standard_normal((B, T, HV))
    beta = 0.1 * beta + 6.0 if case.collinear else beta
    if case.beta == "rate":
        beta = 1 / (1 + np.exp(-beta))
    tail = () if case.scalar else (K,)
    raw = case.gate != "log"
    g = rng.standard_normal((B, T, HV, *tail)) if raw else log_decay(case, rng, (B, T, HV, *tail))
    state = (N, HV, V, K) if case.v_first else (N, HV, K, V)
    f32 = torch.float32
    inputs = ChunkInputs(
        q=tensor(q, case.dtype),
        k=tensor(k, case.dtype),
        v=tensor(rng.standard_normal((B, T, HV, V)), case.dtype),
        g=tensor(g, case.gate_dtype),
        beta=tensor(beta, case.gate_dtype),
        A_log=tensor(np.log(rng.uniform(0.5, 4, HV)), f32) if raw else None,
        dt_bias=tensor(0.5 * rng.standard_normal((HV, *tail)), f32) if raw and case.bias else None,
        initial_state=tensor(0.3 * rng.standard_normal(state), case.state_dtype) if case.initial else None,
        cu_seqlens=tensor(np.cumsum([0, *case.lengths]), torch.int32) if case.lengths else None,
    )
    options = {
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": raw,
        "use_beta_sigmoid_in_kernel": case.beta != "rate",
        "allow_neg_eigval": case.beta == "double",
        "safe_gate": case.lower_bound is not None,
        "lower_bound": case.lower_bound,
        "output_final_state": case.final,
        "state_v_first": case.v_first,
    }
    op = OPS["chunk_gated_delta_rule" if case.scalar else "chunk_kda"]
    flags = dict.fromkeys(op.options, False) | {"scale": None, "lower_bound": None} | options
    flags = {o: flags[o] for o in op.options}
    for absent in ("checkpoint_every", "cp"):
        if absent in flags:
            flags[absent] = None
    request = contract.build_request(op, inputs, tuple(flags.values()))[0]
    do = None if case.only_final else tensor(rng.standard_normal((B, T, HV, V)), case.dtype)
    d_final = tensor(0.3 * rng.standard_normal(state), case.state_dtype) if case.final else None
    return request, inputs, OutputGrads(do, d_final)


def error(got: torch.Tensor, want: np.ndarray) -> float:
    got64 = to_float64(got.detach().cpu())
    assert got64.shape == want.shape
    if not np.isfinite(got64).all():
        return float("inf")
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got64 - want) / size) if size else float(np.linalg.norm(got64))


def on_host(x: Any) -> Any:
    return type(x)(*(None if a is None else a.detach().cpu() for a in x))


def errors(case: Case) -> dict[str, float]:
    """Each gradient's error against the oracle; shapes and dtypes are checked on the way."""
    request, inputs, grads = build(case)
    got = backward(request, inputs, (), grads)
    want = oracle_backward(request, on_host(inputs), on_host(grads))
    out = {}
    for name in InputGrads._fields:
        x, ref, like = getattr(got, name), getattr(want, name), getattr(inputs, name)
        assert (x is None) == (like is None), name
        if like is None:
            continue
        assert x.dtype == like.dtype and x.shape == like.shape, name
        out[name] = error(x, ref)
    return out


def check(case: Case) -> None:
    bound = BOUND[case.dtype] * (2 if case.hard else 1)
    bad = {
        name: e
        for name, e in errors(case).items()
        if not e
        <= max(bound, 8e-3 if name == "initial_state" and case.state_dtype is not torch.float32 else 0)
    }
    assert not bad, bad


@pytest.mark.parametrize("gates", ["random", "slow", "zero", "floor", "mixed"])
def test_decays_given(gates: str) -> None:
    check(Case(gates=gates))
