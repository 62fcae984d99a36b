"""The states that SGLang's prefix cache tracks, written to their slots by the prefill itself.

SGLang's Triton kernels return the state at the start of every 64 tokens, of which its attention backend copies a few to
slots of the pool, or none. Which ones is in the backend's metadata, which the kernel does not see. Here the backend's
prefill is observed, so that kdacore writes the few states where they belong, as checkpoints, and none else: all of them
are about as much memory traffic as the rest of the prefill.

Where the backend is not observed, or not as SGLang 0.5.17 to 0.5.23 have it, nothing of this applies, and the states
are returned as SGLang's kernels do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdacore.integrations.hooks import Patches
from kdacore.integrations.sglang_parts import CHUNK, WRITTEN

_BACKENDS = "sglang.srt.layers.attention.linear"
OBSERVED = {f"{_BACKENDS}.gdn_backend": "GDNAttnBackend", f"{_BACKENDS}.kda_backend": "KDAAttnBackend"}
"""The attention backends, by module."""
_PREFILL, _TRACK = "forward_extend", "_track_mamba_state_extend"
_ATTRIBUTE = "kdacore_tracked"


class _Prefill(NamedTuple):
    """The prefill of one layer, as it runs."""

    metadata: Any
    layer: int


class _Tracked(NamedTuple):
    """What is tracked in one forward pass."""

    source: tuple[Any, ...]
    """The arrays of the metadata that it was made of."""
    layer: int
    """The last layer that asked. They ask in order: one that does not come later begins another pass."""
    offsets: Tensor
    rows: Tensor
    without_rows: Any
    """The metadata with nothing left to be copied of the states at chunk starts."""


_running: ContextVar[_Prefill | None] = ContextVar("kdacore_sglang_prefill", default=None)


def observe(module: ModuleType, patches: Patches) -> None:
    """Observe the backend of a module, where it is as expected."""
    backend = getattr(module, OBSERVED[module.__name__], None)
    if hasattr(backend, _PREFILL) and hasattr(backend, _TRACK):
        patches.replace(backend, _PREFILL, _observed)
        patches.replace(backend, _TRACK, _tracking_the_rest)


def wanted(cache_indices: Any) -> dict[str, Any]:
    """What the translation of ``extend`` is told of the prefill that runs: whether the states at chunk starts are read,
    or else which are to be written, and to which rows of the pool.

    Args:
        cache_indices: of the call. Where the pool was gathered for it they are not the metadata's, and its rows are not
            the pool's.
    """
    running = _running.get()
    if running is None:
        return {}
    metadata = running.metadata
    if not _reads(metadata):
        return {"chunk_states": False}
    if cache_indices is not getattr(metadata, "mamba_cache_indices", None):
        return {}
    tracked = _tracked(running)
    if tracked is None:
        return {}
    return {"chunk_states": False, "track_offsets": tracked.offsets, "track_rows": tracked.rows}


def _reads(metadata: Any) -> bool:
    """Does SGLang read a state at a chunk's start? True where the metadata is not as expected."""
    if not getattr(metadata, "has_mamba_track_mask", True):
        return False
    rows = getattr(metadata, "track_ssm_h_src", None)
    return rows is None or rows.numel() > 0


def _tracked(running: _Prefill) -> _Tracked | None:
    """What is tracked, made by the first layer of a pass. None where the metadata is not as expected."""
    metadata, layer = running
    names = ("track_ssm_h_src", "track_ssm_h_dst", "query_start_loc")
    source: tuple[Any, ...] = tuple([getattr(metadata, name, None) for name in names])
    if any(x is None for x in source) or not hasattr(metadata, "__dict__"):
        return None
    known: _Tracked | None = getattr(metadata, _ATTRIBUTE, None)
    if known is not None and layer > known.layer and all(map(_is, known.source, source)):
        known = known._replace(layer=layer)
    else:
        chunks, rows, offsets = source
        without_rows = copy.copy(metadata)
        without_rows.track_ssm_h_src = chunks[:0]
        setattr(without_rows, _ATTRIBUTE, None)
        known = _Tracked(source, layer, _positions(offsets, chunks), rows, without_rows)
    setattr(metadata, _ATTRIBUTE, known)
    return known


def _is(x: object, y: object) -> bool:
    return x is y


def _positions(offsets: Tensor, chunks: Tensor) -> Tensor:
    """Positions in the pack of the first tokens of chunks, which are numbered through all sequences. Nothing is read on
    the host."""
    counts = (offsets.diff() + CHUNK - 1).div(CHUNK, rounding_mode="floor")
    ends = counts.cumsum(0)
    sequence = torch.searchsorted(ends, chunks, right=True)
    return offsets[sequence] + (chunks - ends[sequence] + counts[sequence]) * CHUNK


def _observed(forward_extend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend's prefill, with what it is about known to the kernel while it runs."""

    @functools.wraps(forward_extend)
    def observing(backend: Any, *args: Any, **kwargs: Any) -> Any:
        layer = kwargs["layer"] if "layer" in kwargs else args[0]
        before = _running.set(_Prefill(backend.forward_metadata, getattr(layer, "layer_id", -1)))
        try:
            return forward_extend(backend, *args, **kwargs)
        finally:
            _running.reset(before)

    return observing


def _tracking_the_rest(track: Callable[..., Any]) -> Callable[..., Any]:
    """The backend's copies to tracked slots, but of states that kdacore has written there."""

    @functools.wraps(track)
    def tracking(
        backend: Any,
        forward_batch: Any,
        h: Any,
        ssm_states: Any,
        forward_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if h is WRITTEN:
            h, forward_metadata = None, getattr(forward_metadata, _ATTRIBUTE).without_rows
        return track(backend, forward_batch, h, ssm_states, forward_metadata, *args, **kwargs)

    return tracking
