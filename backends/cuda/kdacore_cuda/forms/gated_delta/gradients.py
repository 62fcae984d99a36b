"""Gradients of ``chunk_gated_delta_rule`` on torch tensors."""

from __future__ import annotations

from kdacore.types import InputGrads, Request
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.gated_delta.backward_launches import launches_of
from kdacore_cuda.forms.gated_delta.forward import GATED_DELTA
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.torch_gradients import TorchGradients


def _in_one_group(r: Request, wanted: InputGrads, saved: str) -> tuple[None, Launches]:
    return None, launches_of(r, wanted, saved)


GATED_DELTA_GRADIENTS = TorchGradients(GATED_DELTA, _in_one_group, lambda r: chosen(r).saves)
backward = fitted_head_dims.backward(GATED_DELTA_GRADIENTS.backward)
make_fast_gradients = GATED_DELTA_GRADIENTS.make_fast_gradients
