"""The kernels of the chunk backward on Hopper, K = V = 128: how each is compiled, and its grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, SCAN_OUTPUTS, ParamStruct
from kdacore_cuda.runtime.launcher import Launcher

_SOURCES = "sm90/chunk_backward"


class ChunkBackwardKernel(NamedTuple):
    """One launch of the chunk backward."""

    source: KernelSource
    threads: int
    grid: Callable[[int, int, int], int]
    """Blocks, given the units (chunk slots times value heads), the sequences times value heads, and
    the multiprocessors."""
    params: ParamStruct = CHUNK_BACKWARD

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes."""
        return shared_bytes(self.source)


@cache
def launcher(kernel: ChunkBackwardKernel) -> Launcher:
    """The launcher of one kernel."""
    return Launcher(kernel.source, kernel.params, kernel.threads, kernel.shared)


SUMS_THREADS, GROUPS_THREADS = 512, 256


@cache
def sums_kernel() -> KernelSource:
    """Sums over chunks, one block per value head. Takes
    :data:`kdacore_cuda.kernel_parameters.SUMS`."""
    return KernelSource(f"{_SOURCES}/sums.cu", "sums", (("THREADS", SUMS_THREADS),))


@cache
def groups_kernel() -> KernelSource:
    """Sums over the value heads of a group, one warp per row. Takes
    :data:`kdacore_cuda.kernel_parameters.GROUPS`."""
    return KernelSource(f"{_SOURCES}/groups.cu", "groups", (("THREADS", GROUPS_THREADS),))


def state_threads(warpgroups: int) -> int:
    """Threads of a block that carries a state: warpgroups with 64 of its rows each, and warps that
    load."""
    return 384 if warpgroups == 2 else 224


@cache
def scan_kernel(warpgroups: int = 2) -> ChunkBackwardKernel:
    """States forward and their gradients in reverse.

    Args:
        warpgroups: per block. 2: a block carries a whole state; 1: two blocks share one, see
            :func:`scan_warpgroups`.
    """
    return ChunkBackwardKernel(
        KernelSource(f"{_SOURCES}/scan.cu", "scan", (("WARPGROUPS", warpgroups),)),
        state_threads(warpgroups),
        lambda units, heads, multiprocessors: 4 // warpgroups * heads,
    )


def scan_warpgroups(heads: int, multiprocessors: int) -> int:
    """Warpgroups per block for ``heads`` sequences times value heads: 1 where two blocks per state
    still find a multiprocessor each, forward and reverse."""
    return 1 if 4 * heads <= multiprocessors else 2


@cache
def scan_outputs_kernel(warpgroups: int) -> ChunkBackwardKernel:
    """States and outputs of a forward that keeps what its backward would recompute.

    Args:
        warpgroups: per block, as in :func:`scan_kernel`; see :func:`one_way_warpgroups`.
    """
    return ChunkBackwardKernel(
        KernelSource(f"{_SOURCES}/scan_outputs.cu", "scan_outputs", (("WARPGROUPS", warpgroups),)),
        state_threads(warpgroups),
        lambda units, heads, multiprocessors: 2 // warpgroups * heads,
        SCAN_OUTPUTS,
    )


def one_way_warpgroups(heads: int, multiprocessors: int) -> int:
    """:func:`scan_warpgroups` of a launch whose blocks all go in one direction."""
    return 1 if 2 * heads <= multiprocessors else 2


@cache
def prepare_kernel(
    float_gate: bool, bounded: bool = True, for_segments: bool = False, leaving_only: bool = False
) -> ChunkBackwardKernel:
    """Operands of each chunk, one block per unit.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        bounded: every log decay lies in [-5, 0], so that one exponent anchor serves half a chunk.
        for_segments: the operands that :mod:`kdacore_cuda.forms.segments.launches` needs, one block
            of memory per unit; else those of the backward, one array each. For bounded gates
            :func:`kdacore_cuda.forms.segments.kernels.segments_prepare_kernel` is faster.
        leaving_only: of the sequence of a pack that ends at T alone.
    """
    defines: tuple[tuple[str, int], ...] = (("G_FLOAT", int(float_gate)), ("BOUNDED", int(bounded)))
    if for_segments:
        defines += (("FOR_SEGMENTS", 1),)
    if leaving_only:
        defines += (("LEAVING_ONLY", 1),)
    return ChunkBackwardKernel(
        KernelSource(f"{_SOURCES}/prepare.cu", "prepare", defines),
        256,
        lambda units, heads, multiprocessors: units,
    )


@cache
def grads_kernel(float_gate: bool, grouped: bool, bounded: bool = True) -> ChunkBackwardKernel:
    """Every input gradient of a unit; one block per multiprocessor loops over units.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        grouped: HV > H: dq and dk are float32 and one per value head, to be summed by
            :func:`groups_kernel`.
        bounded: every log decay lies in [-5, 0], so that one exponent anchor serves half a chunk.
    """
    flags = {"G_FLOAT": float_gate, "GROUPED": grouped, "BOUNDED": bounded}
    defines = tuple((name, int(x)) for name, x in flags.items())
    source = KernelSource(f"{_SOURCES}/grads.cu", "grads", defines)
    return ChunkBackwardKernel(source, 512, lambda units, heads, multiprocessors: min(units, multiprocessors))


def packaged_chunk_backward_kernels() -> Iterator[KernelSource]:
    """The chunk backward kernels shipped: all there are."""
    for warpgroups in (1, 2):
        yield scan_kernel(warpgroups).source
        yield scan_outputs_kernel(warpgroups).source
    for float_gate, bounded in product((False, True), repeat=2):
        yield prepare_kernel(float_gate, bounded).source
        for grouped in (False, True):
            yield grads_kernel(float_gate, grouped, bounded).source
    yield sums_kernel()
    yield groups_kernel()
