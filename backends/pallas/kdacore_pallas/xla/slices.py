"""A slice of a row that goes on on other ranks (:class:`kdacore.types.SliceFunctions`), in plain JAX.

Columns of values do not mix, so one pass over the states gives the map of a slice: the values ``[v | 0]`` from the
state ``[0 | I]`` end in ``[C | M]``. The gradient of a slice's start needs neither states nor outputs: only the reverse
scan of the backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore.types import (
    ChunkInputs,
    InputGrads,
    OutputGrads,
    Outputs,
    Request,
    SliceForward,
    SliceFunctions,
)
from kdacore_pallas.xla import chunk_backward, chunk_forward, entry_points, segment
from kdacore_pallas.xla.intra import unpacked
from kdacore_pallas.xla.numerics import F32, mesh_axes, product_precision, required
from kdacore_pallas.xla.plan import make_plan

Array = Any


def slice_functions(request: Request) -> SliceFunctions | None:
    """The functions for JAX arrays. For others, which cannot be traced, there are none."""
    if request.kind != "jax":
        return None
    return SliceFunctions(begin, finish, backward_begin, backward_finish)


# --- forward ----------------------------------------------------------------------------------------------------------


def leaving_part(request: Request, inputs: ChunkInputs, leaving: Array | None) -> tuple[Request, ChunkInputs]:
    """The call whose last states are those of the leaving part: of a pack the second of two sequences ``[0, s, e]``."""
    call = replace(
        request, needs_grad=False, output_final_state=True, checkpoint_every=0, disable_recompute=False
    )
    if leaving is None:
        return call, inputs
    cu = required(inputs.cu_seqlens)
    offsets = jnp.concatenate([jnp.zeros_like(cu[:1]), cu[leaving], cu[leaving + 1]])
    return replace(call, N=2), inputs._replace(cu_seqlens=offsets)


def with_columns_of_one(request: Request, inputs: ChunkInputs) -> tuple[Request, ChunkInputs]:
    """The call with values ``[v | 0]`` from the states ``[0 | I]``."""
    K, V = request.K, request.V
    v = jnp.concatenate([inputs.v, jnp.zeros((*inputs.v.shape[:-1], K), inputs.v.dtype)], -1)
    start = jnp.concatenate([jnp.zeros((K, V), F32), jnp.eye(K, dtype=F32)], -1)
    call = replace(request, V=V + K)
    return call, inputs._replace(v=v, initial_state=jnp.broadcast_to(start, call.state_shape))


def begin(request: Request, inputs: ChunkInputs, leaving: Array | None) -> SliceForward:
    """The map of the leaving part. Not by the program for GPUs, some of whose products are 16-bit."""
    call, arrays = with_columns_of_one(*leaving_part(request, inputs, leaving))
    ends = chunk_forward.forward(call, arrays._replace(cu_seqlens_cpu=None)).final_state
    return map_of(request, ends)


def map_of(request: Request, ends: Array) -> SliceForward:
    """``[C | M]`` of each sequence as the map of each row: of a pack, that of its second sequence."""
    ends = ends[1:] if request.packed else ends
    return SliceForward(ends[..., request.V :], ends[..., : request.V])


def started(request: Request, inputs: ChunkInputs, starts: Array) -> tuple[Request, ChunkInputs]:
    """The slice's whole call. It has last states: where no caller gives gradients for them, other ranks do."""
    return replace(request, output_final_state=True), inputs._replace(initial_state=starts)


def finish(request: Request, inputs: ChunkInputs, pending: None, starts: Array) -> Outputs:
    """The results, by the whole forward."""
    out = entry_points.chunk_forward(*started(request, inputs, starts))
    return out if request.output_final_state else out._replace(final_state=None)


# --- backward ---------------------------------------------------------------------------------------------------------


def backward_begin(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
    starts: Array,
    entering: Array | None,
) -> tuple[Array, None]:
    """The gradient of the state before the slice, by the reverse scan alone."""
    d = start_gradients(request, inputs._replace(initial_state=starts), saved, grads)
    return (d if entering is None else d[entering]), None


def start_gradients(
    request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> Array:
    """``[N, HV, K, V]`` gradients of ``inputs.initial_state``, as far as they come from the slice."""
    axes = mesh_axes(*inputs, grads.o, grads.final_state)
    plan = make_plan(request, inputs.cu_seqlens)
    precision = product_precision(request)
    params = segment.gate_params(inputs, plan)
    arrays = chunk_forward.padded(request, chunk_forward.with_channels(request, inputs), plan)
    initial = chunk_forward.states_in(request, plan, inputs.initial_state, axes)
    layout = chunk_forward.saved_layout(request, plan, inputs, initial)
    buffers = dict(zip(layout.used, saved, strict=True)) if saved else {}
    do = chunk_backward.padded_gradient(request, inputs, plan, grads.o)
    dfinal = None
    if grads.final_state is not None:
        dfinal = chunk_forward.states_in(request, plan, grads.final_state, axes)

    def body(carry: Any, s: Array) -> tuple[Any, None]:
        raw = segment.load(request, arrays, plan, s)
        rows = segment.recurrence_rows(request, raw, params, in_backward=True)
        pair = unpacked(*layout.load(buffers, s)[1:3]) if saved else None
        prep = segment.prepare(request, rows, precision, pair)
        do_ = chunk_backward.segment_gradient(request, plan, raw, do, s)
        flag = chunk_forward.sequence_flags(plan, s)
        dstate, dinitial, _ = chunk_backward.reverse(
            plan, prep, do_, carry[0], carry[1], flag, dfinal, precision
        )
        return (dstate, dinitial), None

    dstate, dinitial, _ = chunk_backward.reverse_carry(request, plan, inputs, dfinal, initial, axes)
    order = jnp.arange(plan.segments, dtype=jnp.int32)
    (dstate, dinitial), _ = lax.scan(body, (dstate, dinitial), order, reverse=True)
    rows = dstate if plan.table is None else required(dinitial)[:-1]
    return chunk_forward.states_out(request, rows, request.N)


def backward_finish(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    pending: None,
    grads: OutputGrads,
    starts: Array,
    ends: Array,
) -> InputGrads:
    """The gradients, by the whole backward."""
    call, arrays = started(request, inputs, starts)
    return entry_points.chunk_backward(call, arrays, saved, OutputGrads(grads.o, ends))
