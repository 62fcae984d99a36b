"""Calls of every kind for the JAX backends: a Request with its inputs, and the float64 answer to
compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import ChunkInputs, Device, OutputGrads, RecurrentInputs, Request, TensorSpec

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
O_BOUND = {"float32": 2e-5, "bfloat16": 4.5e-3, "float16": 4.5e-3}
STATE_BOUND = {"float32": 2e-5, "bfloat16": 3.3e-3, "float16": 3.3e-3}
GRAD_BOUND = {"float32": 5e-5, "bfloat16": 8e-3, "float16": 8e-3}


@dataclass(frozen=True)
class Case:
    """One call. ``gates`` names how the log decay is drawn when the gate is not computed in the
    kernel."""

    B: int = 1
    T: int = 130
    H: int = 1
    HV: int = 2
    K: int = 32
    V: int = 32
    dtype: str = "float32"
    op: str = "chunk_kda"
    gate: str = "log"
    gates: str = "slow"
    lower_bound: float | None = None
    bias: bool = True
    A_log: bool = True
    l2norm: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    initial: bool = True
    final: bool = True
    v_first: bool = False
    state_dtype: str = "float32"
    lengths: tuple[int, ...] | None = None
    checkpoint_every: int = 0
    needs_grad: bool = False
    collinear: bool = False
    seed: int = 0

    @property
    def scalar(self) -> bool:
        return "gated_delta" in self.op

    @property
    def hard(self) -> bool:
        return self.gates != "random" or self.collinear


def _log_gate(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "slow":
        return -np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
    if kind == "random":
        return -rng.uniform(0, 1, (*shape[:2], *[1] * (len(shape) - 2))) * rng.uniform(0, 4, shape)
    if kind == "zero":
        return -1e-6 * rng.uniform(0, 1, shape)
    if kind == "five":
        return np.full(shape, -5.0)
    if kind == "sixty":
        return np.where(rng.uniform(size=shape) < 0.5, 0.0, -60.0)
    if kind == "mixed":
        return rng.choice([0.0, -0.01, -0.3, -5.0, -60.0], size=shape)
    raise KeyError(kind)


def build(case: Case) -> tuple[Request, Any]:
    """The request and its NumPy inputs, rounded to the case's dtype."""
    rng = np.random.default_rng(case.seed)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    dt = DTYPES[case.dtype]
    N, cu = B, None
    if case.lengths is not None:
        cu = np.cumsum([0, *case.lengths]).astype(np.int32)
        N, T = len(case.lengths), int(cu[-1])
    q, k = rng.standard_normal((2, B, T, H, K))
    if case.collinear:
        k = rng.standard_normal((B, 1, H, K)) + 1e-2 * k
    if not case.l2norm:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, HV, V))
    gshape = (B, T, HV) if case.scalar else (B, T, HV, K)
    g = _log_gate(rng, case.gates, gshape) if case.gate == "log" else rng.standard_normal(gshape)
    beta = rng.standard_normal((B, T, HV))
    if not case.beta_sigmoid:
        beta = 0.98 + 0.01 * np.tanh(beta) if case.collinear else 1 / (1 + np.exp(-beta))
    in_kernel = case.gate != "log"
    A = np.log(rng.uniform(0.5, 4, HV)).astype(np.float32) if in_kernel and case.A_log else None
    bias = rng.standard_normal(gshape[2:]).astype(np.float32) if in_kernel and case.bias else None
    tail = (V, K) if case.v_first else (K, V)
    initial = None
    if case.initial:
        initial = (0.3 * rng.standard_normal((N, HV, *tail))).astype(DTYPES[case.state_dtype])
    inputs = ChunkInputs(
        q.astype(dt),
        k.astype(dt),
        v.astype(dt),
        g.astype(np.float32),
        beta.astype(np.float32),
        A,
        bias,
        initial,
        cu,
    )
    request = Request(
        op=case.op, kind="jax", device=Device("cpu"), B=B, T=T, H=H, HV=HV, K=K, V=V, N=N, dtype=case.dtype,
        state_dtype=case.state_dtype, needs_grad=case.needs_grad, scalar_gate=case.scalar, gate=case.gate,
        lower_bound=case.lower_bound, scale=K**-0.5, qk_l2norm=case.l2norm, beta_sigmoid=case.beta_sigmoid,
        neg_eigval=case.neg_eigval, state_v_first=case.v_first, output_final_state=case.final,
        packed=cu is not None, checkpoint_every=case.checkpoint_every,
        tensors=tuple((n, TensorSpec(x.shape, str(x.dtype))) for n, x in inputs._asdict().items() if x is not None),
    )  # fmt: skip
    if "recurrent" in case.op:
        inputs = RecurrentInputs(*inputs[:10])  # those that both ops have
    return request, inputs


def to_jax(inputs: Any) -> Any:
    """The same tuple holding jax arrays."""
    return type(inputs)(*(None if x is None else jnp.asarray(x) for x in inputs))


def error(x: Any, ref: Any) -> float:
    """``norm(x - ref) / norm(ref)``; infinite when x is not finite."""
    x, ref = np.asarray(x).astype(np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, (x.shape, ref.shape)
    if not np.isfinite(x).all():
        return float("inf")
    size = np.linalg.norm(ref)
    return float(np.linalg.norm(x - ref) / size) if size else float(np.linalg.norm(x))


def output_grads(request: Request, seed: int = 5) -> OutputGrads:
    """Standard-normal gradients of ``o`` (in the call's dtype) and of the final state."""
    rng = np.random.default_rng(seed)
    do = rng.standard_normal((request.B, request.T, request.HV, request.V)).astype(DTYPES[request.dtype])
    ds = None
    if request.output_final_state:
        ds = rng.standard_normal(request.state_shape).astype(DTYPES[request.state_dtype])
    return OutputGrads(do, ds)


def check_forward(out: Any, request: Request, inputs: Any, factor: float = 1.0) -> None:
    """``out`` against the oracle within ``factor`` times the contract's bounds."""
    want = oracle_forward(request, inputs)
    assert error(out.o, want.o) < factor * O_BOUND[request.dtype]
    bound = factor * STATE_BOUND[request.dtype]
    if request.state_dtype == "bfloat16":
        bound = max(bound, 3.3e-3)
    for got, ref in ((out.final_state, want.final_state), (out.checkpoints, want.checkpoints)):
        assert (got is None) == (ref is None)
        if ref is not None:
            assert str(got.dtype) == request.state_dtype
            assert error(got, ref) < bound


def check_backward(got: Any, request: Request, inputs: Any, grads: OutputGrads, factor: float = 1.0) -> None:
    """Each gradient against the oracle, in its input's dtype."""
    want = oracle_backward(request, inputs, grads)
    for name, x, ref in zip(got._fields, got, want, strict=True):
        assert (x is None) == (ref is None), name
        if ref is None:
            continue
        like = getattr(inputs, name)
        assert str(x.dtype) == str(like.dtype), name
        bound = factor * GRAD_BOUND[request.dtype]
        if str(like.dtype) == "bfloat16":
            bound = max(bound, 8e-3)
        assert error(x, ref) < bound, (name, error(x, ref), bound)


def with_grad(request: Request) -> Request:
    return replace(request, needs_grad=True)


def full_speed(fn: Any) -> Any:
    """jit with the request static, optimised as for users whatever this folder's compiler flags
    say."""
    options = {
        "xla_backend_optimization_level": 3,
        "xla_cpu_use_fusion_emitters": True,
        "xla_cpu_parallel_codegen_split_count": 32,
    }
    return jax.jit(fn, static_argnums=0, compiler_options=options)
