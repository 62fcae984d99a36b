"""Rows of many heads in VMEM, read and written one head at a time.

A block of an array ``[B, T, heads, D]`` has heads in sublanes. One head's ``[C, D]`` is every
``heads``-th row, which the hardware loads with a stride, but only from 32-bit rows of at most 128
lanes: so rows are kept in float32 scratch ``[panels, C * heads, <= 128]``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdacore_pallas.tpu.sizes import LANES

Array = Any


def shape(C: int, heads: int, D: int) -> tuple[int, int, int]:
    """Shape of the scratch."""
    return -(-D // LANES), C * heads, min(D, LANES)


def _panels(D: int) -> list[tuple[int, slice, int]]:
    """Per panel: its number, its channels, how many."""
    return [
        (p, slice(first, min(first + LANES, D)), min(LANES, D - first))
        for p, first in enumerate(range(0, D, LANES))
    ]


def fill(ref: Any, block: Array) -> None:
    """A whole block ``[C, heads, D]``."""
    C, heads, D = block.shape
    flat = block.astype(jnp.float32).reshape(C * heads, D)
    for p, channels, width in _panels(D):
        ref[p, :, :width] = flat[:, channels]


def block(ref: Any, C: int, heads: int, D: int) -> Array:
    """The reverse of :func:`fill`, float32."""
    parts = [ref[p, :, :width] for p, _, width in _panels(D)]
    return jnp.concatenate(parts, axis=1).reshape(C, heads, D)


def read(ref: Any, h: Any, C: int, heads: int, D: int) -> Array:
    """Head ``h``: ``[C, D]``."""
    parts = [ref.at[p][pl.ds(h, C, heads), :][:, :width] for p, _, width in _panels(D)]
    return jnp.concatenate(parts, axis=1)


def write(ref: Any, h: Any, heads: int, value: Array) -> None:
    """Head ``h`` becomes ``value`` ``[C, D]``."""
    C, D = value.shape
    for p, channels, width in _panels(D):
        part = value[:, channels]
        if width < ref.shape[-1]:
            part = jnp.concatenate([part, jnp.zeros((C, ref.shape[-1] - width), part.dtype)], axis=1)
        ref.at[p][pl.ds(h, C, heads), :] = part
