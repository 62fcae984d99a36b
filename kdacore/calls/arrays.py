"""The arrays of a described call: host values first, rounded once to their dtype, then arrays of its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdacore.calls.description import CallDescription, specs
from kdacore.calls.pools import index_tables, named_rows
from kdacore.calls.requests import request_of
from kdacore.calls.values import normalise, offsets, tensors, to_kind
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, OPS

Values = dict[str, Any]
"""Host values by argument: float64 (already rounded to the argument's dtype) or int64 NumPy arrays."""


def rounded(x: Any, dtype: str) -> Any:
    """``x`` rounded to ``dtype``, to nearest even, as float64."""
    if dtype == "bfloat16":
        word: Any = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
        return word.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(x).astype(dtype).astype(np.float64)


def host_values(call: CallDescription) -> Values:
    """Every array argument of the call."""
    wanted = specs(call)
    made = _stage_values(call) if call.family == "stage" else _whole_values(call)
    found: Values = {}
    for name, spec in wanted.items():
        x = np.asarray(made[name]).reshape(spec.shape)
        found[name] = x.astype(np.int64) if name in INDEX_ARGUMENTS else rounded(x, spec.dtype)
    return found


def make_arrays(call: CallDescription, values: Values | None = None) -> dict[str, Any]:
    """Every array argument of the call, of its kind, on its device. ``values``: instead of those it describes."""
    wanted = specs(call)
    values = host_values(call) if values is None else values
    return {
        name: to_kind(x, call.kind, wanted[name].dtype, "cpu" if name in HOST_ARGUMENTS else call.device)
        for name, x in values.items()
    }


def _whole_values(call: CallDescription) -> Values:
    x = tensors(
        call.shape,
        call.seed,
        gates=call.gates,
        raw_gate=call.raw_gate,
        raw_beta=call.raw_beta,
        scalar_gate=call.scalar_gate,
        collinear=call.collinear,
    )
    if call.tiny_rows:
        for name in ("q", "k"):
            x[name][:, 1::4] = 0.0
            x[name][:, 3::4] *= 1e-4
    if not call.option("use_qk_l2norm_in_kernel", False):
        x = normalise(x)
    if call.raw_gate and not call.dt_bias:
        x["g"] = x["g"] + x["dt_bias"]
    lower = call.option("lower_bound")
    if not call.raw_gate and call.option("safe_gate", False):
        x["g"] = np.maximum(x["g"], lower)
    rng = np.random.default_rng(call.seed + 1)
    x["out"] = np.full(x["v"].shape, np.nan)
    x.update(_offset_values(call))
    x.update(_state_values(call, rng))
    return x


def _offset_values(call: CallDescription) -> Values:
    bounds = offsets(call.shape.lengths)
    return {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}


def _state_values(call: CallDescription, rng: Any) -> Values:
    s = call.shape
    tail = (s.HV, s.K, s.V)
    if not call.pool:
        return {"initial_state": _laid_out(call, rng.standard_normal((s.N, *tail)))}
    tables = index_tables(call, rng)
    rows = call.state_rows
    pool = np.full((rows, *tail), np.nan)  # rows that nobody names must be neither read nor written
    named = named_rows(call, tables)
    pool[named] = rng.standard_normal((len(named), *tail))
    return {"initial_state": _laid_out(call, pool), **tables}


def _laid_out(call: CallDescription, state: Any) -> Any:
    return np.swapaxes(state, -1, -2) if call.option("state_v_first", False) else state


def _stage_values(call: CallDescription) -> Values:
    """What the earlier stages would hand over, from the stage oracles."""
    from kdacore import types as t
    from kdacore_reference import oracle_stages as o

    raw = call.op == "kda_chunk_gate" and (call.A_log or call.option("lower_bound") is not None)
    x = normalise(tensors(call.shape, call.seed, gates=call.gates, raw_gate=raw, collinear=call.collinear))
    rng = np.random.default_rng(call.seed + 1)
    x.update(_offset_values(call))
    x.update(_state_values(call, rng))
    if raw:
        return x
    state = x["initial_state"] if call.initial_state else None
    taken = OPS["delta_rule_chunk_state"].options
    kept = tuple((name, value) for name, value in call.options if name in taken)
    full = replace(call, op="delta_rule_chunk_state", kind="numpy", device="cpu", arch="", options=kept)
    request = replace(request_of(full), H=call.shape.H, scale=call.shape.K**-0.5, gate="log")
    cu = x["cu_seqlens"] if call.shape.lengths else None
    x["gc"] = o.oracle_chunk_gate(request, t.ChunkGateInputs(x["g"], cu_seqlens=cu))
    intra = o.oracle_chunk_intra(request, t.IntraInputs(x["q"], x["k"], x["gc"], x["beta"], cu))
    x.update(Aqk=intra.Aqk, Akk=intra.Akk)
    wu = o.oracle_recompute_w_u(
        request, t.RecomputeInputs(x["k"], x["v"], x["beta"], x["gc"], x["Akk"], x["q"], cu)
    )
    x.update(w=wu.w, u=wu.u, kg=wu.kg)
    states = o.oracle_chunk_state(request, t.ChunkStateInputs(wu.kg, wu.w, wu.u, x["gc"], state, cu))
    x.update(h=states.h, v_new=states.v_new)
    return x
