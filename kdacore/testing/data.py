"""The numbers of a case: host values first, rounded once to their dtype, then arrays of the case's kind."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kdacore.ops import INDEX_ARGUMENTS, OPS
from kdacore.testing.cases import Case
from kdacore.testing.inputs import normalise, offsets, tensors
from kdacore.testing.pools import POOLS, index_tables, named_rows
from kdacore.testing.signature import request_of, signature
from kdacore.types import Request

Values = dict[str, Any]
"""Host values by argument: float64 (already rounded to the argument's dtype) or int64 NumPy arrays."""


def rounded(x: Any, dtype: str) -> Any:
    """``x`` rounded to ``dtype``, to nearest even, as float64."""
    if dtype == "bfloat16":
        word = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
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
    from kdacore_reference import oracle_stages as o

    from kdacore import types as t

    raw = case.op == "kda_chunk_gate" and (case.A_log or case.option("lower_bound") is not None)
    x = normalise(tensors(case.shape, case.seed, gates=case.gates, raw_gate=raw, collinear=case.collinear))
    rng = np.random.default_rng(case.seed + 1)
    x.update(_offset_values(case))
    x.update(_state_values(case, rng))
    if raw:
        return x
    state = x["initial_state"] if case.initial_state else None
    full = replace(case, op="delta_rule_chunk_state", check="", A_log=False, dt_bias="")
    request = replace_request(request_of(full), H=case.shape.H, scale=case.shape.K**-0.5, gate="log")
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


def replace_request(request: Request, **fields: Any) -> Request:
    """A request with some fields changed."""
    import dataclasses

    return dataclasses.replace(request, **fields)


# --- what the oracle says ------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The loss of the gradient checks: ``sum(o * weights.o) + sum(final_state * weights.final_state)``."""

    o: Any
    final_state: Any | None


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> Values:
    """Float64 results of the case's call, by name. Cases that differ only in kind or layout share them."""
    return _expected(_content(case))


@functools.lru_cache(maxsize=64)
def expected_gradients(case: Case) -> Values:
    """Float64 gradients of the loss :func:`weights`, by argument."""
    return _expected_gradients(_content(case))


def _content(case: Case) -> Case:
    """The case without what does not change its numbers."""
    return replace(
        case,
        check="",
        backend="reference",
        kind="numpy",
        device="cpu",
        layout="contiguous",
        mode="eager",
        factor=1.0,
        slow=False,
        note="",
        index_dtype="int64",
    )


def exact_call(case: Case) -> tuple[Request, Any]:
    """The case's request and inputs as the oracle takes them: NumPy float64 values."""
    values = host_values(case)
    return request_of(_content(case)), OPS[case.op].inputs(**values)


@functools.lru_cache(maxsize=64)
def _expected(case: Case) -> Values:
    from kdacore_reference import oracle, oracle_stages

    request, inputs = exact_call(case)
    if case.family == "gate":
        return {"log_decay": oracle.oracle_gate(request, inputs)}
    if case.family == "stage":
        stages: dict[str, Any] = {
            "kda_chunk_gate": oracle_stages.oracle_chunk_gate,
            "kda_chunk_intra": oracle_stages.oracle_chunk_intra,
            "kda_recompute_w_u": oracle_stages.oracle_recompute_w_u,
            "delta_rule_chunk_state": oracle_stages.oracle_chunk_state,
            "kda_chunk_output": oracle_stages.oracle_chunk_output,
        }
        return named_results(case, stages[case.op](request, inputs))
    return named_results(case, oracle.oracle_forward(request, inputs))


def named_results(case: Case, result: Any) -> Values:
    """What an op returned, by name; absent results left out."""
    if case.family == "gate":
        return {"log_decay": result}
    if not isinstance(result, tuple):
        return {"gc" if case.op == "kda_chunk_gate" else "o": result}
    named = result._asdict()
    named.pop("saved", None)
    return {k: v for k, v in named.items() if v is not None}


def weights(case: Case) -> Weights:
    """Weights of the loss, partly aligned with the results so that sums over tokens do not cancel to nothing."""
    content = _content(case)
    rng = np.random.default_rng(case.seed + 2)
    results = expected(content)
    o = results["log_decay" if case.family == "gate" else "o"]
    dtype = "float32" if case.family == "gate" and case.dtype != "float64" else case.dtype
    state = results.get("final_state")
    return Weights(
        rounded(_aligned(o, rng), dtype),
        None if state is None else rounded(_aligned(state, rng), case.state_dtype),
    )


def _aligned(x: Any, rng: Any) -> Any:
    size = float(np.sqrt(np.mean(x * x))) or 1.0
    return x / size + 0.5 * rng.standard_normal(x.shape)


@functools.lru_cache(maxsize=64)
def _expected_gradients(case: Case) -> Values:
    from kdacore_reference import oracle

    from kdacore.types import OutputGrads

    request, inputs = exact_call(case)
    w = weights(case)
    if case.family == "gate":
        grads = oracle.oracle_gate_backward(request, inputs, w.o)
    else:
        grads = oracle.oracle_backward(request, inputs, OutputGrads(w.o, w.final_state))
    return {name: x for name, x in grads._asdict().items() if x is not None}


def uses_pool(case: Case) -> bool:
    """Does the call name rows of a pool, or write into its states?"""
    return bool(case.pool) and POOLS[case.pool].indices > 0
