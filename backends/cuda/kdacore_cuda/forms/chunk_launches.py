"""The forward of ``chunk_kda`` by the form that serves a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kdacore.lazy import lazy_function
from kdacore.types import Request
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.launches import Launches

_LAUNCHES: Mapping[str, Callable[[Request], Launches]] = {
    form: lazy_function(__package__, f"{form}.launches", "launches_of")
    for form in ("dataflow", "fused", "saving_forward", "segments")
}
"""Each is imported by the first call that it serves."""


def launches_of(request: Request) -> Launches:
    """The launches of ``chunk_kda`` on contiguous arrays, bfloat16 q, k and v, K = V = 64 or 128. What the
    form saves for the backward is the buffer ``saved``."""
    return _LAUNCHES[chosen(request).form](request)


def takes_rows(request: Request) -> bool:
    """Whether the form reads and writes states whose rows lie apart."""
    return chosen(request).form in ("fused", "segments")
