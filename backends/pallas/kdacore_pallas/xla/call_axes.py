"""The axes of a call's arrays and results: what is split where batch or heads are."""

from __future__ import annotations

from typing import Any

from kdacore.arrays import jax_placement
from kdacore.types import Request


def arrays_of(arrays: Any) -> dict[str, Any]:
    """The arrays of a named tuple that are not None, by name."""
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def batch_is_whole(request: Request) -> bool:
    """Whether the batch cannot be split: of packs, and where sequences find their states by number."""
    return bool(
        request.packed
        or request.pool_size
        or request.write_pool_size
        or request.inplace_state
        or request.checkpoint_count
    )


def axes_of(request: Request, name: str, ndim: int) -> str:
    """The axes of an array: see :mod:`kdacore.arrays.jax_placement`."""
    return jax_placement.axes_of(request, name, ndim, batch_is_whole=batch_is_whole(request))
