"""What ranks exchange, and how long a call on several of them takes, from what one rank's part would take.

The link is that of GPUs of one host behind an NVLink switch. Across hosts the exchange takes several times as long; the
work is the same.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kdacore.dispatch import selection
from kdacore.parallel.agreement import HEAD_BYTES
from kdacore.parallel.call_marks import MARKS
from kdacore.registry import REGISTRY
from kdacore.types import Request, SliceFunctions, TensorSpec

LINK_BYTES = 75e9
"""Bytes per second that a GPU receives in a gather of a few MiB: two H100s, NCCL 2.28, NVLink."""
LINK_START = 18e-6
"""Seconds before a collective moves anything, there."""
OWN_WORK = 1.1
"""Work of a slice served by a backend's own functions, in units of the plain call on its rows, where the backend does
not say how long it takes."""
COMPOSED_FORWARD, COMPOSED_BACKWARD = 3.0, 2.0
"""The same of composed functions: the calls that they consist of."""
FORWARD_SHARE = 0.25
"""The forward's part of a training step."""
_SIZES = {"float32": 4, "float64": 8}


class Exchange(NamedTuple):
    """Bytes that each rank receives in one call, whatever the length of the row."""

    forward: int
    """Transitions and states of the other ranks."""
    backward: int
    """Gradients of states of the other ranks; 0 where no gradient is wanted."""
    final_states: int
    """Final states, and their gradients, summed over ranks; 0 where they are not asked for."""
    collectives: int
    """How many there are."""

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.final_states


def exchange_of(request: Request, ranks: int) -> Exchange:
    """What the ranks of a call exchange.

    Args:
        request: of a slice.
        ranks: their number.
    """
    r, size = request, _SIZES[request.state_dtype]
    rows = 1 if r.packed else r.B
    state = r.HV * r.K * r.V * size
    marks = (
        MARKS * size if r.kind == "torch" else 0
    )  # by which each rank sees whether the others make the same call
    # Before that, where the ranks meet on the host, the heads of their steps.
    heads = r.kind == "torch" and r.device.type == "cpu"
    marks += HEAD_BYTES if heads else 0
    forward = (ranks - 1) * (rows * r.HV * r.K * (r.K + r.V) * size + marks)
    backward = (ranks - 1) * (rows * state + marks) if r.needs_grad else 0
    # A ring sums in two rounds, each of which brings (ranks - 1) / ranks of the array.
    summed = 2 * (ranks - 1) * r.N * state // ranks if r.output_final_state else 0
    rounds = 1 + r.needs_grad
    return Exchange(forward, backward, summed * rounds, rounds * (1 + heads + r.output_final_state))


def seconds_on_ranks(
    request: Request, backend: str, ranks: int, functions: SliceFunctions, composed: bool
) -> float | None:
    """Predicted seconds of one call on several ranks; None where the cost of a rank's rows is not known."""
    work = functions.seconds
    if work is None:
        plain = _cost(request, backend)
        if plain is None:
            return None
        factor = OWN_WORK
        if composed:
            forward = FORWARD_SHARE if request.needs_grad else 1.0
            factor = forward * COMPOSED_FORWARD + (1 - forward) * COMPOSED_BACKWARD
        work = factor * plain
    moved = exchange_of(request, ranks)
    link = moved.total / LINK_BYTES + moved.collectives * LINK_START if request.device.type == "cuda" else 0.0
    return work + link


def seconds_alone(request: Request, backend: str, ranks: int) -> float | None:
    """Predicted seconds of the whole row on one device; None where unknown.

    Where the row is longer than anything measured, the slice's times the ranks: long rows take their time by the token.
    """
    tokens = ("q", "k", "v", "g", "beta")
    specs = tuple(
        [
            (n, TensorSpec((s.shape[0], ranks * s.shape[1], *s.shape[2:]), s.dtype) if n in tokens else s)
            for n, s in request.tensors
        ]
    )
    found = _cost(dataclasses.replace(request, T=ranks * request.T, tensors=specs), backend)
    if found is None and (slice := _cost(request, backend)) is not None:
        return ranks * slice
    return found


def _cost(request: Request, backend: str) -> float | None:
    judged = selection.judge(REGISTRY.get(backend), request, assumed=True)
    return selection.with_costs(request, (judged,))[0].cost
