"""Operands of the chunk kernels by name: the array, and the block of it that a grid step sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.gate_rates import gate_rate, held
from kdacore_pallas.tpu.plan import ChunkGrid

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


def row_block(x: ChunkGrid, step: Any, tables: tuple[Any, ...]) -> Any:
    """The block of rows of a step; ``tables`` are those of :class:`kdacore_pallas.tpu.schedule.ChunkSchedule`."""
    return tables[-1][step] if x.packed else step


def rows_spec(x: ChunkGrid, heads: int, D: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """One block of rows of some heads of a ``[B, T, heads * D]`` array."""
    return pl.BlockSpec((1, x.C, heads * D), lambda b, h, c, *tables: (b, row_block(x, at(c), tables), h))


def flat(rows: Array) -> Array:
    """``[B, T, heads, D]`` as ``[B, T, heads * D]``: as a layer's projections leave it, and where T and the lanes are
    tiled, so that no channels are padded."""
    return rows.reshape(*rows.shape[:2], -1)


def lanes_spec(x: ChunkGrid, heads: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """One block of rows of some heads of a ``[B, heads, T]`` array: one number per token, tokens along
    lanes."""
    return pl.BlockSpec((1, heads, x.C), lambda b, h, c, *tables: (b, h, row_block(x, at(c), tables)))


def block_states_spec(x: ChunkGrid, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """The states of a block of rows, of some heads of a ``[B, blocks, HV, V, K]`` array."""
    return pl.BlockSpec(
        (1, 1, x.hvb, x.V, x.K), lambda b, h, c, *tables: (b, row_block(x, at(c), tables), h, 0, 0)
    )


def state_spec(x: ChunkGrid, tail: tuple[int, int], rows: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
    """The states of a step's sequence, of some heads."""

    def index(b: Any, h: Any, c: Any, seq: Any, *_: Any) -> tuple[Any, ...]:
        return jnp.minimum(seq[b * x.NC + at(c)], rows - 1), h, 0, 0

    return pl.BlockSpec((1, x.hvb, *tail), index)


def along_lanes(x: ChunkGrid, rows: Array) -> Array:
    """``[B, T, heads]`` as float32 ``[B, heads, blocks * C]``."""
    rows = jnp.moveaxis(rows.astype(F32), 1, 2)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, x.blocks * x.C - rows.shape[2])))


def chunk_operands(
    request: Request, inputs: ChunkInputs, x: ChunkGrid, at: Callable[[Any], Any]
) -> list[Operand]:
    """The inputs common to forward and backward; ``at`` maps a grid position to a step."""

    def operand(name: str, value: Array, spec: pl.BlockSpec) -> Operand:
        return Operand(name, spec, value.shape, value.dtype, value)

    q, k, v = (flat(a) for a in inputs[:3])
    found = [
        operand("q", q, rows_spec(x, x.hb, x.K, at)),
        operand("k", k, rows_spec(x, x.hb, x.K, at)),
        operand("v", v, rows_spec(x, x.hvb, x.V, at)),
        operand("beta", along_lanes(x, inputs.beta), lanes_spec(x, x.hvb, at)),
    ]
    if request.scalar_gate:
        found.append(operand("g", along_lanes(x, inputs.g), lanes_spec(x, x.hvb, at)))
    else:
        found.append(operand("g", flat(inputs.g), rows_spec(x, x.hvb, x.K, at)))
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    if inputs.A_log is not None:
        found.append(operand("slope", gate_rate(inputs.A_log.astype(F32)), whole))
    if inputs.dt_bias is not None:
        bias = held(inputs.dt_bias.astype(F32))
        if request.scalar_gate:
            found.append(operand("bias", bias.reshape(x.HV), whole))
        else:
            spec = pl.BlockSpec((x.hvb, x.K), lambda b, h, c, *_: (h, 0))
            found.append(operand("bias", bias.reshape(x.HV, x.K), spec))
    return found
