"""The kernels of ``chunk_gated_delta_rule`` on Hopper, K = V = 128: how each is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.kernel_parameters import GATED_DELTA
from kdacore_cuda.runtime.launcher import Launcher

_SOURCES = "sm90/gated_delta"
RECORD_BYTES = 2 * 64 * 64 * 2 + 4 * 4 * 20 * 4 + 16
"""Of a chunk and value head: ``ChunkRecord`` of csrc/sm90/gated_delta/record.cuh."""


@cache
def prepare_launcher() -> Launcher:
    """The records of every chunk: a block for each chunk and key head."""
    kernel = KernelSource(f"{_SOURCES}/prepare.cu", "prepare_gated_delta")
    return Launcher(kernel, GATED_DELTA, 256, shared_bytes(kernel))


@cache
def walk_launcher(warpgroups: int) -> Launcher:
    """Outputs and states.

    Args:
        warpgroups: per block. 2: a block carries a whole state; 1: two blocks share one. The same bits.
    """
    kernel = KernelSource(f"{_SOURCES}/walk.cu", "walk_gated_delta", (("WARPGROUPS", warpgroups),))
    return Launcher(kernel, GATED_DELTA, 128 + 128 * warpgroups, shared_bytes(kernel))


def packaged_gated_delta_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    yield prepare_launcher().kernel
    for warpgroups in (1, 2):
        yield walk_launcher(warpgroups).kernel
