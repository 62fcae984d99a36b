"""Random calls for the reference backend: fresh numbers every run, from a seed that a failure
prints."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdacore.types import Backend, ChunkInputs, Device, OutputGrads, RecurrentInputs, Request, TensorSpec

BOUNDS = {
    "float64": {"o": 1e-12, "state": 1e-12, "grad": 1e-11},
    "float32": {"o": 2e-5, "state": 2e-5, "grad": 5e-5},
    "bfloat16": {"o": 4.5e-3, "state": 3.3e-3, "grad": 8e-3},
    "float16": {"o": 4.5e-3, "state": 3.3e-3, "grad": 8e-3},
}
"""Contract section 4, and what float64 arithmetic should give."""

NUMPY_DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@pytest.fixture
def rng() -> np.random.Generator:
    """Set ``KDACORE_TEST_SEED`` to repeat a failure."""
    seed = int(os.environ.get("KDACORE_TEST_SEED") or secrets.randbits(32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def bounds() -> dict[str, dict[str, float]]:
    return BOUNDS


@pytest.fixture
def backend() -> Backend:
    from kdacore_reference import make_backend

    return make_backend()


@pytest.fixture
def error() -> Callable[[Any, Any], float]:
    """``norm(x - ref) / norm(ref)``; NaN stays NaN and fails every comparison."""
    return relative_error


def relative_error(x: Any, ref: Any) -> float:
    from kdacore.oracle.host_values import to_float64

    got, want = to_float64(x), to_float64(ref)
    assert got.shape == want.shape, (got.shape, want.shape)
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / size if size else float(np.abs(got).max(initial=0.0))


def log_gates(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Natural-log decays as the contract's hard cases name them."""
    if kind == "random":
        return -np.log1p(np.exp(rng.standard_normal(shape)))
    if kind == "slow":
        return -np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    if kind == "zero":
        return -np.abs(rng.standard_normal(shape)) * 1e-6
    if kind == "minus5":
        return np.full(shape, -5.0)
    if kind == "minus60":
        return np.full(shape, -60.0)
    if kind == "mixed":
        return np.where(rng.random(shape) < 0.3, -60.0, 0.0)
    raise ValueError(kind)


@dataclasses.dataclass
class Call:
    """A request and its inputs, with everything needed to vary them."""

    request: Request
    inputs: Any
    rng: np.random.Generator

    def replaced(self, request: dict[str, Any] | None = None, **arrays: Any) -> Call:
        inputs = self.inputs._replace(**arrays)
        fields = {"tensors": specs_of(inputs), **(request or {})}
        return Call(dataclasses.replace(self.request, **fields), inputs, self.rng)

    def of_kind(self, kind: str) -> Call:
        """The same values as torch tensors or JAX arrays."""
        inputs = type(self.inputs)(*(None if a is None else convert(a, kind) for a in self.inputs))
        return Call(dataclasses.replace(self.request, kind=kind), inputs, self.rng)

    def grads(self) -> OutputGrads:
        """Random gradients of ``o`` and, when it is returned, of ``final_state``."""
        r = self.request
        dtype, state = NUMPY_DTYPES[r.dtype], NUMPY_DTYPES[r.state_dtype]
        do = self.rng.standard_normal((r.B, r.T, r.HV, r.V)).astype(dtype)
        if not r.output_final_state:
            return OutputGrads(do)
        return OutputGrads(do, self.rng.standard_normal(r.state_shape).astype(state))


def specs_of(inputs: Any) -> tuple[tuple[str, TensorSpec], ...]:
    """``Request.tensors`` of these arrays."""
    given = ((name, a) for name, a in inputs._asdict().items() if a is not None)
    return tuple((name, TensorSpec(tuple(a.shape), str(a.dtype))) for name, a in given)


def convert(array: np.ndarray, kind: str) -> Any:
    if kind == "numpy":
        return array
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


@pytest.fixture
def to_kind() -> Callable[[np.ndarray, str], Any]:
    return convert


@pytest.fixture
def make_call(rng: np.random.Generator) -> Callable[..., Call]:
    """Builds a :class:`Call`; see :func:`build_call`."""

    def build(**options: Any) -> Call:
        return build_call(rng, **options)

    return build


def build_call(
    rng: np.random.Generator,
    *,
    op: str = "chunk_kda",
    B: int = 1,
    T: int = 100,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int = 16,
    dtype: str = "float32",
    gates: str = "random",
    lengths: list[int] | None = None,
    initial: bool = True,
    collinear: bool = False,
    **fields: Any,
) -> Call:
    HV = HV or H
    scalar = op.endswith("gated_delta_rule")
    if lengths is not None:
        B, T = 1, sum(lengths)
    np_dtype = NUMPY_DTYPES[dtype]
    state_dtype = fields.pop("state_dtype", "float64" if dtype == "float64" else "float32")
    normal = rng.standard_normal
    q, k, v = normal((B, T, H, K)), normal((B, T, H, K)), normal((B, T, HV, V))
    beta = normal((B, T, HV))
    if collinear:
        k, beta = normal((B, 1, H, K)) + 1e-3 * k, 6.0 + 0 * beta
    if not fields.get("qk_l2norm"):
        k = k / np.sqrt((k * k).sum(-1, keepdims=True))
    if not fields.get("beta_sigmoid"):
        beta = 1 / (1 + np.exp(-beta))
    gate = fields.get("gate", "log")
    g_shape = (B, T, HV) if scalar else (B, T, HV, K)
    g = normal(g_shape) if gate != "log" else log_gates(gates, rng, g_shape)
    wide = np.float64 if dtype == "float64" else np.float32
    A_log = dt_bias = None
    if gate != "log":
        A_log = np.log(rng.uniform(0.5, 4, HV)).astype(wide)
        dt_bias = (0.5 * normal((HV,) if scalar else (HV, K))).astype(wide)
    N = B if lengths is None else len(lengths)
    request = Request(
        op=op,
        kind="numpy",
        device=Device("cpu"),
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        N=N,
        dtype=dtype,
        state_dtype=state_dtype,
        scale=fields.pop("scale", K**-0.5),
        scalar_gate=scalar,
        packed=lengths is not None,
        output_final_state=fields.pop("output_final_state", True),
        **fields,
    )
    state = normal(request.state_shape).astype(NUMPY_DTYPES[state_dtype]) if initial else None
    kind = RecurrentInputs if op.startswith("fused") else ChunkInputs
    inputs = kind(
        *(x.astype(np_dtype) for x in (q, k, v)),
        g=g.astype(np_dtype if dtype == "float64" else np.float32),
        beta=beta.astype(np_dtype if dtype == "float64" else np.float32),
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=state,
        cu_seqlens=None if lengths is None else np.cumsum([0, *lengths]).astype(np.int32),
    )
    return Call(dataclasses.replace(request, tensors=specs_of(inputs)), inputs, rng)
