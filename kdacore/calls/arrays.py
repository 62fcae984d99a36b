"""The arrays of a described call: host values first, rounded once to their dtype, then arrays of its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdacore.calls.description import CallDescription, specs
from kdacore.calls.pools import index_tables
from kdacore.calls.requests import request_of
from kdacore.calls.values import PER_TOKEN, normalise, offsets, tensors, to_kind
from kdacore.contract.state_rows import ZEROS, StateRows, state_rows
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, MASK_ARGUMENTS, OPS
from kdacore.oracle.host_values import rounded

_LARGEST = float(np.finfo(np.float32).max)
Values = dict[str, Any]
"""Host values by argument: NumPy arrays of float64 (already rounded to the argument's dtype), int64 or bool."""
_STAGE_TOKENS = (*PER_TOKEN, "gc", "Aqk", "Akk", "w", "u", "kg", "v_new")
"""Arguments of the stages that have a row for each token."""


def host_values(call: CallDescription) -> Values:
    """Every array argument of the call."""
    wanted = specs(call)
    made = _MAKERS.get(call.family, _whole_values)(call)
    found: Values = {}
    for name, spec in wanted.items():
        x = np.asarray(made[name]).reshape(spec.shape)
        if name in MASK_ARGUMENTS:
            found[name] = x.astype(bool)
        else:
            found[name] = x.astype(np.int64) if name in INDEX_ARGUMENTS else rounded(x, spec.dtype)
    return found


def rows_of(call: CallDescription, values: Values) -> StateRows:
    """The pool rows that the call reads and writes. ``values``: the index tables, others may be among them."""
    plain = replace(call, kind="numpy", device="cpu", arch="", traced=False, requires_grad=False)
    return state_rows(request_of(plain), values, np.asarray(call.shape.sequence_lengths))


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
        x["g"] = x["g"] + np.clip(x["dt_bias"], -_LARGEST, _LARGEST)  # inf - inf is no gate input
    lower = call.option("lower_bound")
    if not call.raw_gate and call.option("safe_gate", False):
        x["g"] = np.maximum(x["g"], lower)
    rng = np.random.default_rng(call.seed + 1)
    for name in x.keys() & {*PER_TOKEN}:
        x[name][:, call.shape.used :] = np.nan
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
    if call.pool_use is None:
        return {"initial_state": _laid_out(call, rng.standard_normal((s.N, *tail)))}
    found = index_tables(call, rng)
    read = np.unique(rows_of(call, found).read)
    read = read[read != ZEROS]
    pool = np.full((call.state_rows, *tail), np.nan)  # rows that are not to be read
    pool[read] = rng.standard_normal((len(read), *tail))
    found["initial_state"] = _laid_out(call, pool)
    found["write_pool"] = _laid_out(call, np.full((call.write_rows, *tail), np.nan))
    if call.pool_use.records:
        found |= _record_values(call, found, rng)
    return found


def _record_values(call: CallDescription, tables: Values, rng: Any) -> Values:
    """Records as decoding leaves them, NaN where they are not to be read."""
    s, rows = call.shape, rows_of(call, tables)
    size = (call.record_rows, call.pool_width)
    tails = {"record_update": (s.HV, s.V), "record_key": (s.H, s.K), "record_decay": (s.HV, s.K)}
    found = {name: np.full((*size, *tail), np.nan) for name, tail in tails.items()}
    for row, count in zip(rows.records, rows.replayed, strict=True):
        if row != ZEROS and count:
            key = rng.standard_normal((count, s.H, s.K))
            found["record_update"][row, :count] = 0.5 * rng.standard_normal((count, s.HV, s.V))
            found["record_key"][row, :count] = key / np.linalg.norm(key, axis=-1, keepdims=True)
            found["record_decay"][row, :count] = rng.random((count, s.HV, s.K))
    if call.scalar_gate:
        found["record_decay"] = found["record_decay"][..., 0]
    return found


def _commit_values(call: CallDescription) -> Values:
    rng = np.random.default_rng(call.seed + 1)
    found = _state_values(call, rng)
    return found | (_conv_values(call, found, rng) if call.conv_state_given else {})


def _decode_values(call: CallDescription) -> Values:
    """The channels of q, k and v side by side, and what is around the recurrence."""
    found = _whole_values(call)
    s, rng = call.shape, np.random.default_rng(call.seed + 3)
    found["x"] = np.concatenate([found[name].reshape(s.B, s.T, -1) for name in ("q", "k", "v")], axis=-1)
    found["z"] = rng.standard_normal((s.B, s.T, s.HV, s.V))
    found["z"][:, s.used :] = np.nan
    found["norm_weight"] = 1 + 0.2 * rng.standard_normal((s.HV, s.V) if call.norm == "heads" else s.V)
    if call.pool_use is None and call.conv_indices:
        found["conv_indices"] = rng.permutation(call.conv_rows)[: s.N]
    return found | (_conv_values(call, found, rng) if call.conv_width else {})


def _conv_values(call: CallDescription, tables: Values, rng: Any) -> Values:
    """Weights of the convolution and its states, NaN where they are not to be read."""
    wanted, w = specs(call), call.conv_width
    D = wanted["conv_state"].shape[1]
    found = {"conv_weight": rng.standard_normal((D, w)), "conv_bias": 0.2 * rng.standard_normal(D)}
    state = found["conv_state"] = np.full(wanted["conv_state"].shape, np.nan)
    kept = wanted.get("conv_windows")
    windows = None if kept is None else np.full(kept.shape, np.nan)
    rows = rows_of(call, tables)
    for n in range(call.shape.N):
        row, count = int(rows.conv[n]), int(rows.preceding[n])
        if row == ZEROS or rows.read[n] == ZEROS:
            continue
        if windows is not None and count:
            windows[rows.windows[n], count - 1] = rng.standard_normal((w - 1, D))
        elif call.family == "commit":
            state[row] = rng.standard_normal(state.shape[1:])
        else:
            state[row, :, max(count - 1, 0) :][:, : w - 1] = rng.standard_normal((D, w - 1))
    if windows is not None:
        found["conv_windows"] = windows
    return found


def _laid_out(call: CallDescription, state: Any) -> Any:
    return np.swapaxes(state, -1, -2) if call.option("state_v_first", False) else state


def _stage_values(call: CallDescription) -> Values:
    """What the earlier stages would hand over, from the stage oracles."""
    from kdacore import types as t
    from kdacore.oracle import stages as o

    raw = call.op == "kda_chunk_gate" and (call.A_log or call.option("lower_bound") is not None)
    x = normalise(tensors(call.shape, call.seed, gates=call.gates, raw_gate=raw, collinear=call.collinear))
    rng = np.random.default_rng(call.seed + 1)
    x.update(_offset_values(call))
    x.update(_state_values(call, rng))
    if raw:
        return _without_padding(call, x)
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
    return _without_padding(call, x)


def _without_padding(call: CallDescription, x: Values) -> Values:
    """NaN in the rows of no sequence: a stage does not read them, nor write them for the next."""
    for name in _STAGE_TOKENS:
        if name in x:
            x[name][:, call.shape.used :] = np.nan
    return x


_MAKERS = {"stage": _stage_values, "commit": _commit_values, "decode": _decode_values}
"""What makes the values of the ops of a family; :func:`_whole_values` those of the others."""
