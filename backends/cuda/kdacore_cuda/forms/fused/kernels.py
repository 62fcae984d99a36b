"""The chunk forward kernels: how each is compiled, its blocks and shared memory, and how clusters
share a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from kdacore_cuda.architectures import CLUSTER_ARCHS, HEAD_DIMS, HOPPER, SHARED_LIMITS
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.kernel_parameters import STEP_TOKENS, TICKETS_BYTES


def has_hopper_kernel(K: int, arch: str) -> bool:
    """Whether Hopper's own kernel serves this head dim: 64 columns of V per warpgroup, 32 tokens
    per step."""
    return arch == HOPPER and K == 128


def cluster_sizes(K: int, arch: str) -> tuple[int, ...]:
    """Cluster sizes the kernels are compiled with. At K = 64 one block carries the whole state;
    sharing was slower."""
    if K == 64 or arch not in CLUSTER_ARCHS:
        return (1,)
    return (2, 4) if has_hopper_kernel(K, arch) else (1, 2, 4)


ClustersAtOnce = Callable[[int], int]
"""Given a cluster's number of blocks: how many such clusters are resident on the GPU at once; 0 if unknown."""


def _unknown(cluster: int) -> int:
    return 0


_LONG = 1024
"""Tokens of a sequence from which on clusters of four pay that share more items than there are clusters."""


def cluster_size(
    K: int, items: int, tokens: int, multiprocessors: int, arch: str, at_once: ClustersAtOnce = _unknown
) -> int:
    """Blocks that share an item (a sequence and value head) of ``items``. Depends on shapes and the
    device alone.

    A larger cluster shortens one item and costs throughput, so it pays while multiprocessors are
    idle. On Hopper clusters of four still pay where they share up to a third more items than run at
    once, if sequences are long. Both sizes give the same bits there, so tokens may decide.

    Args:
        K: head dim.
        items: sequences times value heads.
        tokens: of a sequence, on average.
        multiprocessors: of the device.
        arch: the real architecture.
        at_once: as the driver says. By shapes and multiprocessors where it does not.
    """
    sizes = cluster_sizes(K, arch)
    if has_hopper_kernel(K, arch):
        if 3 * items > multiprocessors:  # more than a third above whatever the driver would say
            return 2
        together = at_once(4) or _clusters_at_once(4, multiprocessors)
        return 4 if items <= together or (3 * items <= 4 * together and tokens >= _LONG) else 2
    reached = {c: multiprocessors if c <= 2 else multiprocessors * 9 // 11 for c in sizes}
    return max(c for c in sizes if c == sizes[0] or items * c <= reached[c])


def _clusters_at_once(cluster: int, multiprocessors: int) -> int:
    """How many clusters run at once, for plans without a device whose driver could be asked. A cluster lies within one
    of the parts that a device is made of, so clusters of four leave some multiprocessors out: of an H200's 132 they
    have 120. Other devices with as many multiprocessors may differ."""
    return multiprocessors * 10 // 44 if cluster == 4 else multiprocessors // cluster


def resident_clusters(
    K: int, cluster: int, items: int, multiprocessors: int, arch: str, at_once: ClustersAtOnce = _unknown
) -> int:
    """How many clusters divide all ``items`` evenly among themselves, or 0: each item has a cluster
    of its own.

    As many as run at once, where there are more items than that and the kernel can cut an item in
    two.
    """
    if not has_hopper_kernel(K, arch):
        return 0
    together = at_once(cluster) or _clusters_at_once(cluster, multiprocessors)
    return together if items > together else 0


def cut_states_size(clusters: int) -> int:
    """Float32 numbers for tickets, for the states of items cut in two, one per cluster, and for the
    flags (8 bytes a warp) behind."""
    return TICKETS_BYTES // 4 + clusters * (128 * 128 + 2 * _SCANNERS * _SCAN_WARPS)


_LEAST_HELPED_PART = {True: 23.5 / 132, False: 22.5 / 132}
"""By whether gates are bounded: sequences and value heads with helpers, at least, as part of the multiprocessors. With
fewer, clusters of four do not wait for what they prepare (bounded), or other kernels are faster (unbounded)."""


def helper_clusters(
    items: int,
    tokens: int,
    cluster: int,
    bounded: bool,
    multiprocessors: int,
    at_once: ClustersAtOnce = _unknown,
) -> int:
    """Clusters of blocks that help ``items`` sequences and heads of ``tokens`` tokens: each block prepares every third
    step of one of them. 0 where they have no helpers; the same bits.

    Helpers and the clusters that they help all run at once.
    """
    helpers = -(-items // 4)
    if cluster < 4 or tokens < _LONG or items < _LEAST_HELPED_PART[bounded] * multiprocessors:
        return 0
    return helpers if items + helpers <= (at_once(4) or _clusters_at_once(4, multiprocessors)) else 0


def helped_chunks_size(T: int, items: int) -> int:
    """Float32 numbers for tickets, for the steps that helpers prepare for ``items`` sequences and heads of ``T``
    tokens, and for the flags (8 bytes for each scanning block) that say they are there."""
    helped_steps = -(-T // STEP_TOKENS) // (_SCANNERS + 1)
    return TICKETS_BYTES // 4 + items * helped_steps * (_IMAGE_BYTES // 4 + 2 * _SCANNERS)


SHORT_TOKENS, SHORT_ITEMS = 4 * STEP_TOKENS, 8
"""Tokens of a short sequence, at most; sequences and heads of a cluster, at least, where many short
ones go a way of their own, since uneven parts cost little there."""


def are_many_short(T: int, items: int, cluster: int, clusters: int) -> bool:
    """Whether ``clusters`` have a faster kernel for ``items`` sequences and heads of ``T`` tokens: the
    same bits."""
    return cluster == _SCANNERS and 0 < SHORT_ITEMS * clusters <= items and T <= SHORT_TOKENS


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
        many_short: the way of many short sequences (:func:`are_many_short`).
        helped: each cluster has a helper (:func:`helper_clusters`).
    """
    own = has_hopper_kernel(K, arch)
    defines = (
        ("K_DIM", K),
        ("V_DIM", K),
        ("CLUSTER", cluster),
        ("BOUNDED", int(bounded)),
        ("G_FLOAT", int(float_gate)),
        ("SHARED_LIMIT", chunk_forward_shared_bytes(K, cluster, bounded, arch)),
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


TAIL_THREADS, TAIL_SHARED, TAIL_BLOCKS = 128, 32 * (2 * 128 + 16) * 4 + 8 * (128 + 24) * 4, 4
"""Of :func:`checkpoint_tail_kernel`: block size, bytes of shared memory, blocks a checkpoint and
value head."""


def checkpoint_tail_kernel() -> KernelSource:
    """From the state at the start of a step to the one before a token in it, on Hopper, K = V = 128.
    Takes :data:`kdacore_cuda.kernel_parameters.CHECKPOINT_TAIL`."""
    return KernelSource(
        "sm90/chunk_forward/checkpoint_tail.cu", "checkpoint_tail", (("SHARED_BYTES", TAIL_SHARED),)
    )


def chunk_forward_threads(K: int, cluster: int, arch: str = HOPPER) -> int:
    """Block size of :func:`chunk_forward_kernel`."""
    if has_hopper_kernel(K, arch):
        return 32 * (_SCAN_WARPS + _SLICE_WARPS + _SOLVER_SLOTS)
    return 32 * (_scan_warps(K, cluster) + _prepare_warps(K, cluster, arch))


def chunk_forward_shared_bytes(K: int, cluster: int, bounded: bool, arch: str = HOPPER) -> int:
    """Dynamic shared memory of :func:`chunk_forward_kernel` in bytes; the sources assert that their
    layout fits."""
    return _hopper_shared(bounded) if has_hopper_kernel(K, arch) else _portable_shared(K, cluster, arch)


def packaged_chunk_forward_kernels(arch: str) -> Iterator[KernelSource]:
    """The chunk forward kernels shipped for ``arch``; those with a float32 ``g`` for Hopper
    only."""
    float_gates = (False, True) if arch == HOPPER else (False,)
    for K in HEAD_DIMS:
        for cluster, bounded, float_gate in product(cluster_sizes(K, arch), (False, True), float_gates):
            yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch)
            if has_hopper_kernel(K, arch) and cluster == _SCANNERS:
                yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch, many_short=True)
            if has_hopper_kernel(K, arch) and cluster == 2 * _SCANNERS:
                yield chunk_forward_kernel(K, cluster, bounded, float_gate, arch, helped=True)


# The Hopper kernel, K = V = 128. A block has 4 scan warps (64 columns of V), 8 slice warps (32
# channels of half a chunk each) and 2 solver warps. The solvers' warpgroup is filled up to 4 warps,
# as reallocating registers requires.
_SCANNERS, _SCAN_WARPS, _SLICE_WARPS, _SOLVER_SLOTS, _STAGES = 2, 4, 8, 4, 6
_IMAGE_BYTES = 2 * 3 * 4096 + 3072 + 4 * 128 + 3 * 4 * 32  # of a prepared step


class Registers(NamedTuple):
    """Registers of one thread by its warp's task. The four warpgroups of a block have 512 in all: one scan, two slice
    and one solve, or in clusters of four, three slice and one solve, or one scan and three of little use."""

    scan: int
    slices: int
    solve: int


def _registers(cluster: int) -> Registers:
    """Counts with which nothing spills: reading a spilled word back waits for the loads queued
    before it."""
    return Registers(184, 120, 88) if cluster == _SCANNERS else Registers(232, 136, 88)


def _hopper_defines(cluster: int, many_short: bool, helped: bool) -> tuple[tuple[str, int], ...]:
    registers = _registers(cluster)
    return (
        ("SCANNERS", _SCANNERS),
        ("STAGES", _STAGES),
        ("GROUPS", 1),
        ("SOLVER_SLOTS", _SOLVER_SLOTS),
        ("SCAN_REGISTERS", registers.scan),
        ("SLICE_REGISTERS", registers.slices),
        ("SOLVE_REGISTERS", registers.solve),
        ("MANY_SHORT", int(many_short)),
        *((("HELPERS", 1),) if helped else ()),
    )


def _hopper_shared(bounded: bool) -> int:
    stage = -(-_IMAGE_BYTES // 1024) * 1024
    values_and_output = 4 * 4 * 1024
    slices = 4 * ((14 if bounded else 16) * 512 + 1024 + 256)
    triangles, bias, barriers, share = 2 * 2560, 4 * 128, 8 * (3 * _STAGES + 8), 32
    return _STAGES * stage + values_and_output + slices + triangles + bias + barriers + share


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


def _portable_shared(K: int, cluster: int, arch: str) -> int:
    stages = _portable_stages(K, arch)
    halves, tiles = K // 64, K // cluster // 16
    stage = halves * 3 * 2048 + 1024 + 4 * K + 256
    pitch = -(-stage // 1024) * 1024
    scratch = _prepare_warps(K, cluster, arch) * 16 * 20 * 4
    return stages * (pitch + 16) + 5 * tiles * 512 + scratch + 4 * K + 16
