"""The launches of ``chunk_kda`` in segments as NumPy functions in float64, and what they leave for one another.

``work`` holds plain matrices by chunk slot and value head: the records, and ``v`` as rows of the input; ``maps`` and
``starts`` are by segment slot and value head. What no kernel writes is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import chunk_backward_model as chunk_model
import numpy as np
import torch
from chunk_backward_model import F64, Chunk
from form_calls import launches_of

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.workspace import CHUNK_OPERANDS_BYTES, MAP_BYTES
from kdacore_reference.oracle import to_float64


class Segment(NamedTuple):
    """Some chunks of a sequence in order, and the segment's slot."""

    chunks: list[Chunk]
    slot: int
    first: bool
    last: bool


def in_segments(request: Request, inputs: ChunkInputs) -> Iterator[Segment]:
    """Every segment that has a chunk, in the order of its sequence."""
    lengths = segment_lengths.lengths_of(request)
    for n, group in groupby(chunk_model.chunks(request, inputs), lambda c: c.n):
        chunks = list(group)
        if inputs.cu_seqlens is None:
            slot = n * lengths.segments(-(-request.T // 64))
        else:
            slot = int(inputs.cu_seqlens[n]) // (64 * lengths.first) + n
        begin, index = 0, 0
        while begin < len(chunks):
            end = begin + lengths.of(index)
            mine = chunks[begin:end]
            yield Segment(mine, slot + index, index == 0, mine[-1].last)
            begin, index = end, index + 1


_ORDER = (("last", 512), ("kt", 16384), ("kd", 16384), ("qg", 16384), ("aqt", 8192))
CHUNK_OPERANDS = {name: (sum(n for _, n in _ORDER[:i]), size) for i, (name, size) in enumerate(_ORDER)}
"""Offset and size in bytes of each matrix of a record."""
WIDTHS = {
    "last": (1, 128),
    "kt": (64, 128),
    "kd": (64, 128),
    "qg": (64, 128),
    "aqt": (64, 64),
    "v": (64, 128),
}


def prepare(request: Request, inputs: ChunkInputs) -> dict[str, F64]:
    """The records (csrc/sm90/chunk_forward/segments/chunk_operands.cuh), and v with zeros past the end."""
    chunk, x = chunk_model.prepare(request, inputs), chunk_model.activate(request, inputs)
    shape = chunk_model.num_slots(request), request.HV
    work = {name: np.full((*shape, *width), np.nan) for name, width in WIDTHS.items()}
    for c in chunk_model.chunks(request, inputs):
        for hv in range(request.HV):
            at = (c.slot, hv)
            _, k, v, beta, log = (chunk_model.rows(a[c.batch, c.tokens, hv]) for a in x[:5])
            T = chunk["inv"][at] * beta
            work["last"][at], work["qg"][at], work["v"][at] = chunk["last"][at][:1], chunk["qg"][at], v
            work["kd"][at] = k * np.exp(np.cumsum(log, 0))
            work["kt"][at], work["aqt"][at] = T.T @ chunk["kg"][at], chunk["aqk"][at] @ T
    return work


def _walk(
    work: dict[str, F64], segment: Segment, hv: int, S: F64, *, values: bool = True
) -> tuple[list[tuple[Chunk, F64, F64]], F64]:
    """Each chunk with the state before it and its r, and the state after the last one."""
    steps = []
    for c in segment.chunks:
        at = (c.slot, hv)
        r = (work["v"][at].T if values else 0.0) - S @ work["kd"][at].T
        steps.append((c, S, r))
        S = S * work["last"][at][0] + r @ work["kt"][at]
    return steps, S


def initial(request: Request, inputs: ChunkInputs, n: int, hv: int) -> F64:
    if inputs.initial_state is None:
        return np.zeros((128, 128))
    state = to_float64(inputs.initial_state[n, hv])
    return state if request.state_v_first else state.T


def slots(request: Request) -> int:
    """Segments of one value head, unused ones of a pack included."""
    lengths = segment_lengths.lengths_of(request)
    if request.packed:
        return request.T // (64 * lengths.first) + request.N
    return request.N * lengths.segments(-(-request.T // 64))


def maps(request: Request, inputs: ChunkInputs, work: dict[str, F64]) -> tuple[F64, F64]:
    """B ``[V, K]`` and A ``[K, K]`` of every segment but a sequence's last."""
    places = slots(request), request.HV, 128, 128
    B, A = np.full(places, np.nan), np.full(places, np.nan)
    for s in in_segments(request, inputs):
        for hv in range(request.HV):
            if s.last:
                continue
            _, B[s.slot, hv] = _walk(work, s, hv, np.zeros((128, 128)))
            _, A[s.slot, hv] = _walk(work, s, hv, np.eye(128), values=False)
    return B, A


def chain(request: Request, inputs: ChunkInputs, B: F64, A: F64) -> F64:
    """The state at the start of every segment: of a sequence's first where it begins with a state and has others."""
    starts = np.full_like(B, np.nan)
    for s in in_segments(request, inputs):
        for hv in range(request.HV):
            if not s.last:
                at = s.slot, hv
                if s.first and inputs.initial_state is None:
                    starts[s.slot + 1, hv] = B[at]
                    continue
                if s.first:
                    starts[at] = initial(request, inputs, s.chunks[0].n, hv)
                starts[s.slot + 1, hv] = starts[at] @ A[at] + B[at]
    return starts


def output(
    request: Request, inputs: ChunkInputs, work: dict[str, F64], starts: F64
) -> tuple[F64, F64, list[F64]]:
    """o ``[B, T, HV, V]``, final states and the checkpoints in their order, both V first."""
    o = np.zeros((request.B, request.T, request.HV, 128))
    final = np.stack(
        [[initial(request, inputs, n, hv) for hv in range(request.HV)] for n in range(request.N)]
    )
    kept: list[F64] = []
    for s in in_segments(request, inputs):
        rows: list[F64] = []
        for hv in range(request.HV):
            begin = initial(request, inputs, s.chunks[0].n, hv) if s.first else starts[s.slot, hv]
            steps, end = _walk(work, s, hv, begin)
            if s.last:
                final[s.chunks[0].n, hv] = end
            for c, S, r in steps:
                at = (c.slot, hv)
                o_c = work["qg"][at] @ S.T + work["aqt"][at] @ r.T
                o[c.batch, c.tokens, hv] = o_c[: c.tokens.stop - c.tokens.start]
            rows.append(np.stack([S for _, S, _ in steps]))
        kept.extend(np.stack(rows, 1))
    return o, final, kept


class Views(NamedTuple):
    """A call's workspace."""

    operands: torch.Tensor
    addends: torch.Tensor
    maps: torch.Tensor
    starts: torch.Tensor


def views(request: Request, work: torch.Tensor) -> Views:
    numbers, HV = launches_of("segments", request).numbers, request.HV
    offsets = [int(numbers[f"{name}_at"]) for name in ("operands", "addends", "maps", "starts")]
    operands, addends, maps, starts = (work[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True))
    return Views(
        operands.view(-1, HV, CHUNK_OPERANDS_BYTES),
        addends.view(torch.float32).view(-1, HV, 128, 128),
        maps.view(-1, HV, MAP_BYTES),
        starts.view(torch.float32).view(-1, HV, 128, 128),
    )


def put_operands(view: torch.Tensor, work: dict[str, F64]) -> None:
    """Matrices to records; NaN where they are NaN."""
    for name, (first, size) in CHUNK_OPERANDS.items():
        x = work[name]
        part = torch.from_numpy(x[..., 0, :]).float() if name == "last" else chunk_model.to_images(x)
        view[..., first : first + size] = part.contiguous().view(torch.uint8).view(*part.shape[:2], size)


def get_operands(view: torch.Tensor) -> dict[str, F64]:
    out = {}
    for name, (first, size) in CHUNK_OPERANDS.items():
        part = view[..., first : first + size].cpu().contiguous()
        if name == "last":
            out[name] = to_float64(part.view(torch.float32))[..., None, :]
        else:
            out[name] = chunk_model.from_images(part.view(torch.bfloat16), *WIDTHS[name])
    return out


def put_maps(view: Views, B: F64, A: F64) -> None:
    high = torch.from_numpy(A).to(torch.bfloat16)
    low = torch.from_numpy(A - to_float64(high)).to(torch.bfloat16)
    parts = [chunk_model.to_images(to_float64(x)).view(torch.uint8).flatten(2) for x in (high, low)]
    view.maps.copy_(torch.cat(parts, -1))
    view.addends.copy_(torch.from_numpy(chunk_model.to_tiles(B)).float().reshape(view.addends.shape))


def get_maps(view: Views) -> tuple[F64, F64]:
    B = chunk_model.from_tiles(to_float64(view.addends.cpu()))
    A: Any = 0.0
    for part in view.maps.cpu().chunk(2, -1):
        A = A + chunk_model.from_images(part.contiguous().view(torch.bfloat16), 128, 128)
    return B, A
