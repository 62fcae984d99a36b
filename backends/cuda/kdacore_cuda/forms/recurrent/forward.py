"""``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on torch tensors, in one launch."""

from __future__ import annotations

from kdacore.types import RecurrentInputs
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.launches import ARRAYS, launches_of
from kdacore_cuda.forms.torch_forward import TorchOp

RECURRENT = TorchOp(
    lambda request, is_plain: launches_of(request, None if is_plain else RecurrentMode.GENERAL),
    ARRAYS,
    RecurrentInputs._fields,
    takes_rows=lambda request: True,
    aligned_bias_and_states=True,
    takes_float16_gate=True,
)
forward, make_fast_call = RECURRENT.forward, RECURRENT.make_fast_call
