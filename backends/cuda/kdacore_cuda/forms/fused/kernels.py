"""The chunk forward kernels: how each is compiled, its blocks and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.architectures import HEAD_DIMS, HOPPER, SHARED_LIMITS, has_hopper_kernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.choice import SCANNERS, cluster_sizes
from kdacore_cuda.forms.fused.sizes import SCAN_WARPS
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD
from kdacore_cuda.runtime.launcher import Launcher


def chunk_forward_kernel(
    K: int,
    cluster: int,
    bounded: bool,
    float_gate: bool,
    arch: str = HOPPER,
    many_short: bool = False,
    helped: bool = False,
) -> KernelSource:
    """The chunk forward kernel. Takes :data:`kdacore_cuda.kernel_parameters.CHUNK_FORWARD`.

    Args:
        K: head dim, K = V.
        cluster: one of :func:`cluster_sizes`.
        bounded: every log decay lies in [-5, 0].
        float_gate: ``g`` is float32, not bfloat16.
        arch: the real architecture to compile for.
        many_short: that of many short sequences (:func:`kdacore_cuda.choice.are_many_short`).
        helped: others prepare steps (:func:`kdacore_cuda.choice.preparing_clusters`).
    """
    own = has_hopper_kernel(K, arch)
    defines = (
        ("K_DIM", K),
        ("V_DIM", K),
        ("CLUSTER", cluster),
        ("BOUNDED", int(bounded)),
        ("G_FLOAT", int(float_gate)),
        *(
            _hopper_defines(cluster, many_short, helped)
            if own
            else _portable_defines(K, cluster, bounded, arch)
        ),
    )
    return KernelSource(
        "sm90/chunk_forward/chunk_forward.cu" if own else "common/chunk_forward/chunk_forward.cu",
        "chunk_forward",
        defines,
    )


TAIL_THREADS, TAIL_BLOCKS = 128, 4
"""Of :func:`checkpoint_tail_kernel`: block size, blocks a checkpoint and value head."""


def checkpoint_tail_kernel() -> KernelSource:
    """From the state at the start of a step to the one before a token in it, on Hopper, K = V = 128.
    Takes :data:`kdacore_cuda.kernel_parameters.CHECKPOINT_TAIL`."""
    return KernelSource("sm90/chunk_forward/checkpoint_tail.cu", "checkpoint_tail")


def chunk_forward_threads(K: int, cluster: int, arch: str = HOPPER) -> int:
    """Block size of :func:`chunk_forward_kernel`."""
    if has_hopper_kernel(K, arch):
        return 32 * (SCAN_WARPS + _SLICE_WARPS + _SOLVER_SLOTS)
    return 32 * (_scan_warps(K, cluster) + _prepare_warps(K, cluster, arch))


@cache
def chunk_forward_launcher(
    K: int,
    cluster: int,
    bounded: bool,
    float_gate: bool,
    arch: str,
    many_short: bool = False,
    helped: bool = False,
) -> Launcher:
    """The launcher of :func:`chunk_forward_kernel`, whose arguments these are."""
    kernel = chunk_forward_kernel(K, cluster, bounded, float_gate, arch, many_short, helped)
    threads = chunk_forward_threads(K, cluster, arch)
    return Launcher(kernel, CHUNK_FORWARD, threads, shared_bytes(kernel, arch))


def packaged_chunk_forward_kernels(arch: str) -> Iterator[KernelSource]:
    """The chunk forward kernels shipped for ``arch``; those with a float32 ``g`` for Hopper
    only."""
    float_gates = (False, True) if arch == HOPPER else (False,)
    for K in HEAD_DIMS:
        for cluster, bounded, float_gate in product(cluster_sizes(K, arch), (False, True), float_gates):
            yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch)
            if has_hopper_kernel(K, arch) and cluster == SCANNERS:
                yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch, many_short=True)
            if has_hopper_kernel(K, arch) and cluster == 2 * SCANNERS:
                yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch, helped=True)


# The Hopper kernel, K = V = 128. A block has 4 scan warps (64 columns of V), 8 slice warps (32
# channels of half a chunk each) and 2 solver warps. The solvers' warpgroup is filled up to 4 warps,
# as reallocating registers requires.
_SLICE_WARPS, _SOLVER_SLOTS, _STAGES = 8, 4, 6


class Registers(NamedTuple):
    """Registers of one thread by its warp's task. The four warpgroups of a block have 512 in all: one scan, two slice
    and one solve, or in clusters of four, three slice and one solve, or one scan and three of little use."""

    scan: int
    slices: int
    solve: int


def _registers(cluster: int) -> Registers:
    """Counts with which nothing spills: reading a spilled word back waits for the loads queued
    before it."""
    return Registers(184, 120, 88) if cluster == SCANNERS else Registers(232, 136, 88)


def _hopper_defines(cluster: int, many_short: bool, helped: bool) -> tuple[tuple[str, int], ...]:
    registers = _registers(cluster)
    return (
        ("SCANNERS", SCANNERS),
        ("STAGES", _STAGES),
        ("GROUPS", 1),
        ("SOLVER_SLOTS", _SOLVER_SLOTS),
        ("SCAN_REGISTERS", registers.scan),
        ("SLICE_REGISTERS", registers.slices),
        ("SOLVE_REGISTERS", registers.solve),
        ("MANY_SHORT", int(many_short)),
        *((("HELPERS", 1),) if helped else ()),
    )


# The portable kernel: a scan warp carries 16 (or 32) columns of V, a prepare warp works on chunks
# of 16 tokens.


def _portable_defines(K: int, cluster: int, bounded: bool, arch: str) -> tuple[tuple[str, int], ...]:
    return (
        ("WARPGROUP", int(_uses_warpgroup(K, arch))),
        ("STAGES", _portable_stages(K, arch)),
        ("PREPARE_WARPS", _prepare_warps(K, cluster, arch)),
        ("SLICE_UNROLL", 2 if bounded else 1),
    )


def _uses_warpgroup(K: int, arch: str) -> bool:
    """Whether the scan uses warpgroup products, which take 64 columns of V at a time."""
    return arch == HOPPER and K == 64


def _portable_stages(K: int, arch: str) -> int:
    """Chunks in the ring buffer: as many as fit, a multiple of 4 so that every cluster size divides
    it."""
    wanted = 12 if K == 128 else 16
    return wanted if SHARED_LIMITS.get(arch, 99 * 1024) > 200 * 1024 else 4


def _scan_warps(K: int, cluster: int) -> int:
    """Warps of a block that carry the state: 16 columns of V each; 32 where a block has all 128."""
    columns = K // cluster
    return columns // 32 if columns == 128 else columns // 16


def _prepare_warps(K: int, cluster: int, arch: str) -> int:
    """Warps of a block that prepare chunks, at most one per stage of the ring buffer."""
    wanted = 8 if _scan_warps(K, cluster) == 4 and cluster == 1 else 4
    return min(wanted, _portable_stages(K, arch) // cluster)
