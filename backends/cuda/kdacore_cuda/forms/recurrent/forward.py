"""``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on torch tensors, in one launch; in two
with records of candidates."""

from __future__ import annotations

from kdacore.types import FastCall, Outputs, RecurrentInputs, Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.launches import ARRAYS, launches_of
from kdacore_cuda.forms.recurrent.record_numbers import RECORD_ARRAYS
from kdacore_cuda.forms.torch_forward import TorchOp


def _op(*more: str) -> TorchOp:
    """With arrays beside :data:`kdacore_cuda.forms.recurrent.launches.ARRAYS`."""
    return TorchOp(
        lambda request, is_plain: launches_of(request, None if is_plain else RecurrentMode.GENERAL),
        (*ARRAYS, *more),
        RecurrentInputs._fields,
        takes_rows=lambda request: True,
        aligned_bias_and_states=True,
        takes_float16_gate=True,
    )


RECURRENT, WITH_RECORDS = _op(), _op(*RECORD_ARRAYS)


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """The ops on CUDA tensors, of any layout. Raises BackendBuildError or DriverError."""
    return _op_of(inputs).forward(request, inputs)


def make_fast_call(request: Request, inputs: RecurrentInputs) -> FastCall | None:
    """As :meth:`kdacore_cuda.forms.torch_forward.TorchOp.make_fast_call`."""
    return _op_of(inputs).make_fast_call(request, inputs)


def _op_of(inputs: RecurrentInputs) -> TorchOp:
    return RECURRENT if inputs.record_update is None else WITH_RECORDS
