"""Which calls on a slice of a row that continues on other ranks have launches of their own."""

from __future__ import annotations

from kdacore.types import Request, SliceFunctions
from kdacore_triton import chunk_backward_slices, chunk_forward_slices
from kdacore_triton.chunk_forward_choice import MAX_SEGMENTED

_FUNCTIONS = SliceFunctions(
    chunk_forward_slices.begin,
    chunk_forward_slices.finish,
    chunk_backward_slices.backward_begin,
    chunk_backward_slices.backward_finish,
)


def slice_functions(request: Request) -> SliceFunctions | None:
    """The functions for slices of up to :data:`MAX_SEGMENTED` channels of k; None where a slice is composed of whole
    calls."""
    return _FUNCTIONS if request.K <= MAX_SEGMENTED else None
