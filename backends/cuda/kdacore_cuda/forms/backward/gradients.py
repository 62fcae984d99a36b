"""Gradients of ``chunk_kda`` on torch tensors."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms.backward.launches import launches_of
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.chunk_numbers import CHUNK as CHUNK_TOKENS
from kdacore_cuda.forms.own_head_dims import serves_backward
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.torch_gradients import TorchGradients


def saved_kind(r: Request) -> str:
    """What the forward of a request saves: as :attr:`kdacore_cuda.choice.Choice.saves`, but nothing of calls whose
    sequences have one segment.

    A backward without it recomputes it: operands to the same bits
    (:mod:`kdacore_cuda.forms.backward.workspace`), maps of other segments
    (:mod:`kdacore_cuda.forms.segments.workspace`).
    """
    saves = chosen(r).saves
    if saves == "maps" and segment_lengths.lengths_of(r).segments(-(-r.T // CHUNK_TOKENS)) < 2:
        return ""
    return saves


CHUNK_GRADIENTS = TorchGradients(CHUNK, launches_of, saved_kind)
backward = fitted_head_dims.backward(CHUNK_GRADIENTS.backward, serves_backward)
make_fast_gradients = CHUNK_GRADIENTS.make_fast_gradients
