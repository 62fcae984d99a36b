"""Contract checks of the five stage ops (contract, section 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore.arrays import Adapter
from kdacore.contract.checks import (
    FLOATS,
    STATES,
    Arguments,
    check_gate_arrays,
    check_lower_bound,
    check_packing,
    common_fields,
)
from kdacore.errors import shown
from kdacore.types import Request

CHUNK_SIZES = (16, 32, 64)
_COMPUTED = FLOATS
"""Intermediates: the inputs' dtype, or float32 where a backend keeps more."""

_ALL_OR_NONE = frozenset({"q", "k", "v", "Akk", "Aqk", "kg", "w", "u", "v_new", "h"})
"""Arrays that are all float64, or none of them."""
_AT_MOST = frozenset({"gc", "beta", "initial_state"})
"""Arrays that are float64 with those only."""
Sizes = dict[str, int]


def build_stage(call: Arguments) -> tuple[Request, Adapter]:
    """Check one stage call and describe it."""
    adapter, device = call.read_arrays(call.opdef.required)
    chunk = call.integer("chunk_size")
    if chunk not in CHUNK_SIZES:
        raise call.fail("chunk_size", shown(chunk), "16, 32 or 64")
    sizes, extra = _CHECKS[call.op](call, chunk)
    _check_precision(call)
    N = check_packing(call, sizes["B"], adapter)
    first = call.opdef.arrays[0]
    dtype = call.dtype(first, FLOATS)
    fields = common_fields(call, adapter, device)
    fields.update(N=N, dtype=dtype, chunk_size=chunk, packed="cu_seqlens" in call.arrays)
    fields.update(**sizes, **extra)
    fields.setdefault("state_dtype", "float64" if dtype == "float64" else "float32")
    if call.op == "delta_rule_chunk_state":
        _check_initial_state(call, fields)
    if call.op == "kda_chunk_output":
        _check_h(call, fields)
    return Request(**fields), adapter


def _check_precision(call: Arguments) -> None:
    """float64 arrays go together; of narrower dtypes a call may have several."""
    first = call.opdef.arrays[0]
    dtype = call.specs[first].dtype
    for name, spec in call.specs.items():
        if name in _ALL_OR_NONE and (spec.dtype == "float64") != (dtype == "float64"):
            want = "float64" if dtype == "float64" else "float32 or narrower"
            raise call.fail(name, f"dtype {spec.dtype}", f"dtype {want}: {first} has {dtype}")
        if name in _AT_MOST and spec.dtype == "float64" != dtype:
            raise call.fail(name, "dtype float64", f"dtype float32 or narrower: {first} has {dtype}")


def _gate(call: Arguments, chunk: int) -> tuple[Sizes, dict[str, Any]]:
    B, T, HV, K = call.rank("g", "B, T, HV, K")
    check_gate_arrays(call, HV, K)
    lower_bound = call.real("lower_bound")
    check_lower_bound(call, lower_bound, safe=False)
    raw = lower_bound is not None or "A_log" in call.arrays
    if "dt_bias" in call.arrays and not raw:
        raise call.fail("dt_bias", "an array", "None, or A_log or lower_bound so that it has an effect")
    gate = "sigmoid" if lower_bound is not None else "softplus" if raw else "log"
    sizes = {"B": B, "T": T, "H": HV, "HV": HV, "K": K, "V": 1}
    return sizes, {"gate": gate, "lower_bound": lower_bound}


def _intra(call: Arguments, chunk: int) -> tuple[Sizes, dict[str, Any]]:
    B, T, H, K = call.rank("q", "B, T, H, K")
    call.shape("k", (B, T, H, K), "B, T, H, K")
    if call.specs["k"].dtype != call.dtype("q", FLOATS):
        raise call.fail("k", f"dtype {call.specs['k'].dtype}", f"dtype {call.specs['q'].dtype}, as q has")
    HV = _value_heads(call, "gc", B, T, H, K)
    _beta(call, B, T, HV)
    scale = call.real("scale")
    return (
        {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": 1},
        {"scale": K**-0.5 if scale is None else scale},
    )


def _recompute(call: Arguments, chunk: int) -> tuple[Sizes, dict[str, Any]]:
    B, T, H, K = call.rank("k", "B, T, H, K")
    HV = _value_heads(call, "gc", B, T, H, K)
    V = call.rank("v", "B, T, HV, V")[3]
    call.shape("v", (B, T, HV, V), "B, T, HV, V")
    call.dtype("v", FLOATS)
    _beta(call, B, T, HV)
    call.shape("Akk", (B, T, HV, chunk), "B, T, HV, chunk_size")
    call.dtype("Akk", _COMPUTED)
    if "q" in call.arrays:
        call.shape("q", (B, T, H, K), "B, T, H, K")
        call.dtype("q", FLOATS)
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}, {}


def _state(call: Arguments, chunk: int) -> tuple[Sizes, dict[str, Any]]:
    B, T, HV, K = call.rank("kg", "B, T, HV, K")
    call.shape("w", (B, T, HV, K), "B, T, HV, K")
    call.shape("gc", (B, T, HV, K), "B, T, HV, K")
    V = call.rank("u", "B, T, HV, V")[3]
    call.shape("u", (B, T, HV, V), "B, T, HV, V")
    for name in ("kg", "w", "u"):
        call.dtype(name, _COMPUTED)
    call.dtype("gc", ("float32", "float64"))
    return (
        {"B": B, "T": T, "H": HV, "HV": HV, "K": K, "V": V},
        {"output_final_state": True, "state_v_first": call.flag("state_v_first")},
    )


def _output(call: Arguments, chunk: int) -> tuple[Sizes, dict[str, Any]]:
    B, T, H, K = call.rank("q", "B, T, H, K")
    HV = _value_heads(call, "gc", B, T, H, K)
    V = call.rank("v_new", "B, T, HV, V")[3]
    call.shape("v_new", (B, T, HV, V), "B, T, HV, V")
    call.shape("Aqk", (B, T, HV, chunk), "B, T, HV, chunk_size")
    for name in ("v_new", "Aqk", "h"):
        call.dtype(name, _COMPUTED)
    scale = call.real("scale")
    return (
        {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V},
        {"scale": K**-0.5 if scale is None else scale},
    )


def _value_heads(call: Arguments, name: str, B: int, T: int, H: int, K: int) -> int:
    HV = call.rank(name, "B, T, HV, K")[2]
    call.shape(name, (B, T, HV, K), "B, T, HV, K")
    call.dtype(name, ("float32", "float64"))
    if HV % H:
        raise call.fail(name, f"HV={HV} value heads", f"a multiple of the H={H} heads of q and k")
    return HV


def _beta(call: Arguments, B: int, T: int, HV: int) -> None:
    call.shape("beta", (B, T, HV), "B, T, HV")
    call.dtype("beta", FLOATS)


def _check_initial_state(call: Arguments, fields: dict[str, Any]) -> None:
    if "initial_state" not in call.arrays:
        return
    fields["state_dtype"] = call.dtype("initial_state", STATES)
    tail, letters = ((fields["K"], fields["V"]), "N, HV, K, V")
    if fields["state_v_first"]:
        tail, letters = (tail[1], tail[0]), "N, HV, V, K"
    call.shape("initial_state", (fields["N"], fields["HV"], *tail), letters)


def _check_h(call: Arguments, fields: dict[str, Any]) -> None:
    request = Request(**fields)
    want = (fields["B"], request.num_chunks, fields["HV"], fields["K"], fields["V"])
    call.shape("h", want, "B, NT, HV, K, V")


_CHECKS: dict[str, Callable[[Arguments, int], tuple[Sizes, dict[str, Any]]]] = {
    "kda_chunk_gate": _gate,
    "kda_chunk_intra": _intra,
    "kda_recompute_w_u": _recompute,
    "delta_rule_chunk_state": _state,
    "kda_chunk_output": _output,
}
