"""Every kernel this backend can build, and which of them are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build import KernelSource

HEAD_DIMS = (64, 128)

DECODE_ANY, DECODE_PLAIN, DECODE_ONE = DECODE_MODES = (0, 1, 2)


class DecodeTile(NamedTuple):
    """How a decode block is cut."""

    warps: int
    rows: int
    """16-byte pieces of state a lane holds."""
    min_blocks: int
    """Blocks a multiprocessor must have registers for."""
    columns: int
    """Columns of V a block takes."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared(self, K: int, v_first: bool) -> int:
        """Dynamic shared memory in bytes; the layout is in state_columns.cuh."""
        return 0 if v_first else 2 * (12 * K + self.warps * 4 * (2 * self.columns + 4))


_DECODE_TILES: dict[tuple[int, bool, bool], tuple[int, int, int, tuple[int, int, int]]] = {
    (64, False, False): (4, 8, 64, (3, 4, 6)),
    (64, False, True): (4, 4, 64, (3, 4, 6)),
    (64, True, False): (1, 8, 16, (8, 16, 24)),
    (64, True, True): (1, 8, 32, (8, 12, 16)),
    (128, False, False): (8, 8, 64, (2, 3, 3)),
    (128, False, True): (4, 8, 64, (2, 4, 4)),
    (128, True, False): (1, 8, 8, (8, 20, 32)),
    (128, True, True): (1, 8, 16, (8, 12, 16)),
}
"""Head dim, V first, bfloat16 state -> warps, pieces a lane, columns, and blocks a multiprocessor for each mode."""


def decode_tile(K: int, v_first: bool, bf16_state: bool, mode: int) -> DecodeTile:
    """The tile for one kernel. Nothing a call chooses changes the order of its sums: not the batch, not the tokens."""
    warps, rows, columns, min_blocks = _DECODE_TILES[K, v_first, bf16_state]
    return DecodeTile(warps, rows, min_blocks[mode], columns)


def decode_kernel(K: int, v_first: bool, bf16_state: bool, mode: int) -> KernelSource:
    """The recurrent kernel for one head dim, state layout and state dtype.

    All modes do the same arithmetic, bit for bit. ``DECODE_PLAIN``: bfloat16 q, k and v, no float16, a gate for each
    channel, token arrays contiguous and below 2**31 elements, not packed, rows of states on 16 bytes. ``DECODE_ONE``:
    besides, one token a sequence, bfloat16 g and beta, float32 dt_bias, a pool with one row a sequence.
    ``DECODE_ANY``: everything.
    """
    tile = decode_tile(K, v_first, bf16_state, mode)
    defines = (
        ("K_DIM", K),
        ("WARPS", tile.warps),
        ("ROWS", tile.rows),
        ("MIN_BLOCKS", tile.min_blocks),
        ("COLUMNS", tile.columns),
        ("V_FIRST", int(v_first)),
        ("STATE_BF16", int(bf16_state)),
        ("MODE", mode),
    )
    return KernelSource("common/decode.cu", "decode", defines)


def decode_kernels() -> Iterator[KernelSource]:
    """Every shipped decode kernel."""
    for K in HEAD_DIMS:
        for v_first, bf16_state, mode in product((False, True), (False, True), DECODE_MODES):
            yield decode_kernel(K, v_first, bf16_state, mode)


SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100f": 227 * 1024, "sm_120": 99 * 1024}
"""Dynamic shared memory a block may use, by build architecture."""
CLUSTERS = (1, 2, 4)
CLUSTER_ARCHS = ("sm_90a", "sm_100f")
"""Architectures whose blocks form clusters here."""
SHIFTED_REGISTERS = {(128, 1): (152, 200), (128, 2): (152, 184)}
"""Registers of scan and prepare warps where warpgroups trade them, by head dim and cluster size."""


def cluster_size(K: int, items: int, processors: int, arch: str) -> int:
    """Blocks that share one of ``items`` sequences and heads. Depends on shapes and the device alone.

    Sharing shortens one item and costs throughput, so it pays while there are multiprocessors to spare. With 64
    columns one block's warpgroup holds the whole state, and sharing was slower when measured.
    """
    if arch not in CLUSTER_ARCHS or K == 64:
        return 1
    return max(c for c in CLUSTERS if c == 1 or items * c <= processors)


def prefill_stages(K: int, arch: str) -> int:
    """Chunk images in the ring: as many as fit, a multiple of 4 so that every cluster size divides it."""
    wanted = 12 if K == 128 else 16
    return wanted if SHARED_LIMITS.get(arch, 99 * 1024) > 200 * 1024 else 4


def scan_warps(K: int, cluster: int, warpgroup: bool) -> int:
    """Warps that carry the state, a block: 16 columns of V each, or 32 for want of registers."""
    columns = K // cluster
    return columns // 32 if columns == 128 and not warpgroup else columns // 16


def prepare_warps(K: int, cluster: int, arch: str) -> int:
    """Warps that prepare chunks, a block; more than stages would only wait for one another."""
    wanted = 8 if scan_warps(K, cluster, uses_warpgroup(K, cluster, arch)) == 4 and cluster == 1 else 4
    return min(wanted, prefill_stages(K, arch) // cluster)


def uses_warpgroup(K: int, cluster: int, arch: str) -> bool:
    """Does the scan use warpgroup products? They take 64 columns of V at a time."""
    return arch == "sm_90a" and K // cluster >= 64


def prefill_threads(K: int, cluster: int, arch: str = "sm_90a") -> int:
    """Block size of :func:`prefill_kernel`."""
    return 32 * (scan_warps(K, cluster, uses_warpgroup(K, cluster, arch)) + prepare_warps(K, cluster, arch))


def prefill_kernel(K: int, cluster: int, safe: bool, float_gate: bool, arch: str = "sm_90a") -> KernelSource:
    """The fused prefill kernel for one head dim (K = V), cluster size, gate range and dtype of ``g``."""
    scan, prepare = SHIFTED_REGISTERS.get((K, cluster), (0, 0)) if arch == "sm_90a" else (0, 0)
    defines = (
        ("K_DIM", K),
        ("V_DIM", K),
        ("CLUSTER", cluster),
        ("SAFE", int(safe)),
        ("G_FLOAT", int(float_gate)),
        ("WARPGROUP", int(uses_warpgroup(K, cluster, arch))),
        ("STAGES", prefill_stages(K, arch)),
        ("PREPARE_WARPS", prepare_warps(K, cluster, arch)),
        ("SHARED_LIMIT", prefill_shared(K, cluster, arch)),
        ("SLICE_UNROLL", 2 if safe else 1),
        ("SCAN_REGISTERS", scan),
        ("PREPARE_REGISTERS", prepare),
    )
    return KernelSource("sm90/prefill.cu", "prefill", defines)


def prefill_shared(K: int, cluster: int, arch: str = "sm_90a") -> int:
    """Dynamic shared memory of :func:`prefill_kernel` in bytes; chunk.cuh asserts that its layout fits."""
    stages = prefill_stages(K, arch)
    halves, tiles = K // 64, K // cluster // 16
    stage = halves * 3 * 2048 + 1024 + 4 * K + 256
    pitch = -(-stage // 1024) * 1024
    return (
        stages * (pitch + 16) + 5 * tiles * 512 + prepare_warps(K, cluster, arch) * 16 * 20 * 4 + 4 * K + 16
    )


STAGE_THREADS = 128


def intra_kernel(K: int, float16: bool) -> KernelSource:
    """The stage ``kda_chunk_intra`` for one head dim and 16-bit dtype."""
    defines = (
        ("K_DIM", K),
        ("HALF_F16", int(float16)),
        ("THREADS", STAGE_THREADS),
        ("MIN_BLOCKS", 4),
        ("SHARED_LIMIT", intra_shared(K)),
    )
    return KernelSource("common/intra.cu", "intra", defines)


def intra_shared(K: int) -> int:
    """Dynamic shared memory of :func:`intra_kernel` in bytes: operand images, or what replaces them, and beta."""
    images, results = 12 * 16 * K * 2, 64 * 72 * 4 + 2 * 64 * 144
    return max(images, results) + 4 * 64


def recompute_kernel(K: int, V: int, float16: bool) -> KernelSource:
    """The stage ``kda_recompute_w_u`` for two head dims and a 16-bit dtype."""
    defines = (
        ("K_DIM", K),
        ("V_DIM", V),
        ("HALF_F16", int(float16)),
        ("THREADS", STAGE_THREADS),
        ("MIN_BLOCKS", 3),
        ("SHARED_LIMIT", recompute_shared(K, V)),
    )
    return KernelSource("common/recompute.cu", "recompute", defines)


def recompute_shared(K: int, V: int) -> int:
    """Dynamic shared memory of :func:`recompute_kernel` in bytes: the operands of both products, k's in two parts."""
    return 64 * 2 * (64 + 2 * K + V)


def stage_kernels() -> Iterator[KernelSource]:
    """Every shipped kernel of the training stages: those with K = V."""
    for float16 in (False, True):
        for K in HEAD_DIMS:
            yield intra_kernel(K, float16)
            yield recompute_kernel(K, K, float16)


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """What :func:`kdacore_cuda.prebuilt.build_all` compiles for ``arch``: all but prefill with a float32 gate input
    and stages with K != V."""
    yield from decode_kernels()
    yield from stage_kernels()
    for K in HEAD_DIMS:
        clusters = CLUSTERS if K == 128 and arch in CLUSTER_ARCHS else (1,)
        for cluster in clusters:
            for safe in (False, True):
                yield prefill_kernel(K, cluster, safe, False, arch)
