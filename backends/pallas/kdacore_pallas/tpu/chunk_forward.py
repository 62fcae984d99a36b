"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward by the kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.tpu import chunk_forward_kernel, plan
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.plan import ChunkGrid, ChunkSchedule
from kdacore_pallas.xla import state_pool
from kdacore_pallas.xla.plan import ChunkTable

Array = Any


def chunk_schedule(
    request: Request, x: ChunkGrid, cu_seqlens: Array | None, no_slot: Array | None = None
) -> tuple[ChunkSchedule, ChunkTable | None]:
    """``no_slot``: ``[N]`` bool, sequences whose tokens are masked; None when there are none."""
    if cu_seqlens is None:
        return plan.dense_schedule(x, no_slot), None
    table = plan.packed_table(request, x, cu_seqlens, no_slot)
    return plan.packed_schedule(table), table


def with_empty_sequences(
    rows: Array, empty: Array | None, cu_seqlens: Array, no_slot: Array | None = None
) -> Array:
    """The final states of a pack. No chunk writes the state of an empty sequence or of one without a
    slot: those rows are taken from ``empty``, or are zero if it is None."""
    unwritten = cu_seqlens[1:] == cu_seqlens[:-1]
    if no_slot is not None:
        unwritten = unwritten | no_slot
    other = jnp.zeros_like(rows) if empty is None else empty.astype(rows.dtype)
    return jnp.where(unwritten[:, None, None, None], other, rows)


def forward(
    request: Request, inputs: ChunkInputs, hb: int, launch: Launch, keep_starts: bool = False
) -> Outputs:
    """Outputs of the op by one kernel; a grid step has ``hb`` q/k heads.

    The pool arguments of a call have been resolved (:mod:`kdacore_pallas.xla.state_pool`): the kernel
    reads and writes states ``[N, ...]``.

    ``keep_starts``: ``saved`` holds the state that each chunk starts from, float32 ``[B, NC, HV, V, K]``,
    for :func:`kdacore_pallas.tpu.chunk_backward.backward`; else it is empty.
    """
    want = ("o", *("final",) * request.output_final_state, *("starts",) * keep_starts)
    outs, table = _run(request, inputs, hb, launch, want)
    saved = (outs["starts"],) if keep_starts else ()
    o = plan.scatter(table, outs["o"]).reshape(inputs.v.shape)
    return Outputs(o, outs.get("final"), saved=saved)


def last_states(request: Request, inputs: ChunkInputs, hb: int, launch: Launch) -> Array:
    """``[N, ...]`` last states of the op, by a kernel that writes nothing else."""
    return _run(request, inputs, hb, launch, ("final",))[0]["final"]


def _run(
    request: Request, inputs: ChunkInputs, hb: int, launch: Launch, want: tuple[str, ...]
) -> tuple[dict[str, Array], ChunkTable | None]:
    """What the kernel writes of ``want``, the last states of all sequences; and the pack's table."""
    no_slot = state_pool.no_slot(inputs)
    x = plan.make_chunk_grid(request, hb, launch.together, rows_without_slot=no_slot is not None)
    schedule, table = chunk_schedule(request, x, inputs.cu_seqlens, no_slot)
    options = kernel_options(request)
    outs = chunk_forward_kernel.chunk_forward(request, inputs, x, options, schedule, table, launch, want)
    if "final" in outs and table is not None:
        rows = outs["final"][:-1]
        outs["final"] = with_empty_sequences(rows, inputs.initial_state, inputs.cu_seqlens, no_slot)
    return outs, table
