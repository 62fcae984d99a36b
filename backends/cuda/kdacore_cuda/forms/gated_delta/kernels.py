"""The kernels of ``chunk_gated_delta_rule`` on Hopper, K = V = 128: how each is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.kernel_parameters import GATED_DELTA
from kdacore_cuda.runtime.launcher import Launcher

_SOURCES = "sm90/gated_delta"
RECORD_BYTES = (64 * 128 + 64 * 64) * 2 + 2 * 4 * 20 * 4 + 16
"""Of a chunk and value head: ``ChunkRecord`` of csrc/sm90/gated_delta/record.cuh."""
WALK_BLOCKS = 2
"""Blocks of the second launch for each sequence and value head."""


@cache
def prepare_launcher() -> Launcher:
    """The records of every chunk: a block for each chunk and key head."""
    kernel = KernelSource(f"{_SOURCES}/prepare.cu", "prepare_gated_delta")
    return Launcher(kernel, GATED_DELTA, 256, shared_bytes(kernel))


@cache
def walk_launcher() -> Launcher:
    """Outputs and states: :data:`WALK_BLOCKS` for each sequence and value head."""
    kernel = KernelSource(f"{_SOURCES}/walk.cu", "walk_gated_delta")
    return Launcher(kernel, GATED_DELTA, 384, shared_bytes(kernel))


def packaged_gated_delta_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    for launcher in (prepare_launcher, walk_launcher):
        yield launcher().kernel
