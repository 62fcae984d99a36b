"""The form that serves a call, in words, for whoever asks: ``OpImpl.form`` and that of slices."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.choice import Choice, Figures, choose
from kdacore_cuda.forms.backward.segments_kernels import chunks_per_segment
from kdacore_cuda.forms.chosen import figures_of
from kdacore_cuda.forms.segments.sizes import choose_lengths
from kdacore_cuda.runtime import device_figures

CHUNK = 64
_ASSUMED = {HOPPER: 132, "sm_100f": 148}
"""Multiprocessors by real architecture: of an H100 or H200, and of a B200. Those of other architectures do not
decide."""


def assumed_figures(r: Request) -> Figures:
    """Figures for a request whose device is not here."""
    arch = device_figures.arch_of(r)
    return Figures(arch, _ASSUMED.get(arch, 0), lambda cluster: 0, lambda: 0.0)


def form(request: Request) -> str:
    """The form that serves a request, and the numbers that decided, in words: see
    :attr:`kdacore.types.OpImpl.form`."""
    r = request
    if device_figures.is_here(r):
        r = device_figures.planned(r)
        device = figures_of(r)
        return _text(r, device, choose(r, device))
    device = assumed_figures(r)
    return _text(r, device, choose(r, device)) + ("; the device is assumed" if device.multiprocessors else "")


def _text(r: Request, device: Figures, choice: Choice) -> str:
    parts = [f"{choice.form}: {choice.why}"]
    if choice.form == "segments":
        count = choose_lengths(r.N * r.HV, device.multiprocessors, r.packed).segments(-(-r.T // CHUNK))
        segments = f"{count} segment{'s' if count != 1 else ''}"
        parts.append(f"up to {segments} a sequence" if r.packed else segments)
    clusters = choice.clusters
    if clusters is not None and clusters.size > 1:
        parts.append(f"clusters of {clusters.size}")
        parts += [f"{clusters.resident} at once"] if clusters.resident else []
        parts += [f"{clusters.preparing} more prepare"] if clusters.preparing else []
        parts += ["many short sequences"] if clusters.many_short else []
    text = ", ".join(parts)
    return f"{text}; backward {_backward(r, choice)}" if r.op == "chunk_kda" and r.needs_grad else text


def _backward(r: Request, choice: Choice) -> str:
    if choice.saves:
        return {"operands": "from what the forward saves", "maps": "from the maps of segments"}[choice.saves]
    if choice.backward_in_segments:
        return f"in segments of {chunks_per_segment(r.N * r.HV)} chunks"
    return "in one chain per head"
