"""The recurrent kernels: how each is compiled, the tile of the state that a block computes, and with it blocks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.kernel_parameters import RECURRENT, RECURRENT_RECORDS, ParamStruct
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

FULL_DEVICE_ITEMS = 128
"""Sequences and heads from which the next launch may be placed before this one starts. With fewer,
several launches would wait on the device at once, which was slower."""


class RecurrentTile(NamedTuple):
    """The tile of the state that one block computes."""

    warps: int
    rows: int
    """16-byte pieces of state that a lane holds."""
    min_blocks: int
    """Blocks that a multiprocessor must have registers for."""
    columns: int
    """Columns of V that a block computes."""
    parts: int = 1
    """Parts in which a warp adds up its channels."""


_TILES: dict[tuple[int, bool, bool], tuple[int, int, int, tuple[int, int, int]]] = {
    (64, False, False): (4, 8, 64, (3, 4, 6)),
    (64, False, True): (4, 4, 64, (3, 4, 6)),
    (64, True, False): (1, 8, 16, (8, 16, 24)),
    (64, True, True): (1, 8, 32, (8, 12, 16)),
    (128, False, False): (8, 8, 64, (2, 3, 3)),
    (128, False, True): (4, 8, 64, (2, 4, 4)),
    (128, True, False): (1, 8, 8, (8, 20, 32)),
    (128, True, True): (1, 8, 16, (8, 12, 16)),
}
"""Head dim, V first, state of 16 bits -> warps, pieces per lane, columns, and blocks per
multiprocessor of the first three modes; the fourth has the third's."""

_SEVERAL_TOKENS = {(128, False, False): RecurrentTile(4, 16, 3, 64, parts=2)}
"""The same -> the tile of the mode CONTIGUOUS where it is not the usual one. The order of sums is the same."""

_BLOCKS_WITH_RECORDS = {
    (64, True, True): 8,
    (128, False, True): 3,
    (128, True, False): 16,
    (128, True, True): 8,
}
"""The same -> blocks per multiprocessor of the mode CONTIGUOUS with records of candidates, where as many as without
them would leave too few registers."""


@cache
def recurrent_tile(K: int, v_first: bool, state_dtype: str, mode: RecurrentMode) -> RecurrentTile:
    """The tile of one kernel. It does not depend on the batch or the tokens, so neither changes the
    order of sums.

    Args:
        K: head dim, K = V, one of :data:`kdacore_cuda.architectures.HEAD_DIMS`; KeyError for
            others.
        v_first: states are ``[..., V, K]``.
        state_dtype: float32, bfloat16 or float16.
        mode: which calls it serves.
    """
    kind = K, v_first, state_dtype != "float32"
    if mode == RecurrentMode.CONTIGUOUS and kind in _SEVERAL_TOKENS:
        return _SEVERAL_TOKENS[kind]
    warps, rows, columns, min_blocks = _TILES[kind]
    return RecurrentTile(warps, rows, min_blocks[min(mode, RecurrentMode.ONE_TOKEN)], columns)


def grid_blocks(r: Request, tile: RecurrentTile) -> int:
    """Blocks of a launch."""
    return r.N * r.HV * (r.V // tile.columns)


@cache
def recurrent_kernel(K: int, v_first: bool, state_dtype: str, mode: RecurrentMode) -> Kernel:
    """The recurrent kernel for one head dim, state layout, state dtype and mode. Arguments as of
    :func:`recurrent_tile`."""
    return _make("recurrent", RECURRENT, K, v_first, state_dtype, mode, False)


@cache
def records_kernel(K: int, v_first: bool, state_dtype: str, mode: RecurrentMode) -> Kernel:
    """The same with records of candidates, for the first two modes."""
    return _make("recurrent", RECURRENT_RECORDS, K, v_first, state_dtype, mode, True)


@cache
def commit_kernel(K: int, v_first: bool, state_dtype: str) -> Kernel:
    """The kernel that applies records to states without tokens."""
    return _make("commit_records", RECURRENT_RECORDS, K, v_first, state_dtype, RecurrentMode.GENERAL)


def _make(
    name: str,
    params: ParamStruct,
    K: int,
    v_first: bool,
    state_dtype: str,
    mode: RecurrentMode,
    records: bool | None = None,
) -> Kernel:
    tile = recurrent_tile(K, v_first, state_dtype, mode)
    if records and mode == RecurrentMode.CONTIGUOUS:
        blocks = _BLOCKS_WITH_RECORDS.get((K, v_first, state_dtype != "float32"), tile.min_blocks)
        tile = tile._replace(min_blocks=blocks)
    return make_kernel(
        *(f"common/recurrent/{name}", params),
        K_DIM=K,
        WARPS=tile.warps,
        ROWS=tile.rows,
        PARTS=tile.parts,
        MIN_BLOCKS=tile.min_blocks,
        COLUMNS=tile.columns,
        V_FIRST=v_first,
        STATE_BF16=state_dtype == "bfloat16",
        STATE_F16=True if state_dtype == "float16" else None,
        RECORDS=records,
        MODE=mode,
    )


_TOKEN_THREADS, _TOKEN_CHANNELS = 128, 4
"""Of the kernel :func:`record_tokens_kernel`: threads of a block, channels of a thread."""


@cache
def record_tokens_kernel(K: int) -> Kernel:
    """The kernel that writes keys and decays of a call's tokens into their records."""
    macros = {"K_DIM": K, "STATE_BF16": 0, "MODE": RecurrentMode.GENERAL}
    return make_kernel("common/recurrent/record_tokens", RECURRENT_RECORDS, **macros)


def record_tokens_blocks(r: Request, slots: int) -> int:
    """Blocks of its launch, for so many tokens of a sequence."""
    return -(-r.N * r.HV * slots * (r.K // _TOKEN_CHANNELS) // _TOKEN_THREADS)
