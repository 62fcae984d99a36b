"""The kernels of ``chunk_kda`` in two launches that run side by side on Hopper, K = V = 128."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel

_SOURCES = "sm90/chunk_forward/dataflow"

WALK_THREADS = 384
"""Threads and bytes of dynamic shared memory of :func:`walk_kernel`."""
WALK_BLOCKS = 2
"""Blocks of :func:`walk_kernel` for each sequence and value head."""


@cache
def prepare_units_kernel(float_gate: bool, bounded: bool) -> ChunkBackwardKernel:
    """Operands of each chunk; a block computes one unit after another, several at once.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        bounded: every log decay lies in [-5, 0], so that one exponent anchor serves half a chunk.
    """
    at_once = 3 if bounded else 2
    defines = (
        ("G_FLOAT", int(float_gate)),
        ("BOUNDED", int(bounded)),
        ("FOR_SEGMENTS", 1),
        ("SIDE_BY_SIDE", 1),
    )
    return ChunkBackwardKernel(
        KernelSource(f"{_SOURCES}/prepare_units.cu", "prepare_units", defines),
        256 * at_once + 128,
        lambda units, heads, multiprocessors: min(units, max(1, multiprocessors - WALK_BLOCKS * heads)),
    )


@cache
def walk_kernel() -> KernelSource:
    """Outputs, checkpoints and final states: two blocks per sequence and value head. Takes
    :data:`kdacore_cuda.kernel_parameters.WALK`."""
    return KernelSource(f"{_SOURCES}/walk.cu", "walk")


def packaged_dataflow_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: those that calls may use."""
    for float_gate in (False, True):
        yield prepare_units_kernel(float_gate, bounded=False).source
    yield walk_kernel()
