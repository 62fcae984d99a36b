"""Shapes and dtypes of a case's arrays, without their values: enough to ask a backend whether it serves the case."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from typing import Any

from kdacore import device as probes
from kdacore.arrays.specs import ShapeDtype
from kdacore.dispatch import selection, validate
from kdacore.ops import HOST_ARGUMENTS, OPS
from kdacore.registry import REGISTRY
from kdacore.testing.cases import DIFFERENTIATES, Case
from kdacore.testing.parts import parts_of
from kdacore.testing.pools import POOLS, pool_rows, pool_width
from kdacore.types import ArrayKind, Device, Reason, Request, TensorSpec

Specs = dict[str, TensorSpec]

STAGE_CHUNK = 64


def signature(case: Case) -> Specs:
    """Every array argument of the case's call, by name."""
    if case.family == "stage":
        return _stage(case)
    s, K = case.shape, case.shape.K
    tail = () if case.scalar_gate or K == 0 else (K,)
    gate = _gate_arrays(case, tail) if case.raw_gate else {}
    if case.family == "gate":
        return {"g": TensorSpec((s.B, s.T, s.HV, *tail), case.dtype), **gate}
    specs = {
        "q": TensorSpec((s.B, s.T, s.H, K), case.dtype),
        "k": TensorSpec((s.B, s.T, s.H, K), case.dtype),
        "v": TensorSpec((s.B, s.T, s.HV, s.V), case.dtype),
        "g": TensorSpec((s.B, s.T, s.HV, *tail), case.gate_dtype),
        "beta": TensorSpec((s.B, s.T, s.HV), case.beta_dtype),
        **gate,
        **_offsets(case),
    }
    if case.pool or case.initial_state:
        rows = pool_rows(case) if case.pool else s.N
        specs["initial_state"] = TensorSpec((rows, s.HV, *case.state_tail), case.state_dtype)
    if case.pool:
        specs.update(_indices(case))
    if case.out:
        specs["out"] = TensorSpec((s.B, s.T, s.HV, s.V), case.dtype)
    return specs


def _gate_arrays(case: Case, tail: tuple[int, ...]) -> Specs:
    HV = case.shape.HV
    specs = {}
    if case.A_log:
        specs["A_log"] = TensorSpec((HV,), "float64" if case.dtype == "float64" else "float32")
    if case.dt_bias:
        size = functools.reduce(lambda a, b: a * b, tail, HV)
        specs["dt_bias"] = TensorSpec((size,) if case.dt_bias == "flat" else (HV, *tail), case.bias_dtype)
    return specs


def _offsets(case: Case) -> Specs:
    if not case.shape.lengths:
        return {}
    spec = TensorSpec((case.shape.N + 1,), case.index_dtype)
    return {"cu_seqlens": spec, "cu_seqlens_cpu": spec} if case.host_offsets else {"cu_seqlens": spec}


def _indices(case: Case) -> Specs:
    pool, N = POOLS[case.pool], case.shape.N
    if pool.indices == 0:
        return {}
    if pool.indices == 1:
        return {"state_indices": TensorSpec((N,), case.index_dtype)}
    return {
        "state_indices": TensorSpec((N, pool_width(case)), case.index_dtype),
        "num_accepted_tokens": TensorSpec((N,), case.index_dtype),
    }


def _stage(case: Case) -> Specs:
    s, C = case.shape, chunk_size(case)
    middle = case.stage_dtype or case.dtype
    wide = "float64" if case.dtype == "float64" else "float32"
    chunks = s.T // C + s.N if s.lengths else -(-s.T // C)
    known = {
        "q": TensorSpec((s.B, s.T, s.H, s.K), case.dtype),
        "k": TensorSpec((s.B, s.T, s.H, s.K), case.dtype),
        "v": TensorSpec((s.B, s.T, s.HV, s.V), case.dtype),
        "g": TensorSpec((s.B, s.T, s.HV, s.K), case.dtype),
        "beta": TensorSpec((s.B, s.T, s.HV), case.beta_dtype),
        "gc": TensorSpec((s.B, s.T, s.HV, s.K), wide),
        "Aqk": TensorSpec((s.B, s.T, s.HV, C), middle),
        "Akk": TensorSpec((s.B, s.T, s.HV, C), middle),
        "w": TensorSpec((s.B, s.T, s.HV, s.K), middle),
        "u": TensorSpec((s.B, s.T, s.HV, s.V), middle),
        "kg": TensorSpec((s.B, s.T, s.HV, s.K), middle),
        "v_new": TensorSpec((s.B, s.T, s.HV, s.V), middle),
        "h": TensorSpec((s.B, chunks, s.HV, s.K, s.V), middle),
        "initial_state": TensorSpec((s.N, s.HV, *case.state_tail), case.state_dtype),
        **_gate_arrays(case, (s.K,)),
        **_offsets(case),
    }
    left_out = set() if case.initial_state else {"initial_state"}
    if case.op == "kda_recompute_w_u" and not case.q_given:
        left_out.add("q")
    return {n: known[n] for n in OPS[case.op].arrays if n in known and n not in left_out}


def chunk_size(case: Case) -> int:
    size: int = case.option("chunk_size", STAGE_CHUNK)
    return size


# --- asking the backend --------------------------------------------------------------------------------------------


@functools.cache
def device_of(kind: ArrayKind, name: str) -> Device:
    """The :class:`Device` that arrays of this kind on this device have."""
    if kind == "torch":
        import torch

        return probes.torch_device(torch.device(name).type, 0)
    if kind == "jax":
        import jax

        return probes.jax_device(jax.devices(name)[0])
    return Device(name)


def request_of(case: Case) -> Request:
    """The request the case's call becomes. ContractError when the case itself breaks the contract."""
    where = device_of(case.kind, case.device)
    found: dict[str, Any] = {}
    for name, spec in signature(case).items():
        on = "cpu" if name in HOST_ARGUMENTS else f"{where.type}:{where.index}"
        found[name] = ShapeDtype(spec.shape, spec.dtype, on.removesuffix(":0"), case.kind, where.arch)
    opdef = OPS[case.op]
    inputs = opdef.inputs(*(found.get(n) for n in opdef.arrays))
    given = dict(case.options)
    values = tuple({**opdef.defaults, **given}.values())
    request, _ = validate.build_request(opdef, inputs, values, needs_grad=needs_grad(case))
    return _as_traced(case, request)


def needs_grad(case: Case) -> bool:
    """Does the case's call have to be differentiable? A traced one might be, as far as its op and options allow."""
    if case.kind == "jax" and case.mode == "jit":
        return case.family != "stage" and not case.pool
    return case.check in DIFFERENTIATES


def _as_traced(case: Case, request: Request) -> Request:
    """``jax.jit`` traces and so does ``jax.vjp``; a backend that cannot be traced is differentiated directly."""
    joined = case.check in DIFFERENTIATES and REGISTRY.get(case.backend).backend.traceable
    traced = case.kind == "jax" and (case.mode == "jit" or joined)
    return dataclasses.replace(request, traced=True) if traced else request


def judge(case: Case) -> tuple[Reason, ...]:
    """The backend's own answer: its reasons against the first call of the case it declines, none when it serves all."""
    for part in parts_of(case):
        reasons = selection.judge(REGISTRY.get(case.backend), request_of(part)).reasons
        if reasons:
            return reasons
    return ()


def frameworks() -> tuple[ArrayKind, ...]:
    """Array kinds that can be tested here."""
    found: list[ArrayKind] = ["numpy"]
    for name in ("torch", "jax"):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            found.append(name)
    return tuple(found)
