"""The launches of the forward of ``chunk_kda`` as data, by the form that serves a call. Cached calls from torch
prepack them, and calls from JAX are made of them."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.array_places import ForwardLaunches, Places, arrays_of
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.dataflow import launches as dataflow
from kdacore_cuda.forms.fused import launches as fused
from kdacore_cuda.forms.segments import launches as segments
from kdacore_cuda.request_encoding import contiguous_token_strides
from kdacore_cuda.runtime.launch_sequence import check_launches


def launches_of(
    request: Request,
    strides: tuple[int, ...] = (),
    state_rows: tuple[int, int] | None = None,
    g_type: str = "",
) -> ForwardLaunches:
    """The launches of :func:`kdacore_cuda.forms.chunk_forward.forward`, but for those that save operands
    (:func:`kdacore_cuda.forms.kept.launches.launches_of`).

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
        made = dataflow.launches_of(r, arrays, strides)
    elif form == "segments":
        made = segments.launches_of(r, arrays, strides, rows)
    else:
        made = fused.launches_of(r, arrays, strides, rows, g_type or r.spec("g").dtype)
    check_launches(made.launches)
    return made
