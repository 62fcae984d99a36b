"""The forward of ``chunk_kda`` by the form that serves a call: as an eager call from torch, and as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.chosen import chosen
from kdacore_cuda.forms.dataflow import forward as dataflow
from kdacore_cuda.forms.dataflow import launches as dataflow_launches
from kdacore_cuda.forms.fused import forward as fused
from kdacore_cuda.forms.fused import launches as fused_launches
from kdacore_cuda.forms.kept import forward as kept
from kdacore_cuda.forms.places import ForwardLaunches, Places, arrays_of
from kdacore_cuda.forms.segments import forward as segments
from kdacore_cuda.forms.segments import launches as segments_launches
from kdacore_cuda.request_encoding import contiguous_token_strides
from kdacore_cuda.runtime.launch_sequence import check_launches

_FORWARD: Mapping[str, Callable[[Request, ChunkInputs], Outputs]] = {
    "dataflow": dataflow.forward,
    "fused": fused.forward,
    "kept": kept.forward,
    "segments": segments.forward,
}


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


def launches_of(
    request: Request,
    strides: tuple[int, ...] = (),
    state_rows: tuple[int, int] | None = None,
    g_type: str = "",
) -> ForwardLaunches:
    """The launches of :func:`forward`, but for those that save operands
    (:func:`kdacore_cuda.forms.kept.fast_path.launches_of`).

    Args:
        request: the call.
        strides: batch, token and head strides of q, k, v, g and beta, in elements; those of contiguous
            arrays if not given.
        state_rows: elements from a row of the states read, and of those written, to the next; likewise.
        g_type: dtype of the g that kernels are given, where it is not the request's.
    """
    r, row = request, request.HV * request.K * request.V
    arrays: Places = {field: (name, 0) for field, name in arrays_of(r).items()}
    arrays["launch"] = ("launch", 0)
    strides, rows = strides or contiguous_token_strides(r), state_rows or (row, row)
    form = chosen(r).form
    if form == "dataflow":
        made = dataflow_launches.launches_of(r, arrays, strides)
    elif form == "segments":
        made = segments_launches.launches_of(r, arrays, strides, rows)
    else:
        made = fused_launches.launches_of(r, arrays, strides, rows, g_type or r.spec("g").dtype)
    check_launches(made.launches)
    return made
