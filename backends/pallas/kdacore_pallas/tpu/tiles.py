"""Rows of a chunk in registers: blocks of the binary tree, tiles of eight rows, lane masks.

A TPU register holds 8 rows (sublanes) of 128 lanes. Blocks of eight rows or more are whole
registers, so splitting and joining them costs nothing; smaller ones are reached by rotating within
each register.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kdacore_pallas.tpu.sizes import SUBLANES

Array = Any
TILE = SUBLANES


def small_levels() -> tuple[int, ...]:
    """Half-block sizes within a tile."""
    return 1, 2, 4


def big_levels(C: int) -> Iterator[int]:
    """Half-block sizes of whole tiles."""
    s = TILE
    while s < C:
        yield s
        s *= 2


def sublane(width: int) -> Array:
    """``[1, 8, width]`` int32: the row within a tile."""
    return lax.broadcasted_iota(jnp.int32, (1, TILE, width), 1)


def lane(width: int) -> Array:
    """``[8, width]`` int32: the lane of each element of a tile."""
    return lax.broadcasted_iota(jnp.int32, (TILE, width), 1)


def rotate(tiles: Array, s: int) -> Array:
    """Rows of each ``[8, width]`` tile moved down by ``s``, around its end."""
    return pltpu.roll(tiles, s % TILE, 1)


def rotate_lanes(x: Array, s: int) -> Array:
    """Lanes moved up by ``s``, around the end. Under ``vmap``, for which ``pltpu.roll`` has no rule."""

    def roll(x: Array) -> Array:
        return pltpu.roll(x, s % x.shape[-1], x.ndim - 1)

    rotated = jax.custom_batching.custom_vmap(roll)
    rotated.def_vmap(lambda size, batched, x: (roll(x), batched[0]))
    found: Array = rotated(x)
    return found


def as_tiles(x: Array) -> Array:
    """``[C, width]`` as ``[C / 8, 8, width]``."""
    return x.reshape(x.shape[0] // TILE, TILE, x.shape[1])


def halves(x: Array, s: int) -> tuple[Array, Array]:
    """Left and right halves of the blocks of ``2 s`` rows (s >= 8), each ``[C / 2, width]``."""
    C, width = x.shape
    blocks = x.reshape(C // (2 * s), 2, s, width)
    return blocks[:, 0].reshape(C // 2, width), blocks[:, 1].reshape(C // 2, width)


def join(left: Array, right: Array, s: int) -> Array:
    """The reverse of :func:`halves`."""
    rows, width = left.shape
    shape = (rows // s, 1, s, width)
    return jnp.concatenate([left.reshape(shape), right.reshape(shape)], axis=1).reshape(2 * rows, width)


def each_block(tiles: Array, blocks: Array, s: int) -> Array:
    """``tiles`` ``[rows, width]`` times ``blocks`` ``[rows / s, 8, width]``, one tile for every s
    rows."""
    rows, width = tiles.shape
    spread = tiles.reshape(rows // s, s // TILE, TILE, width) * blocks[:, None]
    return spread.reshape(rows, width)


def left_lanes(C: int, s: int) -> Array:
    """``[C / 2, C]`` bool over the right rows of level s (s >= 8): the columns of the left half of
    their block."""
    at = lane(C) >> (s.bit_length() - 1)
    blocks = [jnp.broadcast_to((at == 2 * b)[None], (s // TILE, TILE, C)) for b in range(C // (2 * s))]
    return jnp.concatenate(blocks, axis=0).reshape(C // 2, C)


def own_lanes(C: int) -> Array:
    """``[C / 8, 8, C]`` bool: the eight columns of each tile's diagonal block."""
    at = lane(C) >> 3
    return jnp.stack([at == t for t in range(C // TILE)])


def pack_diagonal(x: Array) -> Array:
    """The 8 x 8 diagonal blocks of ``[C, C]`` side by side, ``[8, C]``."""
    C = x.shape[0]
    return jnp.sum(jnp.where(own_lanes(C), as_tiles(x), 0.0), axis=0)


def unpack_diagonal(packed: Array) -> Array:
    """The reverse: a block diagonal ``[C, C]``."""
    C = packed.shape[1]
    return jnp.where(own_lanes(C), packed[None], 0.0).reshape(C, C)


def small_pairs(C: int, s: int) -> Array:
    """``[8, C]`` bool over packed diagonal blocks: pairs (row, column) that meet at level s < 8."""
    row = lax.broadcasted_iota(jnp.int32, (TILE, C), 0)
    differ = row ^ (lane(C) & (TILE - 1))
    return (differ < 2 * s) & (differ >= s) & (row & s != 0)


def packed_identity(C: int) -> Array:
    """``[8, C]`` bool: the diagonals of packed blocks."""
    return lax.broadcasted_iota(jnp.int32, (TILE, C), 0) == (lane(C) & (TILE - 1))


def row_index(C: int, width: int) -> Array:
    """``[C, width]`` int32: the row of each element."""
    return lax.broadcasted_iota(jnp.int32, (C, width), 0)


def to_column(row: Array) -> Array:
    """``[1, C]`` to ``[C, 1]``."""
    C = row.shape[1]
    diagonal = row_index(C, C) == lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)


def to_row(column: Array) -> Array:
    """``[C, 1]`` to ``[1, C]``."""
    C = column.shape[0]
    identity = unpack_diagonal(jnp.where(packed_identity(C), 1.0, 0.0))
    return jnp.sum(identity * column, axis=0, keepdims=True)
