"""Bytes a chunk kernel moves between HBM and VMEM, counted from its block specs.

The pipeline copies a block when its index differs from that of the step before, and only then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from kdacore.types import ChunkInputs, OutputGrads, Request
from kdacore_pallas.tpu import plan, vmem
from kdacore_pallas.tpu.chunk_backward_kernel import backward_operands
from kdacore_pallas.tpu.chunk_forward_kernel import forward_operands
from kdacore_pallas.tpu.launch import KernelOperands
from kdacore_pallas.tpu.operands import Operand
from kdacore_pallas.tpu.schedule import chunk_schedule

Array = Any


class Traffic(NamedTuple):
    moved: int
    """Bytes by the block specs."""
    least: int
    """Bytes of the call's inputs and outputs, each once."""


def _block_bytes(operand: Operand) -> int:
    shape = operand.spec.block_shape
    whole = operand.shape if shape is None else shape
    size: int = math.prod(int(n) for n in whole) * np.dtype(operand.dtype).itemsize
    return size


def _copies(operand: Operand, grid: tuple[int, int, int], tables: tuple[Any, ...]) -> int:
    index_map = operand.spec.index_map
    if index_map is None:
        return 1
    count, before = 0, None
    for step in itertools.product(*(range(n) for n in grid)):
        index = tuple(int(i) for i in index_map(*step, *tables))
        count += index != before
        before = index
    return count


def moved(kernel: KernelOperands, x: plan.ChunkGrid, cu_seqlens: Array | None = None) -> int:
    """Bytes moved by all steps of a call, dense or of a pack with these offsets."""
    tables = tuple(np.asarray(a) for a in chunk_schedule(x, cu_seqlens).arrays())
    grid = (x.B, x.H // x.hb, x.NC)
    inputs, outputs, _ = kernel
    return sum(_block_bytes(o) * _copies(o, grid, tables) for o in (*inputs, *outputs))


def _built(make: Callable[..., KernelOperands], *arrays: Any) -> KernelOperands:
    """The operands of a call, from shapes: nothing is computed."""
    found: list[KernelOperands] = []

    def trace(*given: Any) -> int:
        found.append(make(*given))
        return 0

    jax.eval_shape(trace, *arrays)
    return found[0]


def _once(*arrays: Any) -> int:
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays if a is not None)


def forward_traffic(request: Request, inputs: ChunkInputs, keep_starts: bool = False) -> Traffic:
    """Traffic of the forward kernel that writes ``o``, the final state and, to be kept, the chunks' start states. Of a
    pack the offsets are values, everything else may be shapes."""
    x = plan.make_chunk_grid(request, vmem.heads_per_step(request))
    want = ("o", "final", *("starts",) * keep_starts)
    build = _built(lambda given: forward_operands(request, given, x, want), inputs)
    return Traffic(moved(build, x, inputs.cu_seqlens), _once(*inputs) + _once(*build[1]))


def backward_traffic(request: Request, inputs: ChunkInputs, kept_starts: bool = False) -> Traffic:
    """Traffic of the backward kernel, and of the pass over the states where the start states were not kept. These
    count among the least bytes if they were."""
    x = plan.make_chunk_grid(request, vmem.heads_per_step(request))
    states = _built(lambda given: forward_operands(request, given, x, ("starts",)), inputs)
    starts = jax.ShapeDtypeStruct(states[1][0].shape, np.float32)
    do = OutputGrads(jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype))
    chunks = _built(
        lambda given, do, starts: backward_operands(request, given, do, starts, x), inputs, do, starts
    )
    least = 2 * _once(*inputs) + _once(do.o)
    backward = moved(chunks, x, inputs.cu_seqlens)
    if kept_starts:
        return Traffic(backward, least + _once(starts))
    return Traffic(moved(states, x, inputs.cu_seqlens) + backward, least)
