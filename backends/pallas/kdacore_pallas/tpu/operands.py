"""Operands of the chunk kernels by name: the array, and the block of it that a grid step sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.tpu.plan import ChunkGrid, gather
from kdacore_pallas.xla.plan import ChunkTable

Array = Any
F32 = jnp.float32


@dataclass(frozen=True)
class Operand:
    """A named input or output of a kernel."""

    name: str
    spec: pl.BlockSpec
    shape: tuple[int, ...]
    dtype: Any
    value: Array | None = None
    """None for an output."""


def rows_spec(x: ChunkGrid, heads: int, D: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """One chunk of some heads of a ``[B, T, heads * D]`` array."""
    return pl.BlockSpec((1, x.C, heads * D), lambda b, h, c, *_: (b, at(c), h))


def flat(rows: Array) -> Array:
    """``[B, T, heads, D]`` as ``[B, T, heads * D]``: as a layer's projections leave it, and where T and the lanes are
    tiled, so that no channels are padded."""
    return rows.reshape(*rows.shape[:2], -1)


def lanes_spec(x: ChunkGrid, heads: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """One chunk of some heads of a ``[B, heads, T]`` array: one number per token, tokens along
    lanes."""
    return pl.BlockSpec((1, heads, x.C), lambda b, h, c, *_: (b, h, at(c)))


def state_spec(x: ChunkGrid, tail: tuple[int, int], rows: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """The states of the sequence a chunk belongs to, of some heads."""

    def index(b: Any, h: Any, c: Any, seq: Any, *_: Any) -> tuple[Any, ...]:
        return jnp.minimum(seq[b * x.NC + at(c)], rows - 1), h, 0, 0

    return pl.BlockSpec((1, x.hvb, *tail), index)


def along_lanes(x: ChunkGrid, rows: Array) -> Array:
    """``[B, T, heads]`` as float32 ``[B, heads, NC * C]``."""
    rows = jnp.moveaxis(rows.astype(F32), 1, 2)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, x.NC * x.C - rows.shape[2])))


def chunk_operands(
    request: Request, inputs: ChunkInputs, x: ChunkGrid, table: ChunkTable | None, at: Callable[[Any], Any]
) -> list[Operand]:
    """The inputs common to forward and backward; ``at`` maps a grid position to a chunk."""

    def operand(name: str, value: Array, spec: pl.BlockSpec) -> Operand:
        return Operand(name, spec, value.shape, value.dtype, value)

    q, k, v = (gather(table, flat(a)) for a in inputs[:3])
    beta = gather(table, inputs.beta)
    found = [
        operand("q", q, rows_spec(x, x.hb, x.K, at)),
        operand("k", k, rows_spec(x, x.hb, x.K, at)),
        operand("v", v, rows_spec(x, x.hvb, x.V, at)),
        operand("beta", along_lanes(x, beta), lanes_spec(x, x.hvb, at)),
    ]
    if request.scalar_gate:
        found.append(operand("g", along_lanes(x, gather(table, inputs.g)), lanes_spec(x, x.hvb, at)))
    else:
        found.append(operand("g", gather(table, flat(inputs.g)), rows_spec(x, x.hvb, x.K, at)))
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    if inputs.A_log is not None:
        found.append(operand("slope", jnp.exp(inputs.A_log.astype(F32)), whole))
    if inputs.dt_bias is not None:
        bias = inputs.dt_bias.astype(F32)
        if request.scalar_gate:
            found.append(operand("bias", bias.reshape(x.HV), whole))
        else:
            spec = pl.BlockSpec((x.hvb, x.K), lambda b, h, c, *_: (h, 0))
            found.append(operand("bias", bias.reshape(x.HV, x.K), spec))
    return found
