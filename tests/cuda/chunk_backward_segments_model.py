"""The launches of the backward in segments as NumPy functions in float64, and what they leave for one another.

``work`` holds plain matrices by chunk slot and value head, as :mod:`chunk_backward_model` makes them; A, starts and
ends are by segment slot and value head. What no kernel writes is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import chunk_backward_model as chunk_model
import numpy as np
import torch
from chunk_backward_model import F64, Chunk
from single_launches import in_segments as in_segments_of

from kdacore.types import ChunkInputs, Request
from kdacore_reference.oracle import to_float64


class Segment(NamedTuple):
    """Some chunks of a sequence in order, and the segment's slot."""

    chunks: list[Chunk]
    slot: int
    first: bool
    last: bool


def in_segments(request: Request, inputs: ChunkInputs) -> Iterator[Segment]:
    """Every segment that has a chunk, in the order of its sequence."""
    each = in_segments_of(request).sizes["segment"]
    for n, group in groupby(chunk_model.chunks(request, inputs), lambda c: c.n):
        chunks = list(group)
        if inputs.cu_seqlens is None:
            slot = n * -(-request.T // (64 * each))
        else:
            slot = int(inputs.cu_seqlens[n]) // (64 * each) + n
        for j in range(0, len(chunks), each):
            mine = chunks[j : j + each]
            yield Segment(mine, slot + j // each, j == 0, mine[-1].last)


class Maps(NamedTuple):
    """What maps leaves, each ``[segments, HV, 128, 128]``."""

    A: F64
    starts: F64
    """B of the segment before."""
    ends: F64
    """B' of the segment behind."""


def _of_sequence(request: Request, states: Any, n: int, hv: int) -> F64:
    """A sequence's state V first; zero without one."""
    if states is None:
        return np.zeros((128, 128))
    state = to_float64(states[n, hv])
    return state if request.state_v_first else state.T


def empty(request: Request, inputs: ChunkInputs) -> F64:
    places = in_segments_of(request).stored_segments // request.HV, request.HV, 128, 128
    return np.full(places, np.nan)


def maps(request: Request, inputs: ChunkInputs, work: dict[str, F64], do: Any, d_final: Any) -> Maps:
    """A of every segment but a sequence's first and last; B where the next segment starts, B' where the one before
    ends."""
    made = Maps(*(empty(request, inputs) for _ in range(3)))
    do = to_float64(do)
    for s in in_segments(request, inputs):
        n = s.chunks[0].n
        for hv in range(request.HV):
            if not s.last:
                S = _of_sequence(request, inputs.initial_state if s.first else None, n, hv)
                made.starts[s.slot + 1, hv] = _forward(work, s, hv, S, values=True)
                if not s.first:
                    made.A[s.slot, hv] = _forward(work, s, hv, np.eye(128), values=False)
            if not s.first:
                dS = _of_sequence(request, d_final if s.last else None, n, hv)
                made.ends[s.slot - 1, hv] = _reverse(work, s, hv, dS, do)
    return made


def _forward(work: dict[str, F64], segment: Segment, hv: int, S: F64, *, values: bool) -> F64:
    for c in segment.chunks:
        at = (c.slot, hv)
        v = (work["u"][at] if values else 0.0) - S @ work["w"][at].T
        S = S * work["last"][at][0] + v @ work["kg"][at]
    return S


def _reverse(work: dict[str, F64], segment: Segment, hv: int, dS: F64, do: F64) -> F64:
    for c in reversed(segment.chunks):
        at = (c.slot, hv)
        o = np.zeros((128, 64))
        o[:, : c.tokens.stop - c.tokens.start] = do[c.batch, c.tokens, hv].T
        dv = dS @ work["kg"][at].T + o @ work["aqk"][at]
        dS = dS * work["last"][at][0] + o @ work["qg"][at] - dv @ work["w"][at]
    return dS


def chain(request: Request, inputs: ChunkInputs, made: Maps) -> tuple[F64, F64]:
    """The state at the start of every segment but a sequence's first, its gradient at the end of every segment but a
    sequence's last."""
    starts, ends = made.starts.copy(), made.ends.copy()
    segments = list(in_segments(request, inputs))
    for hv in range(request.HV):
        for s in segments:
            if not s.first and not s.last:
                starts[s.slot + 1, hv] += starts[s.slot, hv] @ made.A[s.slot, hv]
        for s in reversed(segments):
            if not s.first and not s.last:
                ends[s.slot - 1, hv] += ends[s.slot, hv] @ made.A[s.slot, hv].T
    return starts, ends


def put_maps(A: F64) -> torch.Tensor:
    """A in two bfloat16 parts, as images."""
    high = to_float64(torch.from_numpy(A).to(torch.bfloat16))
    return torch.cat([chunk_model.to_images(x).flatten(2) for x in (high, A - high)], -1)


def get_maps(images: torch.Tensor) -> F64:
    high, low = (chunk_model.from_images(x, 128, 128) for x in images.cpu().chunk(2, -1))
    return high + low
