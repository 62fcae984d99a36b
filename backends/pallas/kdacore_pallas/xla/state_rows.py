"""The rows that a recurrent or fused decode call reads and writes, on the device.

:mod:`kdacore.contract.state_rows` is the definition, in NumPy. Indices may be tracers here, so the same is computed
with JAX. Columns of ``per_token`` past a sequence's end are not marked: the loop over tokens writes none of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import Request
from kdacore_pallas.xla import state_pool
from kdacore_pallas.xla.numerics import required

Array = Any


def state_rows(request: Request, inputs: Any) -> StateRows:
    """The rows of a recurrent or fused decode call, or of ``commit_records``, int32."""
    read = state_pool.rows_read(request, inputs)
    padding = jnp.zeros(request.N, bool) if read.no_slot is None else read.no_slot
    table = jnp.full(request.N, ZEROS, jnp.int32)
    if request.inplace_state:
        table = state_pool.rows_written(request, inputs, read.no_slot)
    per_token = table if table.ndim == 2 else None
    records = replayed = None
    if inputs.record_update is not None:
        records = jnp.where(padding, ZEROS, state_pool.slots(request, required(inputs.record_indices)))
        replayed = jnp.zeros(request.N, jnp.int32)
        if inputs.num_replayed is not None:
            replayed = jnp.where(records == ZEROS, 0, inputs.num_replayed.astype(jnp.int32))
    final = table if per_token is None else jnp.full(request.N, ZEROS, jnp.int32)
    if request.op == "commit_records":
        final = jnp.where(records == ZEROS, ZEROS, final)
    rows = StateRows(read.rows, padding, final, per_token, None, None, records, replayed)
    return rows if getattr(inputs, "conv_state", None) is None else _with_conv(request, inputs, rows)


def _with_conv(request: Request, inputs: Any, rows: StateRows) -> StateRows:
    conv = _conv_rows(request, inputs, rows)
    preceding = jnp.zeros(request.N, jnp.int32) if rows.replayed is None else rows.replayed
    if getattr(inputs, "num_accepted_tokens", None) is not None:
        preceding = jnp.maximum(inputs.num_accepted_tokens.astype(jnp.int32), 0)
    windows = None
    if inputs.conv_windows is not None:
        windows = jnp.arange(request.N, dtype=jnp.int32)
        if inputs.record_indices is not None:
            windows = state_pool.slots(request, inputs.record_indices)
        windows = jnp.where(rows.padding, ZEROS, windows)
    return rows._replace(conv=conv, preceding=preceding, windows=windows)


def _conv_rows(request: Request, inputs: Any, rows: StateRows) -> Array:
    given = inputs.state_indices if inputs.conv_indices is None else inputs.conv_indices
    given = jnp.arange(request.N) if given is None else given
    table = state_pool.slots(request, given[:, 0] if given.ndim == 2 else given)
    unused = rows.padding
    if request.op == "commit_records":
        unused = unused | (rows.records == ZEROS)
    return jnp.where(unused, ZEROS, table)
