"""Every kernel this backend can build, and which of them are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda import backward_kernels, recompute_kernels, segment_kernels
from kdacore_cuda.build import KernelSource
from kdacore_cuda.prefill_kernels import HOPPER, clusters, prefill_kernel

HEAD_DIMS = (64, 128)
BUILD_ARCHS = {"sm_90": "sm_90a", "sm_100": "sm_100f", "sm_103": "sm_100f"}
"""Architecture of a device -> that of the packaged machine code; for the others NVRTC compiles at the first call."""

DECODE_ANY, DECODE_PLAIN, DECODE_ONE, DECODE_HEAD = DECODE_MODES = (0, 1, 2, 3)


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
        """Dynamic shared memory in bytes; the layout is in csrc/common/recurrent/state_k_first.cuh."""
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
"""Head dim, V first, bfloat16 state -> warps, pieces a lane, columns, and blocks a multiprocessor for each of the first
three modes; the fourth has the third's."""


def decode_tile(K: int, v_first: bool, bf16_state: bool, mode: int) -> DecodeTile:
    """The tile for one kernel. Nothing a call chooses changes the order of its sums: not the batch, not the tokens."""
    warps, rows, columns, min_blocks = _DECODE_TILES[K, v_first, bf16_state]
    return DecodeTile(warps, rows, min_blocks[min(mode, DECODE_ONE)], columns)


def decode_mode(r: Request) -> int:
    """The narrowest kernel that serves contiguous arrays; see :func:`decode_kernel`."""
    types = {name: r.spec(name).dtype for name in ("v", "g", "beta", "dt_bias") if r.has(name)}
    plain = r.dtype == "bfloat16" and "float16" not in types.values() and not r.packed
    if not plain or r.B * r.T * r.HV * r.K >= 2**31:
        return DECODE_ANY
    one = r.T == 1 and r.state_indices_ndim == 1
    if r.scalar_gate:
        return DECODE_HEAD if one else DECODE_ANY
    usual = types["g"] == types["beta"] == "bfloat16" and types.get("dt_bias", "float32") == "float32"
    return DECODE_ONE if one and usual else DECODE_PLAIN


def decode_kernel(K: int, v_first: bool, bf16_state: bool, mode: int) -> KernelSource:
    """The recurrent kernel for one head dim, state layout and state dtype.

    All modes do the same arithmetic, bit for bit. ``DECODE_PLAIN``: bfloat16 q, k and v, no float16, a gate for each
    channel, token arrays contiguous and below 2**31 elements, not packed, rows of states on 16 bytes. ``DECODE_ONE``:
    besides, one token a sequence, bfloat16 g and beta, float32 dt_bias, a pool with one row a sequence.
    ``DECODE_HEAD``: as that, with one gate a head, and g, beta and dt_bias of either type. ``DECODE_ANY``: everything.
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
    return KernelSource("common/recurrent/recurrent.cu", "recurrent", defines)


def decode_kernels() -> Iterator[KernelSource]:
    """Every shipped decode kernel."""
    for K in HEAD_DIMS:
        for v_first, bf16_state, mode in product((False, True), (False, True), DECODE_MODES):
            yield decode_kernel(K, v_first, bf16_state, mode)


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
    return KernelSource("common/stages/intra.cu", "intra", defines)


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
    return KernelSource("common/stages/recompute.cu", "recompute", defines)


def recompute_shared(K: int, V: int) -> int:
    """Dynamic shared memory of :func:`recompute_kernel` in bytes: the operands of both products, k's in two parts."""
    return 64 * 2 * (64 + 2 * K + V)


def stage_kernels(arch: str) -> Iterator[KernelSource]:
    """The kernels of the training stages shipped for ``arch``: those with K = V that serve calls there."""
    for float16 in (False, True):
        for K in HEAD_DIMS:
            yield intra_kernel(K, float16)
            if not recompute_kernels.serves(K, K, arch):
                yield recompute_kernel(K, K, float16)
    if arch == HOPPER:
        yield from recompute_kernels.packaged_kernels()


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """What :func:`kdacore_cuda.prebuilt.build_all` compiles for ``arch``: all but stages with K != V and, off Hopper,
    prefill with a float32 gate input."""
    yield from decode_kernels()
    yield from stage_kernels(arch)
    if arch == HOPPER:
        yield from backward_kernels.packaged_kernels()
        yield from segment_kernels.packaged_kernels()
    for K in HEAD_DIMS:
        for cluster, safe, float_gate in product(
            clusters(K, arch), (False, True), (False, True) if arch == HOPPER else (False,)
        ):
            yield prefill_kernel(K, cluster, safe, float_gate, arch)
