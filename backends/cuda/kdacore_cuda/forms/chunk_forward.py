"""The forward of ``chunk_kda`` by the form that serves a call, as an eager call from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kdacore.lazy import lazy_function
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.choice_on_device import chosen

_FORWARD: Mapping[str, Callable[..., Outputs]] = {
    form: lazy_function(__package__, f"{form}.forward", "forward")
    for form in ("dataflow", "fused", "kept", "segments")
}
"""Each is imported by the first call that it serves."""


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` on CUDA tensors. Nothing is read back from the device.

    Args:
        request: bfloat16 q, k and v, K = V = 64 or 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        ``o`` ``[B, T, HV, V]``; the final state (``request.state_shape``, or the pool itself where
        states are written in place) and the checkpoints (``request.checkpoint_shape``) where the
        request asks for them; what :mod:`kdacore_cuda.forms.kept.sizes` or
        :mod:`kdacore_cuda.forms.segments.saved` says in ``saved``.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    return _FORWARD[chosen(request).form](request, inputs)
