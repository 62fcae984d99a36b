"""The chunk backward of a slice of a row that continues on other ranks, cut where ranks exchange gradients of states.

Before the exchange: prepare, and a scan with a gradient of zero behind the slice, of which only the gradient at its
start is kept. After it: the scan with the gradient that the ranks behind give, and the launches that follow a scan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request

from .chunk_backward import Work, _run_grads, _run_prepare, _run_scan
from .chunk_backward_plan import plan_backward


class Pending(NamedTuple):
    """What :func:`backward_finish` needs of :func:`backward_begin`."""

    inputs: ChunkInputs
    """Contiguous, with the states that the parts start from."""
    work: Work
    do: torch.Tensor


def backward_begin(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    grads: OutputGrads,
    starts: torch.Tensor,
    entering: torch.Tensor | None,
) -> tuple[torch.Tensor, Pending]:
    """The gradient at the start of the entering part; see :class:`kdacore.types.SliceFunctions`."""
    plan = plan_backward(request)
    x = ChunkInputs(*(None if a is None else a.contiguous() for a in inputs[:9]))
    x = x._replace(initial_state=starts.contiguous())
    do = torch.zeros_like(x.v) if grads.o is None else grads.o.contiguous()
    d_final = None if grads.final_state is None else grads.final_state.contiguous()
    work = _run_prepare(request, plan, x)
    # The scan writes v' in the place of u.
    found = _run_scan(request, plan, x, {**work, "uT": work["uT"].clone()}, do, d_final)
    if found is None:
        raise TypeError("a slice has states that its parts start from")
    if entering is not None:
        found = found.index_select(0, entering)
    return found, Pending(x, work, do)


def backward_finish(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    pending: Pending,
    grads: OutputGrads,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> InputGrads:
    """The gradients; see :class:`kdacore.types.SliceFunctions`."""
    plan, (x, work, do) = plan_backward(request), pending
    d_start = _run_scan(request, plan, x, work, do, ends.contiguous())
    return _run_grads(request, plan, x, work, do, d_start)
