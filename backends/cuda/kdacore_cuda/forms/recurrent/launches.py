"""The launch of the recurrent ops as data: eager calls from torch, cached ones, and calls from JAX are made of it."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.kernels import recurrent_launcher
from kdacore_cuda.forms.recurrent.sizes import FULL_DEVICE_ITEMS, grid_blocks, plan_of, recurrent_tile
from kdacore_cuda.kernel_parameters import FLAGS, GATES, RECURRENT
from kdacore_cuda.request_encoding import division, is_int64, token_flags, type_code
from kdacore_cuda.runtime.launch_sequence import LaunchSequence, PlannedLaunch

_ARGUMENTS = {
    **{name: name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")},
    "h0": "initial_state",
    "indices": "state_indices",
    "accepted": "num_accepted_tokens",
    "has_initial": "has_initial_state",
}
"""Field of the kernels' parameters -> argument."""

_ALL = {**_ARGUMENTS, "o": "o", "ht": "final_state", "writes": "write_indices"}
_OF_TORCH = {name: (_ALL[name], 0) for name, _ in RECURRENT.fields if name in _ALL}
NAMES = tuple(name for name, _ in _OF_TORCH.values())
"""The arrays whose addresses a call from torch gives, in the order of the parameters; 0 for an absent one.
``final_state``: where states are written, the pool where that is done in place. ``write_indices``: the rows that are
written, ``state_indices`` where those are the rows read."""
_MAX_LAYOUTS = 64
"""Layouts of arrays cached for one request."""


def launch_of(
    r: Request,
    strides: tuple[int, ...] = (),
    rows: tuple[int, int] | None = None,
    mode: RecurrentMode | None = None,
) -> PlannedLaunch:
    """The launch of a call, with the arrays ``o``, ``final_state`` and, by their names, its arguments.

    Args:
        r: the call.
        strides: batch, token and head strides of q, k, v, g and beta, in elements; those of contiguous arrays if not
            given.
        rows: elements from a row of the states read, and of those written, to the next; likewise.
        mode: the kernel; that for contiguous arrays if not given.
    """
    plan, given = plan_of(r), dict(r.tensors)
    strides, rows = strides or plan.strides, rows or (plan.state_row, plan.state_row)
    mode = plan.mode if mode is None else mode
    arrays = {field: (name, 0) for field, name in _ARGUMENTS.items() if name in given}
    arrays["o"] = ("o", 0)
    if r.inplace_state or r.output_final_state:
        arrays["ht"] = ("final_state", 0)
    if plan.written_indices:
        arrays["writes"] = (plan.written_indices, 0)
    kind = r.K, r.state_v_first, r.state_dtype == "bfloat16", mode
    grid = grid_blocks(r, recurrent_tile(*kind))
    return PlannedLaunch("recurrent", recurrent_launcher(*kind), grid, arrays, _numbers(r, strides, rows))


def _numbers(r: Request, strides: tuple[int, ...], rows: tuple[int, int]) -> dict[str, float]:
    """The parameters that are numbers."""
    written = plan_of(r).written_indices
    rows_read, rows_written = _width(r, "state_indices"), _width(r, written)
    scatter = rows_written > 0 and r.spec(written).shape[1:] != () and (r.packed or r.T > 1)
    flags = (
        token_flags(r)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * is_int64(r, "state_indices")
        | FLAGS["ACCEPTED64"] * is_int64(r, "num_accepted_tokens")
        | FLAGS["WRITES64"] * is_int64(r, written)
        | FLAGS["INDEXED_OUT"] * (rows_written > 0 and not scatter)
        | FLAGS["SCATTER_TOKENS"] * scatter
        | FLAGS["CLEAR_TAIL"] * (r.packed and not r.has("out"))
    )
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    return RECURRENT.last(
        *(*rows, *strides, hv_factor, group_factor, rows_read, rows_written),
        *(r.N, r.T, r.H, r.HV, hv_shift, group_shift, r.N * r.HV >= FULL_DEVICE_ITEMS),
        *(r.null_index, GATES[r.gate], flags),
        *(type_code(r, name) for name in ("v", "g", "beta", "dt_bias")),
        *(r.scale, r.lower_bound or 0.0),
    )


def _width(r: Request, name: str) -> int:
    """Rows that an index array names for each sequence; 0 if it was not given."""
    if not name or not r.has(name):
        return 0
    return r.spec(name).shape[1] if len(r.spec(name).shape) == 2 else 1


def sequence_of(r: Request, strides: tuple[int, ...], rows: tuple[int, int], aligned: bool) -> LaunchSequence:
    """The launch to be made, given the addresses of :data:`NAMES`; 0 for an absent array.

    Args:
        r: the call.
        strides: as of :func:`launch_of`.
        rows: as of :func:`launch_of`.
        aligned: every row of states lies on 16 bytes.
    """
    plan = plan_of(r)
    # Of contiguous arrays no strides: hashing fifteen numbers takes longer than the look-up.
    layout = (rows, aligned) if strides is plan.strides else (strides, rows, aligned)
    found = plan.sequences.get(layout)
    if found is None:
        if len(plan.sequences) >= _MAX_LAYOUTS:
            plan.sequences.clear()
        mode = plan.mode if aligned and strides == plan.strides else RecurrentMode.GENERAL
        launch = launch_of(r, strides, rows, mode)._replace(arrays=_OF_TORCH)
        found = LaunchSequence((launch,), NAMES)
        plan.sequences[layout] = found
    return found
