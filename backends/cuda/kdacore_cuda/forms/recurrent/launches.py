"""The launch of the recurrent ops as data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.launches import RESULTS, ROWS, STRIDES, TOKENS, Launches
from kdacore_cuda.forms.recurrent.grid import FULL_DEVICE_ITEMS, grid_blocks, recurrent_tile
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel
from kdacore_cuda.kernel_parameters import FLAGS, GATES
from kdacore_cuda.request_encoding import (
    contiguous_token_strides,
    division,
    dtypes_of,
    token_flags,
    type_codes,
)
from kdacore_cuda.runtime.device_figures import arch_of
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
    mode = chosen(r).mode if mode is None else mode
    kind = r.K, r.state_v_first, r.state_dtype == "bfloat16", mode
    dtypes, row = dtypes_of(r), r.HV * r.K * r.V
    written = r.written_indices if r.inplace_state else ""
    rows_read, rows_written = _width(r, dtypes, "state_indices"), _width(r, dtypes, written)
    scatter = rows_written > 0 and r.spec(written).shape[1:] != () and (r.packed or r.T > 1)
    flags = (
        token_flags(r, dtypes)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * (dtypes.get("state_indices") == "int64")
        | FLAGS["ACCEPTED64"] * (dtypes.get("num_accepted_tokens") == "int64")
        | FLAGS["WRITES64"] * (dtypes.get(written) == "int64")
        | FLAGS["INDEXED_OUT"] * (rows_written > 0 and not scatter)
        | FLAGS["SCATTER_TOKENS"] * scatter
        | FLAGS["CLEAR_TAIL"] * (r.packed and "out" not in dtypes)
    )
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    values = (
        *(*contiguous_token_strides(r), row, row, hv_factor, group_factor, rows_read, rows_written),
        *(r.N, r.T, r.H, r.HV, hv_shift, group_shift, r.N * r.HV >= FULL_DEVICE_ITEMS, r.null_index),
        *(GATES[r.gate], flags, *type_codes(dtypes, "v", "g", "beta", "dt_bias")),
        *(r.scale, r.lower_bound or 0.0, grid_blocks(r, recurrent_tile(*kind))),
    )
    return Launches(_program(*kind), dict(zip(_NUMBERS, values, strict=True)), arch_of(r))


@cache
def _program(K: int, v_first: bool, bf16_state: bool, mode: RecurrentMode) -> Program:
    kernel = recurrent_kernel(K, v_first, bf16_state, mode)
    return Program((Launch("recurrent", kernel, "blocks", _FIELDS),), (*ARRAYS, *RESULTS), _NUMBERS)


def _width(r: Request, dtypes: Mapping[str, str], name: str) -> int:
    """Rows that an index array names for each sequence; 0 if it was not given."""
    if name not in dtypes:
        return 0
    shape = r.spec(name).shape
    return shape[1] if len(shape) == 2 else 1
