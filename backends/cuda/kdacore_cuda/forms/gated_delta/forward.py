"""``chunk_gated_delta_rule`` on torch tensors."""

from __future__ import annotations

from kdacore.types import ChunkInputs
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms.gated_delta.launches import launches_of
from kdacore_cuda.forms.launches import FORWARD_ARGUMENTS
from kdacore_cuda.forms.torch_forward import TorchOp

GATED_DELTA = TorchOp(
    lambda request, is_plain: launches_of(request),
    FORWARD_ARGUMENTS,
    ChunkInputs._fields,
    takes_rows=lambda request: True,
    takes_float16_gate=True,
)
forward, make_fast_call = fitted_head_dims.forward(GATED_DELTA.forward), GATED_DELTA.make_fast_call
