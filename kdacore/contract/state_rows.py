"""Which rows of the state pools a call reads and writes, from the values of its index arrays, in NumPy.

The one place that says what ``state_indices``, ``null_index``, ``num_accepted_tokens``, ``has_initial_state`` and
``write_indices`` mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kdacore.types import Request

ZEROS = -1
"""In place of a row: nothing is read (the state is zero), or nothing is written."""
INDEX_VALUES = (
    "state_indices",
    "num_accepted_tokens",
    "has_initial_state",
    "write_indices",
    "checkpoint_offsets",
    "checkpoint_indices",
    "record_indices",
    "num_replayed",
    "conv_indices",
)
"""The arguments whose values decide."""


class StateRows(NamedTuple):
    """Rows by sequence, int64; :data:`ZEROS` where there is none."""

    read: Any
    """``[N]``: the row of ``initial_state`` that each sequence starts from."""
    padding: Any
    """``[N]`` bool: sequences without a slot. Their output and final state are zero."""
    final: Any
    """``[N]``: the row that each final state is written to."""
    per_token: Any
    """``[N, W]``: the rows that the states after each token are written to; None where only final states are."""
    checkpoints: Any
    """``[C]``: the row of each checkpoint at ``checkpoint_offsets``; None without."""
    checkpoint_sequences: Any
    """``[C]``: the sequence that holds each of these offsets; of no meaning where no row is written."""
    records: Any = None
    """``[N]``: the row of the records of each sequence; None without. A sequence that has one leaves, as its final
    state, the one that its first token starts from; the others that after their last token."""
    replayed: Any = None
    """``[N]``: how many of these records are applied before the first token, 0 where there is no row."""
    conv: Any = None
    """``[N]``: the row of ``conv_state`` that each sequence reads and writes; None without."""
    preceding: Any = None
    """``[N]``: how many candidates of an earlier call precede the first token, of those that it left windows of; 0:
    none, and the window is in columns 0 to w - 2."""
    windows: Any = None
    """``[N]``: the row of ``conv_windows`` of each sequence; None without."""


def state_rows(request: Request, values: Mapping[str, Any], lengths: Any) -> StateRows:
    """The rows of one call.

    Args:
        request: of an op with pools.
        values: NumPy arrays by argument, those of :data:`INDEX_VALUES` that were given.
        lengths: ``[N]`` tokens of each sequence.
    """
    padding = np.zeros(request.N, bool)
    read = np.full(request.N, ZEROS)
    if request.has("initial_state"):
        read, padding = _rows_read(request, values)
    table: Any = np.full(request.N, ZEROS)
    if request.inplace_state:
        table = values[request.written_indices] if request.written_indices else np.arange(request.N)
    table = np.where(padding[:, None] if table.ndim == 2 else padding, ZEROS, slots(request, table))
    per_token = None
    if table.ndim == 2:  # columns past a sequence's end are not written
        per_token = np.where(np.arange(table.shape[1]) < lengths[:, None], table, ZEROS)
        table = np.full(request.N, ZEROS)
    checkpoints = holders = None
    if request.checkpoint_count:
        holders = np.searchsorted(np.cumsum(lengths), values["checkpoint_offsets"], side="right")
        holders = np.minimum(holders, request.N - 1)
        checkpoints = np.where(padding[holders], ZEROS, slots(request, values["checkpoint_indices"]))
    records, replayed = _records(request, values, padding)
    if request.op == "commit_records":
        table = np.where(records == ZEROS, ZEROS, table)
    found = StateRows(read, padding, table, per_token, checkpoints, holders, records, replayed)
    return found if not request.has("conv_state") else _with_conv(request, values, found)


def _with_conv(request: Request, values: Mapping[str, Any], rows: StateRows) -> StateRows:
    table = values.get("conv_indices", values.get("state_indices", np.arange(request.N)))
    table = np.where(rows.padding, ZEROS, slots(request, table[:, 0] if table.ndim == 2 else table))
    preceding = np.zeros(request.N, np.int64) if rows.replayed is None else rows.replayed
    if "num_accepted_tokens" in values:
        preceding = np.maximum(values["num_accepted_tokens"], 0)
    windows = None
    if request.has("conv_windows"):
        windows = (
            slots(request, values["record_indices"]) if "record_indices" in values else np.arange(request.N)
        )
        windows = np.where(rows.padding, ZEROS, windows)
    if request.op == "commit_records":
        table = np.where(rows.records == ZEROS, ZEROS, table)
    return rows._replace(conv=table, preceding=preceding, windows=windows)


def _records(request: Request, values: Mapping[str, Any], padding: Any) -> tuple[Any, Any]:
    if not request.has("record_update"):
        return None, None
    rows = np.where(padding, ZEROS, slots(request, values["record_indices"]))
    counts = values.get("num_replayed", np.zeros(request.N, np.int64))
    return rows, np.where(rows == ZEROS, 0, counts)


def slots(request: Request, indices: Any) -> Any:
    """Row numbers with :data:`ZEROS` in place of those that name no slot."""
    return np.where((indices < 0) | (indices == request.null_index), ZEROS, indices)


def _rows_read(request: Request, values: Mapping[str, Any]) -> tuple[Any, Any]:
    padding = np.zeros(request.N, bool)
    if "state_indices" not in values:
        read = np.arange(request.N)
    else:
        table = slots(request, values["state_indices"])
        fresh = np.zeros(request.N, bool)
        if table.ndim == 2:
            accepted = values["num_accepted_tokens"]
            fresh = accepted <= 0
            table = np.take_along_axis(table, np.maximum(accepted, 1)[:, None] - 1, 1)[:, 0]
        padding = (table == ZEROS) & ~fresh
        read = np.where(fresh, ZEROS, table)
    if "has_initial_state" in values:
        read = np.where(values["has_initial_state"].astype(bool), read, ZEROS)
    return read, padding
