"""The form that serves a call as text, for ``OpImpl.form`` and ``SliceFunctions.form``."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.choice import Choice, Figures, amount_of, choose, finishes_as_whole
from kdacore_cuda.fitted_head_dims import blocks_of, fitted_request, is_fitted
from kdacore_cuda.forms.choice_on_device import figures_of
from kdacore_cuda.forms.chunk_numbers import CHUNK
from kdacore_cuda.forms.gated_delta import backward_segments, segments
from kdacore_cuda.forms.own_head_dims import serves_forward
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.runtime import device_figures

_ASSUMED = {HOPPER: 132, "sm_100f": 148}
"""Multiprocessors by real architecture: of an H100 or H200, and of a B200. Those of other architectures do not
decide."""


def form(request: Request) -> str:
    """The form that serves a request, and the numbers that decided, in words: see
    :attr:`kdacore.types.OpImpl.form`."""
    if is_fitted(request):
        blocks = blocks_of(request)
        made = f"{f'{blocks} value heads' if blocks > 1 else 'a head'} of 128 for each"
        copies = "" if device_figures.is_here(request) and serves_forward(request) else ", on copies"
        return f"{made}{copies}, {form(fitted_request(request))}"
    r, device, assumed = _planned(request)
    return _text(r, device, choose(r, device)) + assumed


def form_of_slice(request: Request) -> str:
    """The same of a slice of a row that continues on other ranks."""
    r, device, assumed = _planned(request)
    count, items = device.multiprocessors, r.N * r.HV
    amount = amount_of(r)
    if r.op == "chunk_kda" and finishes_as_whole(items, r.packed, count):
        text = f"{amount} (at least 4 items for each of {count} multiprocessors), results by a whole call"
    else:
        chunks = segment_lengths.slice_segment_chunks(-(-r.T // CHUNK), r.B * r.HV, count)
        text = f"{amount}, segments of {chunks} chunks"
    return f"slices: {text}{assumed}"


def _planned(request: Request) -> tuple[Request, Figures, str]:
    """The request as kernels are planned for it, figures of its device, and in words whether those are assumed."""
    if device_figures.is_here(request):
        r = device_figures.planned(request)
        return r, figures_of(r), ""
    arch = device_figures.arch_of(request)
    device = Figures(arch, _ASSUMED.get(arch, 0), lambda cluster: 0, lambda: 0.0)
    return request, device, "; the device is assumed" if device.multiprocessors else ""


def _text(r: Request, device: Figures, choice: Choice) -> str:
    parts = [f"{choice.form}: {choice.why}"]
    if choice.form == "segments" or choice.cut:
        call = r.N * r.HV, device.multiprocessors
        lengths = (
            segments.choose_lengths(*call) if choice.cut else segment_lengths.choose_lengths(*call, r.packed)
        )
        count = lengths.segments(-(-r.T // CHUNK))
        parts.append(_segments(r, 1 if choice.cut and count < segments.LEAST_SEGMENTS else count))
    clusters = choice.clusters
    if clusters is not None and clusters.size > 1:
        parts.append(f"clusters of {clusters.size}")
        parts += [f"{clusters.resident} at once"] if clusters.resident else []
        parts += [f"{clusters.preparing} more prepare"] if clusters.preparing else []
        parts += ["many short sequences"] if clusters.many_short else []
    has_backward = r.op.startswith("chunk_") and r.needs_grad
    backward = f"; backward {_backward(r, device.multiprocessors, choice)}" if has_backward else ""
    return ", ".join(parts) + backward


def _segments(r: Request, count: int) -> str:
    segments = f"{count} segment{'s' if count != 1 else ''}"
    return f"up to {segments} a sequence" if r.packed else segments


def _backward(r: Request, multiprocessors: int, choice: Choice) -> str:
    if choice.saves:
        return {"operands": "from what the forward saves", "maps": "from the maps of segments"}[choice.saves]
    if not choice.backward_in_segments:
        return "in one chain per head"
    if r.scalar_gate:
        count = backward_segments.choose_lengths(r.N * r.HV, multiprocessors).segments(-(-r.T // CHUNK))
        return f"in {_segments(r, count)}" if count > 1 else "in one chain per head"
    return f"in segments of {segment_lengths.backward_segment_chunks(r.N * r.HV)} chunks"
