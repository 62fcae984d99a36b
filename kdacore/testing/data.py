"""The numbers of a case: host values first, rounded once to their dtype, then arrays of the case's kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdacore.ops import INDEX_ARGUMENTS
from kdacore.selfcheck.inputs import normalise, offsets, tensors
from kdacore.testing.cases import Case
from kdacore.testing.pools import index_tables, named_rows
from kdacore.testing.signature import request_of, signature

Values = dict[str, Any]
"""Host values by argument: float64 (already rounded to the argument's dtype) or int64 NumPy arrays."""


def rounded(x: Any, dtype: str) -> Any:
    """``x`` rounded to ``dtype``, to nearest even, as float64."""
    if dtype == "bfloat16":
        word: Any = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
        return word.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(x).astype(dtype).astype(np.float64)


def host_values(case: Case) -> Values:
    """Every array argument of the case's call."""
    wanted = signature(case)
    made = _stage_values(case) if case.family == "stage" else _whole_values(case)
    found: Values = {}
    for name, spec in wanted.items():
        x = np.asarray(made[name]).reshape(spec.shape)
        found[name] = x.astype(np.int64) if name in INDEX_ARGUMENTS else rounded(x, spec.dtype)
    return found


def _whole_values(case: Case) -> Values:
    x = tensors(
        case.shape,
        case.seed,
        gates=case.gates,
        raw_gate=case.raw_gate,
        raw_beta=case.raw_beta,
        scalar_gate=case.scalar_gate,
        collinear=case.collinear,
    )
    if case.tiny_rows:
        for name in ("q", "k"):
            x[name][:, 1::4] = 0.0
            x[name][:, 3::4] *= 1e-4
    if not case.option("use_qk_l2norm_in_kernel", False):
        x = normalise(x)
    if case.raw_gate and not case.dt_bias:
        x["g"] = x["g"] + x["dt_bias"]
    lower = case.option("lower_bound")
    if not case.raw_gate and case.option("safe_gate", False):
        x["g"] = np.maximum(x["g"], lower)
    rng = np.random.default_rng(case.seed + 1)
    x["out"] = np.full(x["v"].shape, np.nan)
    x.update(_offset_values(case))
    x.update(_state_values(case, rng))
    return x


def _offset_values(case: Case) -> Values:
    bounds = offsets(case.shape.lengths)
    return {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}


def _state_values(case: Case, rng: Any) -> Values:
    s = case.shape
    tail = (s.HV, s.K, s.V)
    if not case.pool:
        return {"initial_state": _laid_out(case, rng.standard_normal((s.N, *tail)))}
    tables = index_tables(case, rng)
    rows = signature(case)["initial_state"].shape[0]
    pool = np.full((rows, *tail), np.nan)  # rows that nobody names must be neither read nor written
    named = named_rows(case, tables)
    pool[named] = rng.standard_normal((len(named), *tail))
    return {"initial_state": _laid_out(case, pool), **tables}


def _laid_out(case: Case, state: Any) -> Any:
    return np.swapaxes(state, -1, -2) if case.option("state_v_first", False) else state


def _stage_values(case: Case) -> Values:
    """What the earlier stages would hand over, from the stage oracles."""
    from kdacore import types as t
    from kdacore_reference import oracle_stages as o

    raw = case.op == "kda_chunk_gate" and (case.A_log or case.option("lower_bound") is not None)
    x = normalise(tensors(case.shape, case.seed, gates=case.gates, raw_gate=raw, collinear=case.collinear))
    rng = np.random.default_rng(case.seed + 1)
    x.update(_offset_values(case))
    x.update(_state_values(case, rng))
    if raw:
        return x
    state = x["initial_state"] if case.initial_state else None
    full = replace(case, op="delta_rule_chunk_state", check="", A_log=False, dt_bias="")
    request = replace(request_of(full), H=case.shape.H, scale=case.shape.K**-0.5, gate="log")
    cu = x["cu_seqlens"] if case.shape.lengths else None
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
