"""Run a kernel: compiled or interpreted, and over the grid of a chunked call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdacore_pallas.tpu.operands import F32, Operand
from kdacore_pallas.tpu.plan import ChunkGrid
from kdacore_pallas.tpu.schedule import ChunkSchedule
from kdacore_pallas.xla.numerics import out_struct

Array = Any
Scratch = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of float32 VMEM scratch."""
KernelOperands = tuple[list[Operand], list[Operand], Scratch]
"""Inputs, outputs and scratch of a chunk kernel."""


@dataclass(frozen=True)
class Launch:
    """How to run a kernel: compiled, or by one of Pallas' interpreters."""

    interpret: Any = False
    vmem_bytes: int | None = None
    together: int = 1
    """Value heads that the chunk kernels compute side by side; divides those of a step."""

    def call(self, kernel: Callable[..., Any], *arrays: Array) -> list[Array]:
        """Call a kernel with JAX's x64 mode off: in that mode Python integers have 64 bits, but a
        TPU's scalars 32."""
        with jax.enable_x64(False):
            outs: list[Array] = kernel(*arrays)
        return outs


def call_chunk_kernel(
    name: str,
    body: Callable[..., None],
    x: ChunkGrid,
    schedule: ChunkSchedule,
    inputs: list[Operand],
    outputs: list[Operand],
    scratch: Scratch,
    launch: Launch,
) -> list[Array]:
    """``pallas_call`` over ``(B, head blocks, NC)``.

    ``body(names, *refs)`` is called with its refs in the order of ``names``.
    """
    tables = schedule.arrays()
    names = [o.name for o in (*inputs, *outputs)] + [n for n, _ in scratch]
    values = [o.value for o in inputs]
    limit = {} if launch.vmem_bytes is None else {"vmem_limit_bytes": launch.vmem_bytes}
    kernel = pl.pallas_call(
        lambda *refs: body(names, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(x.B, x.H // x.hb, x.NC),
            in_specs=[o.spec for o in inputs],
            out_specs=[o.spec for o in outputs],
            scratch_shapes=[pltpu.VMEM(shape, F32) for _, shape in scratch],
        ),
        out_shape=[out_struct(o.shape, o.dtype, *values) for o in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), **limit
        ),
        interpret=launch.interpret,
        name=name,
    )
    return launch.call(kernel, *tables, *values)
