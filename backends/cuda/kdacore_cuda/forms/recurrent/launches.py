"""The launch of the recurrent ops as data."""

from __future__ import annotations

from functools import cache
from typing import Any

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode, recurrent_mode
from kdacore_cuda.forms.launches import RESULTS, ROWS, STRIDES, TOKENS, Launches
from kdacore_cuda.forms.recurrent.grid import FULL_DEVICE_ITEMS, grid_blocks, recurrent_tile
from kdacore_cuda.forms.recurrent.kernels import recurrent_launcher
from kdacore_cuda.kernel_parameters import FLAGS, GATES
from kdacore_cuda.request_encoding import (
    contiguous_token_strides,
    division,
    dtypes_of,
    token_flags,
    type_codes,
)
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.plan_cache import FamilyCache
from kdacore_cuda.runtime.program import Launch, Program

ARRAYS = (
    *(*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state"),
    *("state_indices", "num_accepted_tokens", "has_initial_state"),
)
"""Arguments that the launch takes, ahead of :data:`kdacore_cuda.forms.launches.RESULTS`."""
_FIELDS = {
    "h0": "initial_state",
    "ht": "final_state",
    "indices": "state_indices",
    "accepted": "num_accepted_tokens",
    "has_initial": "has_initial_state",
    "writes": "write_indices",
}
_NUMBERS = (
    *(*STRIDES, *ROWS, "hv_factor", "group_factor", "indices_row", "writes_row", "N", "T", "H", "HV"),
    *("hv_shift", "group_shift", "fills_device", "null_index", "gate", "flags"),
    *("qkv_type", "g_type", "beta_type", "bias_type", "scale", "lower_bound", "blocks"),
)


def launches_of(r: Request, mode: RecurrentMode | None = None) -> Launches:
    """The launch of a call by the kernel ``mode``, or by that for contiguous arrays."""
    by_tokens, T = _of_family(r), r.T
    # Besides the tokens the number of elements decides which kernel serves a call.
    known = by_tokens.get((T, r.B * T * r.HV * r.K >> 31))
    if known is None:
        if len(by_tokens) >= _MAX_TOKENS:
            by_tokens.clear()
        known = by_tokens[T, r.B * T * r.HV * r.K >> 31] = recurrent_mode(r), _numbers_of_tokens(r)
    usual, common = known
    kind = r.K, r.state_v_first, r.state_dtype == "bfloat16", usual if mode is None else mode
    numbers = {
        **common,
        "indices_row": _width(r, "state_indices", r.state_indices_ndim),
        "writes_row": _width(r, r.written_indices, _axes_of_written(r)),
        "N": r.N,
        "fills_device": r.N * r.HV >= FULL_DEVICE_ITEMS,
        "blocks": grid_blocks(r, recurrent_tile(*kind)),
    }
    return Launches(_program(*kind), numbers, arch_of(r))


_MAX_TOKENS = 64
"""Numbers of tokens that are known of a family."""
_of_family: FamilyCache[dict[tuple[int, int], tuple[RecurrentMode, dict[str, Any]]]] = FamilyCache(
    lambda r: {}
)
"""By tokens of a sequence, and whether arrays have 2**31 elements: the kernel, and numbers."""


def _axes_of_written(r: Request) -> int:
    """Of the array with the rows that are written, 0 without."""
    return (r.write_indices_ndim or r.state_indices_ndim) if r.inplace_state else 0


def _numbers_of_tokens(r: Request) -> dict[str, Any]:
    """Those that depend on no lengths but the tokens of a sequence."""
    dtypes = dtypes_of(r)
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    written, axes = r.written_indices if r.inplace_state else "", _axes_of_written(r)
    scatter = axes == 2 and (r.packed or r.T > 1)
    flags = (
        token_flags(r, dtypes)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * (dtypes.get("state_indices") == "int64")
        | FLAGS["ACCEPTED64"] * (dtypes.get("num_accepted_tokens") == "int64")
        | FLAGS["WRITES64"] * (dtypes.get(written) == "int64")
        | FLAGS["CLEAR_TAIL"] * (r.packed and "out" not in dtypes)
        | FLAGS["SCATTER_TOKENS" if scatter else "INDEXED_OUT"] * (axes > 0)
    )
    codes = type_codes(dtypes, "v", "g", "beta", "dt_bias")
    return {
        **dict(zip(STRIDES, contiguous_token_strides(r), strict=True)),
        **dict.fromkeys(ROWS, r.HV * r.K * r.V),
        **dict(zip(("qkv_type", "g_type", "beta_type", "bias_type"), codes, strict=True)),
        "hv_factor": hv_factor,
        "hv_shift": hv_shift,
        "group_factor": group_factor,
        "group_shift": group_shift,
        "T": r.T,
        "H": r.H,
        "HV": r.HV,
        "null_index": r.null_index,
        "gate": GATES[r.gate],
        "flags": flags,
        "scale": r.scale,
        "lower_bound": r.lower_bound or 0.0,
    }


@cache
def _program(K: int, v_first: bool, bf16_state: bool, mode: RecurrentMode) -> Program:
    launcher = recurrent_launcher(K, v_first, bf16_state, mode)
    return Program((Launch("recurrent", launcher, "blocks", _FIELDS),), (*ARRAYS, *RESULTS), _NUMBERS)


def _width(r: Request, name: str, axes: int) -> int:
    """Rows that an index array of so many axes names for each sequence; 0 if it was not given."""
    return axes if axes < 2 else r.spec(name).shape[1]
