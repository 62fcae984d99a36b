"""The prefill kernels: how each divides its work, what it is compiled with, and how many blocks share a sequence."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kdacore_cuda.build import KernelSource
from kdacore_cuda.layout import SEQUENCE_OVERHEAD_STEPS, STEP_TOKENS

SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100f": 227 * 1024, "sm_120": 99 * 1024}
"""Dynamic shared memory a block may use, by build architecture."""
CLUSTER_ARCHS = ("sm_90a", "sm_100f")
"""Architectures whose blocks form clusters here."""
HOPPER = "sm_90a"


def has_own(K: int, arch: str) -> bool:
    """Whether sm90/chunk_forward serves this head dim: 64 columns of V a warpgroup, 32 tokens a step."""
    return arch == HOPPER and K == 128


def clusters(K: int, arch: str) -> tuple[int, ...]:
    """Cluster sizes prefill may take. With 64 columns one block carries the whole state, and sharing was slower."""
    if K == 64 or arch not in CLUSTER_ARCHS:
        return (1,)
    return (2, 3) if has_own(K, arch) else (1, 2, 4)


def cluster_size(K: int, items: int, processors: int, arch: str) -> int:
    """Blocks that share one of ``items`` sequences and heads. Depends on shapes and the device alone.

    Sharing shortens one item and costs throughput, so it pays while there are multiprocessors to spare.
    """
    sizes = clusters(K, arch)
    return max(c for c in sizes if c == sizes[0] or items * c <= processors)


def sharing_clusters(K: int, cluster: int, items: int, processors: int, arch: str) -> int:
    """How many clusters share ``items`` sequences and heads; 0: each has a cluster of its own.

    As many as run at once, where there are more items than that and the kernel can cut an item in two.
    """
    together = processors // cluster
    return together if has_own(K, arch) and items > together else 0


def may_cut(T: int, items: int, clusters: int) -> bool:
    """Does a border of ``clusters`` equal shares of ``items`` dense sequences and heads fall inside one of them?"""
    cost = max(1, -(-T // STEP_TOKENS)) + SEQUENCE_OVERHEAD_STEPS
    return -(-items * cost // clusters) % cost != 0


def hand_over_size(clusters: int) -> int:
    """Float32 numbers of the states that ``clusters`` hand on, and of the flags (8 bytes a warp) behind them."""
    return clusters * (128 * 128 + 2 * _SCANNERS * _SCAN_WARPS)


def prefill_kernel(K: int, cluster: int, safe: bool, float_gate: bool, arch: str = HOPPER) -> KernelSource:
    """The fused prefill kernel for one head dim (K = V), cluster size, gate range and dtype of ``g``."""
    own = has_own(K, arch)
    defines = (
        ("K_DIM", K),
        ("V_DIM", K),
        ("CLUSTER", cluster),
        ("BOUNDED", int(safe)),
        ("G_FLOAT", int(float_gate)),
        ("SHARED_LIMIT", prefill_shared(K, cluster, safe, arch)),
        *(_hopper_defines(cluster, safe) if own else _portable_defines(K, cluster, safe, arch)),
    )
    folder = "sm90" if own else "common"
    return KernelSource(f"{folder}/chunk_forward/chunk_forward.cu", "chunk_forward", defines)


def prefill_threads(K: int, cluster: int, arch: str = HOPPER) -> int:
    """Block size of :func:`prefill_kernel`."""
    if has_own(K, arch):
        return 32 * (_SCAN_WARPS + _SLICE_WARPS + _SOLVER_SLOTS)
    return 32 * (_scan_warps(K, cluster, arch) + _prepare_warps(K, cluster, arch))


def prefill_shared(K: int, cluster: int, safe: bool, arch: str = HOPPER) -> int:
    """Dynamic shared memory of :func:`prefill_kernel` in bytes; the sources assert that their layout fits."""
    return _hopper_shared(safe) if has_own(K, arch) else _portable_shared(K, cluster, arch)


# The Hopper kernel, K = V = 128: blocks of 4 scan warps (64 columns of V), 8 slice warps (each 32 channels of half a
# chunk) and 2 solver warps, whose warpgroup must be whole for registers to be traded.
_SCANNERS, _SCAN_WARPS, _SLICE_WARPS, _SOLVER_SLOTS, _STAGES = 2, 4, 8, 4, 6


class Registers(NamedTuple):
    """Of one thread, by its warp's task. A warpgroup of each and two of slices share 512."""

    scan: int
    slices: int
    solve: int


@cache
def _registers(cluster: int, safe: bool) -> Registers:
    """What spills nothing: a spilled word is read back behind the loads from device memory, and waits for them."""
    return Registers(184, 120, 88) if safe or cluster == _SCANNERS else Registers(176, 128, 80)


def _hopper_defines(cluster: int, safe: bool) -> tuple[tuple[str, int], ...]:
    registers = _registers(cluster, safe)
    return (
        ("SCANNERS", _SCANNERS),
        ("STAGES", _STAGES),
        ("GROUPS", 1),
        ("SOLVER_SLOTS", _SOLVER_SLOTS),
        ("SCAN_REGISTERS", registers.scan),
        ("SLICE_REGISTERS", registers.slices),
        ("SOLVE_REGISTERS", registers.solve),
    )


def _hopper_shared(safe: bool) -> int:
    stage = 2 * 3 * 4096 + 3072 + 4 * 128 + 512
    values_and_output = 4 * 4 * 1024
    slices = 4 * ((14 if safe else 16) * 512 + 1024 + 256)
    triangles, bias, barriers, share = 2 * 2560, 4 * 128, 8 * (2 * _STAGES + 4), 32
    return _STAGES * stage + values_and_output + slices + triangles + bias + barriers + share


# The other kernel: 16 columns of V (or 32) a scan warp, a chunk of 16 tokens a prepare warp.


def _portable_defines(K: int, cluster: int, safe: bool, arch: str) -> tuple[tuple[str, int], ...]:
    return (
        ("WARPGROUP", int(_uses_warpgroup(K, arch))),
        ("STAGES", _portable_stages(K, arch)),
        ("PREPARE_WARPS", _prepare_warps(K, cluster, arch)),
        ("SLICE_UNROLL", 2 if safe else 1),
    )


def _uses_warpgroup(K: int, arch: str) -> bool:
    """Does the scan use warpgroup products, which take 64 columns of V at a time?"""
    return arch == HOPPER and K == 64


def _portable_stages(K: int, arch: str) -> int:
    """Chunk images in the ring: as many as fit, a multiple of 4 so that every cluster size divides it."""
    wanted = 12 if K == 128 else 16
    return wanted if SHARED_LIMITS.get(arch, 99 * 1024) > 200 * 1024 else 4


def _scan_warps(K: int, cluster: int, arch: str) -> int:
    """Warps that carry the state, a block: 16 columns of V each, or 32 for want of registers."""
    columns = K // cluster
    return columns // 32 if columns == 128 else columns // 16


def _prepare_warps(K: int, cluster: int, arch: str) -> int:
    """Warps that prepare chunks, a block; more than stages would only wait for one another."""
    wanted = 8 if _scan_warps(K, cluster, arch) == 4 and cluster == 1 else 4
    return min(wanted, _portable_stages(K, arch) // cluster)


def _portable_shared(K: int, cluster: int, arch: str) -> int:
    stages = _portable_stages(K, arch)
    halves, tiles = K // 64, K // cluster // 16
    stage = halves * 3 * 2048 + 1024 + 4 * K + 256
    pitch = -(-stage // 1024) * 1024
    scratch = _prepare_warps(K, cluster, arch) * 16 * 20 * 4
    return stages * (pitch + 16) + 5 * tiles * 512 + scratch + 4 * K + 16
