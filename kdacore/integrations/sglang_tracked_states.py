"""Whether SGLang reads the states at the starts of chunks that its prefill of the gated delta rule returns.

Its Triton kernel returns them from every call. SGLang reads them only where its prefix cache tracks a position that is
no sequence's end, which its attention backend knows and does not tell the kernel. Not to write them saves more memory
traffic than the rest of the prefill has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
"""The module of ``GDNAttnBackend``."""

_read: ContextVar[bool] = ContextVar("kdacore_sglang_chunk_states_are_read", default=True)


def are_read() -> bool:
    """Are the states of the prefill that runs now read? True outside of an observed ``forward_extend``."""
    return _read.get()


def observed(forward_extend: Callable[..., Any]) -> Callable[..., Any]:
    """``GDNAttnBackend.forward_extend``, noting while it runs whether it reads the states."""

    @functools.wraps(forward_extend)
    def observing(backend: Any, *args: Any, **kwargs: Any) -> Any:
        before = _read.set(_reads(backend.forward_metadata))
        try:
            return forward_extend(backend, *args, **kwargs)
        finally:
            _read.reset(before)

    return observing


def _reads(metadata: Any) -> bool:
    """By attributes that SGLang 0.5.17 to 0.5.23 have; True where one is missing."""
    if not getattr(metadata, "has_mamba_track_mask", True):
        return False
    rows = getattr(metadata, "track_ssm_h_src", None)
    return rows is None or rows.numel() > 0
