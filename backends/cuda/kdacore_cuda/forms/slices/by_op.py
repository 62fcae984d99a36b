"""The launches of a slice, of either op."""

from __future__ import annotations

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.gated_delta import slices as gated_delta
from kdacore_cuda.forms.slices import launches as kda
from kdacore_cuda.forms.slices.halves import BackwardSliceLaunches, ForwardSliceLaunches


def forward_launches(r: Request) -> ForwardSliceLaunches:
    """Those of a slice's forward, given contiguous arrays."""
    return gated_delta.forward_launches(r) if r.scalar_gate else kda.forward_launches(r)


def backward_launches(r: Request, wanted: InputGrads, saved: bool = False) -> BackwardSliceLaunches:
    """Those of a slice's backward, given contiguous arrays.

    Args:
        r: the slice's call.
        wanted: for each gradient whether a call returns it.
        saved: the forward's maps and states of segments are there.
    """
    op = gated_delta.backward_launches if r.scalar_gate else kda.backward_launches
    return op(r, wanted, saved)
