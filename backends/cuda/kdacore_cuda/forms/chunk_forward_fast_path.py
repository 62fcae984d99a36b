"""The forward of ``chunk_kda`` for cached calls: everything but addresses is decided and packed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.arrays.torch.private import Empty, allocator
from kdacore.types import ChunkInputs, FastCall, Request
from kdacore_cuda.forms.array_places import ForwardLaunches
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_forward_launches import launches_of
from kdacore_cuda.forms.dataflow import forward as dataflow
from kdacore_cuda.forms.fused import forward as fused
from kdacore_cuda.request_encoding import contiguous_strides, contiguous_token_strides
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.prepacked_launch import PrepackedLauncher, Start
from kdacore_cuda.runtime.torch_arguments import (
    ALIGNMENT,
    contiguous_rows,
    strides_without_copies,
    torch_dtype,
)

Launch = Callable[[int, tuple[int, ...], int, int, int, tuple[int, ...]], "torch.Tensor | None"]
"""``launch(stream, tokens, o, initial_state, final_state, rows)`` makes a call's launches and returns what
it keeps for the backward. All but the stream are addresses, 0 for an absent array; ``tokens`` are those of
``_TOKENS``, ``rows`` those of ``_ROWS``, and of ``_MARKS`` in calls with checkpoints at chosen tokens."""

_TOKENS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
_ROWS, _MARKS = ("reads", "has_initial", "writes"), ("mark_offsets", "mark_rows")


def make_fast_call(request: Request, inputs: ChunkInputs) -> FastCall | None:
    """:func:`kdacore_cuda.forms.chunk_forward.forward` for calls of ``request`` whose arrays have the
    layout of ``inputs``.

    None where an array would have to be copied, where g is float16, and where checkpoints of every
    block are asked for. The returned function takes a call's arrays in the order of
    :class:`kdacore.types.ChunkInputs`, gives what was kept behind the three results, and returns None,
    having launched nothing, where q, k, v or g is not 16-byte aligned or another device is current.

    Raises BackendBuildError or DriverError.
    """
    r, form = request, chosen(request).form
    _, _, _, _, _, A_log, bias, initial, cu_seqlens, _, reads, mask, writes, pool, offsets, at, out = inputs
    small = (A_log, bias, cu_seqlens, reads, mask, writes, offsets, at, out)
    strides = strides_without_copies(inputs, False, contiguous_token_strides(r), small)
    if strides is None or inputs.g.dtype == torch.float16 or r.checkpoint_every or not r.N * r.HV:
        return None
    if any(x is not None and not x[:1].is_contiguous() for x in (initial, pool)):
        return None
    row = r.HV * r.K * r.V
    initial_row, pool_row = (contiguous_rows(x, row)[1] for x in (initial, pool))
    if form == "dataflow" and initial_row != row:
        return None
    in_place = r.inplace_state
    written_row = row if not in_place else initial_row if pool is None else pool_row
    index = inputs.q.get_device()
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    empty = allocator(inputs.v.device.type)
    with torch.cuda.device(index):  # kernels are loaded here, for the current context
        launch = _launch_maker(form, offsets is not None)(
            request, strides, (initial_row, written_row), index, empty
        )
    o_shape, state_shape = (r.B, r.T, r.HV, r.V), r.state_shape
    o_strides, state_strides = contiguous_strides(o_shape), contiguous_strides(state_shape)
    o_dtype, state_dtype = inputs.v.dtype, torch_dtype(r, r.state_dtype)
    returns_state, fresh = r.output_final_state, r.output_final_state and not in_place

    def fast_call(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, A_log, bias, initial, cu_seqlens, _, reads, mask, writes, pool, marks, to, o = (
            arrays
        )
        q_at, k_at, v_at, g_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        if (q_at | k_at | v_at | g_at) % ALIGNMENT or current_device() != index:
            return None
        if o is None:
            o = empty(o_shape, o_strides, o_dtype)
        elif o.data_ptr() % ALIGNMENT:
            return None
        state, rows = None, _NO_ROWS
        if fresh:
            state = empty(state_shape, state_strides, state_dtype)
        elif in_place:
            state = initial if pool is None else pool
        if reads is not None or mask is not None or writes is not None:
            rows = _rows(reads, mask, writes, in_place)
        if marks is not None:
            rows += (marks.data_ptr(), to.data_ptr())
        kept = launch(
            current_stream(index),
            (
                q_at, k_at, v_at, g_at, beta.data_ptr(), 0 if A_log is None else A_log.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            ),
            o.data_ptr(),
            0 if initial is None else initial.data_ptr(),
            0 if state is None else state.data_ptr(),
            rows,
        )  # fmt: skip
        results = o, state if returns_state else None, None
        return results if kept is None else (*results, kept)

    return fast_call


_NO_ROWS: tuple[int, ...] = (0, 0, 0)


def _rows(reads: Any, mask: Any, writes: Any, in_place: bool) -> tuple[int, ...]:
    reads_at = 0 if reads is None else reads.data_ptr()
    writes_at = 0 if not in_place else reads_at if writes is None else writes.data_ptr()
    return reads_at, 0 if mask is None else mask.data_ptr(), writes_at


def _launch_maker(form: str, marked: bool) -> Callable[..., Launch]:
    if form == "dataflow":
        return _dataflow_launch
    if form == "segments":
        return _segments_launch
    return _fused_marked_launch if marked else _fused_launch


def _starts(made: ForwardLaunches, index: int, *per_call: tuple[str, ...]) -> list[Start]:
    """The functions that make a call's launches, given for each the fields that change."""
    return [
        torch_launch.prepacked_start(
            *(PrepackedLauncher(x.launcher, fields, x.fixed), x.grid, made.arch, index)
        )
        for x, fields in zip(made.launches, per_call, strict=True)
    ]


def _fused_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    made = launches_of(request, strides, state_strides)
    (start,) = _starts(made, index, (*_TOKENS, "o", "h0", "ht", "workspace", *_ROWS, "launch"))
    size, numbers = made.workspace_bytes // 4, fused.LAUNCH_NUMBERS
    shape, unit_stride = (size,), (1,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        workspace = empty(shape, unit_stride, torch.float32) if size else None
        at = 0 if workspace is None else workspace.data_ptr()
        start(stream, tokens + (o, initial, final, at, *rows, next(numbers)))  # noqa: RUF005  # (*a, b) makes a list first

    return launch


def _fused_marked_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    """With checkpoints at chosen tokens, and the launch that they need where a step has more than 16 tokens."""
    made = launches_of(request, strides, state_strides)
    fields = (*_TOKENS, "o", "h0", "ht", "workspace", *_ROWS, *_MARKS, "mark_states", "launch")
    tail_fields = ((*_TOKENS[1:], "ht", "reads", *_MARKS, "mark_states"),) * (len(made.launches) - 1)
    start, *start_tail = _starts(made, index, fields, *tail_fields)
    places, numbers = made.launches[0].arrays, fused.LAUNCH_NUMBERS
    shape, unit_stride = (made.workspace_bytes,), (1,)
    uses_workspace, states_offset = "workspace" in places, places.get("mark_states", ("", 0))[1]

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        workspace = empty(shape, unit_stride, torch.uint8)
        at = workspace.data_ptr()
        states = at + states_offset
        start(stream, (*tokens, o, initial, final, at if uses_workspace else 0, *rows, states, next(numbers)))
        for start_after in start_tail:
            start_after(stream, (*tokens[1:], final, rows[0], *rows[3:], states))

    return launch


def _dataflow_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    made = launches_of(request, strides, state_strides)
    start_prepare, start_walk = _starts(
        *(made, index, (*_TOKENS, "last", "ready", "launch")),
        ("v", "o", "h0", "ht", "chunk_operands", "ready", "launch"),
    )
    places = made.launches[0].arrays
    flags_offset, numbers = places["ready"][1], dataflow.LAUNCH_NUMBERS
    shape, unit_stride = (made.workspace_bytes,), (1,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        workspace = empty(shape, unit_stride, torch.uint8)
        at, number = workspace.data_ptr(), next(numbers)
        ready = at + flags_offset
        start_prepare(stream, (*tokens, at, ready, number))
        start_walk(stream, (tokens[2], o, initial, final, at, ready, number))

    return launch


def _segments_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    made = launches_of(request, strides, state_strides)
    marked = bool(request.checkpoint_count)
    per_unit: tuple[str, ...] = (*_TOKENS, "last")
    per_call: tuple[str, ...] = (
        *("v", "cu_seqlens", "o", "h0", "ht", "chunk_operands", "addends", "maps", "starts"),
        *_ROWS,
    )
    if marked:
        per_unit, per_call = (*_MARKS, *per_unit), (*per_call, *_MARKS, "mark_states")
    others = (per_call,) * (len(made.launches) - 1)
    start_prepare, *start_others = _starts(made, index, per_unit, *others)
    places = {**made.launches[0].arrays, **made.launches[-1].arrays}
    offsets = (places[name][1] for name in ("last", "chunk_operands", "addends", "maps", "starts"))
    records, chunks, addends, maps, starts = offsets
    shape, kept_shape, unit_stride = (made.workspace_bytes,), (made.kept_bytes,), (1,)
    keeps = made.kept_bytes > 0

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> torch.Tensor | None:
        workspace = empty(shape, unit_stride, torch.uint8)
        kept = empty(kept_shape, unit_stride, torch.uint8) if keeps else None
        at = workspace.data_ptr()
        segments = at if kept is None else kept.data_ptr()
        start_prepare(stream, (*rows[3:], *tokens, at + records))
        borders = at + addends, segments + maps, segments + starts
        values = (tokens[2], tokens[7], o, initial, final, at + chunks, *borders, *rows)
        if marked:
            values += (at,)
        for start in start_others:
            start(stream, values)
        return kept

    return launch
