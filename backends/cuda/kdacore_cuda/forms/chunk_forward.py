"""The forward of ``chunk_kda`` on torch tensors."""

from __future__ import annotations

from kdacore.types import ChunkInputs
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms.chunk_launches import launches_of, takes_rows
from kdacore_cuda.forms.launches import FORWARD_ARGUMENTS
from kdacore_cuda.forms.own_head_dims import serves_forward
from kdacore_cuda.forms.torch_forward import TorchOp

CHUNK = TorchOp(
    lambda request, is_plain: launches_of(request),
    FORWARD_ARGUMENTS,
    ChunkInputs._fields,
    takes_rows,
    in_place=serves_forward,
)
forward, make_fast_call = fitted_head_dims.forward(CHUNK.forward, serves_forward), CHUNK.make_fast_call
