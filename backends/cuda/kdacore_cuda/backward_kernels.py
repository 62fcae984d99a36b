"""The kernels of the backward on Hopper, K = V = 128: how each is compiled, and how many blocks it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build import KernelSource

_SOURCES = "sm90/chunk_backward"


class BackwardKernel(NamedTuple):
    """One launch of the backward. All take :data:`kdacore_cuda.layout.CHUNK_BACKWARD`."""

    source: KernelSource
    threads: int
    shared: int
    """Dynamic shared memory in bytes; the source asserts that its layout fits."""
    grid: Callable[[int, int, int], int]
    """Blocks, from the units (slots of chunks times value heads), the sequences times value heads, and the
    multiprocessors."""


SUMS_THREADS, GROUPS_THREADS = 512, 256


@cache
def sums_kernel() -> KernelSource:
    """Sums over chunks, a block a value head. Takes :data:`kdacore_cuda.layout.SUMS`."""
    return KernelSource(f"{_SOURCES}/sums.cu", "sums", (("THREADS", SUMS_THREADS),))


@cache
def groups_kernel() -> KernelSource:
    """Sums over the value heads of a group, a warp a row. Takes :data:`kdacore_cuda.layout.GROUPS`."""
    return KernelSource(f"{_SOURCES}/groups.cu", "groups", (("THREADS", GROUPS_THREADS),))


_SCAN_SHARED = 231680
"""Rings of stages, room for what leaves, barriers."""


@cache
def scan_kernel(warpgroups: int = 2) -> BackwardKernel:
    """States forward and their gradients in reverse.

    Args:
        warpgroups: of a block. 2: it carries a whole state; 1: two blocks share one, see :func:`scan_warpgroups`.
    """
    defines = (("WARPGROUPS", warpgroups), ("SHARED_BYTES", _SCAN_SHARED))
    return BackwardKernel(
        KernelSource(f"{_SOURCES}/scan.cu", "scan", defines),
        384 if warpgroups == 2 else 224,
        _SCAN_SHARED,
        lambda units, sequences, processors: 4 // warpgroups * sequences,
    )


def scan_warpgroups(sequences: int, processors: int) -> int:
    """1 where a block for each half of every state leaves multiprocessors free."""
    return 1 if 4 * sequences <= processors else 2


_PREPARE_SHARED = {True: 76560, False: 102160}
"""By whether gates are bounded; three blocks a multiprocessor, and two."""


@cache
def prepare_kernel(float_gate: bool, safe: bool = True, records: bool = False) -> BackwardKernel:
    """Operands of each chunk, a block a unit.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        safe: every decay is bounded by -5, so that one exponent anchor serves half a chunk.
        records: those that inference needs, a record a unit; else those of the backward, an array each.
    """
    shared = _PREPARE_SHARED[safe]
    defines: tuple[tuple[str, int], ...] = (
        ("G_FLOAT", int(float_gate)),
        ("BOUNDED", int(safe)),
        ("SHARED_BYTES", shared),
    )
    if records:
        defines += (("FOR_SEGMENTS", 1),)
    return BackwardKernel(
        KernelSource(f"{_SOURCES}/prepare.cu", "prepare", defines),
        256,
        shared,
        lambda units, sequences, processors: units,
    )


@cache
def grads_kernel(float_gate: bool, grouped: bool, safe: bool = True) -> BackwardKernel:
    """Every input gradient of a unit; one block a multiprocessor takes units in turns.

    Args:
        float_gate: g is float32, not bfloat16.
        grouped: dq and dk in float32 and not yet through the norm, as value heads are still to be added up.
        safe: every decay is bounded by -5, so that one exponent anchor serves half a chunk.
    """
    shared = 232448
    flags = {"G_FLOAT": float_gate, "GROUPED": grouped, "BOUNDED": safe, "SHARED_LIMIT": shared}
    defines = tuple((name, int(x)) for name, x in flags.items())
    source = KernelSource(f"{_SOURCES}/grads.cu", "grads", defines)
    return BackwardKernel(source, 512, shared, lambda units, heads, processors: min(units, processors))


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    for warpgroups in (1, 2):
        yield scan_kernel(warpgroups).source
    for float_gate, safe in product((False, True), repeat=2):
        yield prepare_kernel(float_gate, safe).source
        for grouped in (False, True):
            yield grads_kernel(float_gate, grouped, safe).source
    yield sums_kernel()
    yield groups_kernel()
