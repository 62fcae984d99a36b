"""The five stage ops on the array API, from the same parts as the whole chunked op."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from kdacore.types import (
    Array,
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    ChunkStateOutputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    RecomputeOutputs,
    Request,
)
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    dense,
    device_of,
    index_array,
    overflow_to_inf,
    plain,
    put,
    state_layout,
    without_float_errors,
)
from kdacore_reference.gate import LARGEST, gate_forward, gate_parameters
from kdacore_reference.intra import interact
from kdacore_reference.slabs import sequences_of

LOG2E = math.log2(math.e)


class ChunkGrid(NamedTuple):
    """Every chunk of a call side by side, short ones padded by repeating a row of theirs."""

    rows: Array
    """``[chunks * C]``: row in the flattened ``[B*T]`` axis."""
    real: Array
    """``[chunks, C]``: False at padding."""
    first: list[int]
    """Index of each row of ``[B*T]`` among the ``chunks * C`` rows; -1 for rows of no sequence."""
    slots: list[int]
    """Place of each chunk on the flattened ``[B*NT]`` axis."""
    of_sequence: list[list[int]]
    """The chunks of each sequence, in order."""
    size: int


def chunk_grid(request: Request, inputs: Any, like: Array) -> ChunkGrid:
    """Chunks start anew at each sequence; a chunk's place counts all chunks before it in its batch
    row."""
    C = request.chunk_size
    rows: list[int] = []
    real: list[bool] = []
    slots: list[int] = []
    of_sequence = []
    first = [-1] * (request.B * request.T)
    for s in sequences_of(request, inputs):
        count = -(-s.length // C)
        base = len(slots) if request.packed else s.n * request.num_chunks
        of_sequence.append(list(range(len(slots), len(slots) + count)))
        for start in range(0, s.length, C):
            size = min(C, s.length - start)
            for i in range(C):
                if i < size:
                    first[s.start + start + i] = len(rows)
                rows.append(s.start + start + min(i, size - 1))
                real.append(i < size)
        slots += range(base, base + count)
    if not slots:  # all sequences are empty: one chunk of padding, as no array may be without elements
        rows, real, slots = [0] * C, [False] * C, [0]
    xp = array_namespace(like)
    flags = xp.reshape(xp.asarray(np.asarray(real, dtype=bool), device=device_of(like)), (-1, C))
    return ChunkGrid(index_array(rows, like), flags, first, slots, of_sequence, C)


def _cut(array: Array, grid: ChunkGrid, dtype: Any, zero: bool = True) -> Array:
    """``[B, T, heads, X]`` to ``[chunks, heads, C, X]``; padding is zero, or repeats the last row."""
    xp = array_namespace(array)
    array = plain(array)
    flat = xp.reshape(array, (-1, *array.shape[2:]))
    cut = xp.reshape(xp.take(flat, grid.rows, axis=0), (-1, grid.size, *array.shape[2:]))
    cut = dense(cast(xp.permute_dims(cut, (0, 2, 1, 3)), dtype))
    return xp.where(grid.real[:, None, :, None], cut, xp.zeros_like(cut)) if zero else cut


def _paste(blocks: Array, grid: ChunkGrid, request: Request) -> Array:
    """``[chunks, heads, C, X]`` to ``[B, T, heads, X]``, zero in rows of no sequence."""
    xp = array_namespace(blocks)
    _, heads, _, width = blocks.shape
    by_row = xp.reshape(xp.permute_dims(blocks, (0, 2, 1, 3)), (-1, heads, width))
    first = grid.first
    if -1 in first:
        by_row = xp.concat(
            [by_row, xp.zeros((1, heads, width), dtype=blocks.dtype, device=device_of(blocks))], axis=0
        )
        first = [by_row.shape[0] - 1 if i < 0 else i for i in first]
    out = xp.take(by_row, index_array(first, blocks), axis=0)
    return plain(xp.reshape(out, (request.B, request.T, heads, width)))


def _over_group(array: Array) -> Array:
    """Query/key heads against value heads by broadcasting: ``[chunks, H, 1, ..]``."""
    return array[:, :, None, ...]


def _grouped(array: Array, request: Request) -> Array:
    """Value heads as ``[chunks, H, G, ..]``."""
    xp = array_namespace(array)
    return xp.reshape(array, (array.shape[0], request.H, -1, *array.shape[2:]))


def _flat_heads(array: Array) -> Array:
    xp = array_namespace(array)
    return xp.reshape(array, (array.shape[0], -1, *array.shape[3:]))


@without_float_errors
def kda_chunk_gate(request: Request, inputs: ChunkGateInputs) -> Array:
    """``gc`` ``[B, T, HV, K]``: log2 decay summed from each chunk's first row, inclusive, at least
    ``-LARGEST``."""
    xp = array_namespace(inputs.g)
    dtype = compute_dtype(xp, request)
    grid = chunk_grid(request, inputs, inputs.g)
    parameters = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    log_decay = gate_forward(request, cast(inputs.g, dtype), *parameters)
    with overflow_to_inf(log_decay):
        sums = xp.cumulative_sum(_cut(log_decay * LOG2E, grid, dtype), axis=2)
    return _paste(xp.clip(sums, min=-LARGEST), grid, request)


@without_float_errors
def kda_chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk`` ``[B, T, HV, C]``; differences of ``gc`` between neighbours, so nothing
    overflows."""
    xp = array_namespace(inputs.q)
    dtype = compute_dtype(xp, request)
    grid = chunk_grid(request, inputs, inputs.q)
    q, k = (_over_group(_cut(x, grid, dtype)) for x in (inputs.q, inputs.k))
    gc = _cut(inputs.gc, grid, dtype, zero=False)
    step = xp.concat([gc[..., :1, :], gc[..., 1:, :] - gc[..., :-1, :]], axis=-2)
    beta = _grouped(_cut(inputs.beta[..., None], grid, dtype), request)
    # beta multiplies the rows here and the columns in the forward: this gives the inverse of the
    # contract.
    rows = xp.stack(xp.broadcast_arrays(-beta * k, q), axis=-2)
    intra = interact(rows, k * xp.ones_like(beta), _grouped(xp.exp2(step), request))
    return IntraOutputs(
        Aqk=_paste(_flat_heads(intra.qk * request.scale), grid, request),
        Akk=_paste(_flat_heads(intra.inverse), grid, request),
    )


@without_float_errors
def kda_recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w = Akk (beta k 2^gc)``, ``u = Akk (beta v)``, ``kg = k 2^(gc_last - gc)`` and
    ``qg = q 2^gc``."""
    xp = array_namespace(inputs.k)
    dtype = compute_dtype(xp, request)
    grid = chunk_grid(request, inputs, inputs.k)
    k = _over_group(_cut(inputs.k, grid, dtype))
    gc = _cut(inputs.gc, grid, dtype, zero=False)
    decay = _grouped(xp.exp2(gc), request)
    beta = _cut(inputs.beta[..., None], grid, dtype)
    inverse = _cut(inputs.Akk, grid, dtype)
    to_end = _grouped(xp.exp2(gc[..., -1:, :] - gc), request)
    qg = None
    if inputs.q is not None:
        q = _over_group(_cut(inputs.q, grid, dtype))
        qg = _paste(_flat_heads(q * decay), grid, request)
    return RecomputeOutputs(
        w=_paste(inverse @ (beta * _flat_heads(k * decay)), grid, request),
        u=_paste(inverse @ (beta * _cut(inputs.v, grid, dtype)), grid, request),
        kg=_paste(_flat_heads(k * to_end), grid, request),
        qg=qg,
    )


@without_float_errors
def delta_rule_chunk_state(request: Request, inputs: ChunkStateInputs) -> ChunkStateOutputs:
    """``h`` ``[B, NT, HV, K, V]`` at each chunk's start, ``v_new = u - w h`` and the final states."""
    xp = array_namespace(inputs.kg)
    dtype = compute_dtype(xp, request)
    grid = chunk_grid(request, inputs, inputs.kg)
    kg, w, u = (_cut(x, grid, dtype) for x in (inputs.kg, inputs.w, inputs.u))
    decay = xp.exp2(_cut(inputs.gc, grid, dtype, zero=False)[..., -1, :])[..., None]
    where = {"dtype": dtype, "device": device_of(inputs.kg)}
    states = xp.zeros((request.N, request.HV, request.K, request.V), **where)
    if inputs.initial_state is not None:
        states = put(states, (...,), state_layout(cast(inputs.initial_state, dtype), request))
    h = xp.zeros((request.B * request.num_chunks, *states.shape[1:]), **where)
    v_new = xp.zeros_like(u)
    for n, chunks in enumerate(grid.of_sequence):
        S = states[n, ...]
        for c in chunks:
            h = put(h, (grid.slots[c],), S)
            fresh = u[c, ...] - w[c, ...] @ S
            v_new = put(v_new, (c,), fresh)
            S = decay[c, ...] * S + xp.matrix_transpose(kg[c, ...]) @ fresh
        states = put(states, (n,), S)
    given = inputs.initial_state
    final_dtype = getattr(xp, request.state_dtype) if given is None else given.dtype
    return ChunkStateOutputs(
        h=plain(xp.reshape(h, (request.B, request.num_chunks, *states.shape[1:]))),
        v_new=_paste(v_new, grid, request),
        final_state=cast(state_layout(states, request), final_dtype),
    )


@without_float_errors
def kda_chunk_output(request: Request, inputs: ChunkOutputInputs) -> Array:
    """``o = scale (q 2^gc) h + Aqk v_new`` ``[B, T, HV, V]``, in the dtype of ``v_new``."""
    xp = array_namespace(inputs.q)
    dtype = compute_dtype(xp, request)
    grid = chunk_grid(request, inputs, inputs.q)
    q = _over_group(_cut(inputs.q, grid, dtype))
    decay = _grouped(xp.exp2(_cut(inputs.gc, grid, dtype, zero=False)), request)
    h = plain(inputs.h)
    h = cast(xp.reshape(h, (-1, *h.shape[2:])), dtype)
    h = xp.take(h, index_array(grid.slots, h), axis=0)
    o = _flat_heads(q * decay) @ h * request.scale
    o = o + _cut(inputs.Aqk, grid, dtype) @ _cut(inputs.v_new, grid, dtype)
    return cast(_paste(o, grid, request), plain(inputs.v_new).dtype)
