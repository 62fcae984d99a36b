"""The kernels of the fused decode step: how each is compiled, and with that the blocks of a launch."""

from __future__ import annotations

from functools import cache

from kdacore.types import Request
from kdacore_cuda.choice import BLOCKS_IN_TURN, RecurrentMode, Split
from kdacore_cuda.kernel_parameters import DECODE, DECODE_RECORDS
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_WARP_CHANNELS = 16
"""Channels of K for each warp of a block: a thread owns one of q's or k's."""


_HEAD_WARP_CHANNELS = 32
"""The same of blocks of four warps: a thread owns one of q's, k's and v's each."""
_HEAD_BLOCKS = {"float32": 3, "bfloat16": 5, "float16": 5}
"""State dtype -> blocks that a multiprocessor must have registers for where states are in shared memory: as many as
that takes."""
_SHARED_HEAD_BLOCKS = {2: 4, 4: 2}
"""Number of blocks that share a value head -> blocks of four warps that a multiprocessor must have registers for. With
at least as many as ``choice._BLOCKS_AT_ONCE`` says, all blocks of a launch are resident at the same time."""


@cache
def decode_kernel(
    K: int, v_first: bool, state_dtype: str, split: Split, mode: RecurrentMode, records: bool = False
) -> Kernel:
    """The kernel for one head dim, K = V, state layout, state dtype, division among blocks, and
    mode: the calls that it serves. ``records``: those that name rows of records of candidates."""
    warps, columns = K // (_HEAD_WARP_CHANNELS if split.four_warps else _WARP_CHANNELS), K // split.slices
    elements = 4 if state_dtype == "float32" else 8
    if split.four_warps:
        blocks = _HEAD_BLOCKS[state_dtype] if split.slices == 1 else _SHARED_HEAD_BLOCKS[split.slices]
    else:
        blocks = _MIN_BLOCKS[K, split.slices]
    return make_kernel(
        "common/decode/decode_head" if split.four_warps else "common/decode/decode",
        DECODE_RECORDS if records else DECODE,
        K_DIM=K,
        WARPS=warps,
        ROWS=K * columns // (elements * 32 * warps),
        PARTS=1,
        MIN_BLOCKS=blocks,
        COLUMNS=columns,
        V_FIRST=v_first,
        STATE_BF16=state_dtype == "bfloat16",
        STATE_F16=True if state_dtype == "float16" else None,
        RECORDS=True if records else None,
        MODE=mode,
        CLUSTER=split.blocks,
    )


_TOKENS_BLOCKS = {1: 3, 2: 3, 4: 2}
"""Blocks of a value head -> blocks that a multiprocessor must have registers for. Shared memory takes three with whole
heads."""


@cache
def tokens_kernel(v_first: bool, state_dtype: str, split: Split, mode: RecurrentMode) -> Kernel:
    """The kernel for several tokens of each sequence, by records or by states, in blocks of four warps. K = V = 128;
    ``mode`` is one of those for one token."""
    K, columns = 128, 128 // split.slices
    warps, elements = K // _HEAD_WARP_CHANNELS, 4 if state_dtype == "float32" else 8
    return make_kernel(
        "common/decode/decode_tokens",
        DECODE_RECORDS,
        K_DIM=K,
        WARPS=warps,
        ROWS=K * columns // (elements * 32 * warps),
        PARTS=1,
        MIN_BLOCKS=_TOKENS_BLOCKS[split.slices],
        COLUMNS=columns,
        V_FIRST=v_first,
        STATE_BF16=state_dtype == "bfloat16",
        STATE_F16=True if state_dtype == "float16" else None,
        RECORDS=True,
        MODE=mode,
        CLUSTER=split.blocks,
    )


_STORE_AT_ONCE = 0
"""How the state before the tokens is left (decode_sequences.cu)."""


@cache
def sequences_kernel(v_first: bool) -> Kernel:
    """The kernel for several tokens of each sequence whose blocks take several sequences: KDA, K = V = 128, float32
    states."""
    return make_kernel(
        "common/decode/decode_sequences",
        DECODE_RECORDS,
        K_DIM=128,
        WARPS=4,
        ROWS=32,
        PARTS=1,
        MIN_BLOCKS=BLOCKS_IN_TURN,
        COLUMNS=128,
        V_FIRST=v_first,
        STATE_BF16=False,
        RECORDS=True,
        MODE=RecurrentMode.ONE_TOKEN,
        CLUSTER=1,
        STORE_AHEAD=_STORE_AT_ONCE,
    )


_MIN_BLOCKS = {(128, 1): 2, (128, 2): 2, (128, 4): 2, (64, 1): 4}
"""Head dim and blocks of a value head -> blocks that a multiprocessor must have registers for. Heads are shared where
there are no more blocks than multiprocessors."""


def grid_blocks(r: Request, split: Split) -> int:
    """Blocks of a launch."""
    return r.N * r.HV * split.slices


_WINDOW_THREADS = 256
"""Threads of a block of :func:`windows_kernel`."""


@cache
def windows_kernel(K: int, records: bool = False) -> Kernel:
    """The kernel that writes the windows of q and k, and keys of records, where those of decoding cannot."""
    return make_kernel(
        "common/decode/decode_windows",
        DECODE_RECORDS if records else DECODE,
        K_DIM=K,
        STATE_BF16=0,
        RECORDS=True if records else None,
        MODE=RecurrentMode.GENERAL,
    )


def windows_blocks(r: Request) -> int:
    """Blocks of its launch."""
    return -(-r.N * 2 * r.H * r.K // _WINDOW_THREADS)


@cache
def commit_windows_kernel() -> Kernel:
    """The kernel that moves the convolution's windows of ``commit_records``, of any head dim."""
    macros = {"K_DIM": 128, "STATE_BF16": 0, "RECORDS": 1, "MODE": RecurrentMode.GENERAL}
    return make_kernel("common/decode/commit_windows", DECODE_RECORDS, **macros)


def commit_windows_blocks(r: Request) -> int:
    """Blocks of its launch."""
    return -(-r.N * r.spec("conv_state").shape[1] // _WINDOW_THREADS)
