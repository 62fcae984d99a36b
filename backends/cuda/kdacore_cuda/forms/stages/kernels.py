"""The kernels of the training stages ``kda_chunk_intra`` and ``kda_recompute_w_u``, and how they
divide their work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kdacore_cuda.kernel_parameters import INTRA, RECOMPUTE
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_THREADS = 128
"""Of a block of the portable kernels."""


@cache
def intra_kernel(K: int, float16: bool) -> Kernel:
    """The stage ``kda_chunk_intra`` for one head dim and 16-bit dtype (float16, else bfloat16)."""
    flags = {"K_DIM": K, "HALF_F16": float16, "THREADS": _THREADS, "MIN_BLOCKS": 4}
    return make_kernel("common/stages/intra", INTRA, **flags)


@cache
def recompute_kernel(K: int, V: int, float16: bool) -> Kernel:
    """The stage ``kda_recompute_w_u`` for two head dims and a 16-bit dtype, on every architecture."""
    flags = {"K_DIM": K, "V_DIM": V, "HALF_F16": float16, "THREADS": _THREADS, "MIN_BLOCKS": 3}
    return make_kernel("common/stages/recompute", RECOMPUTE, **flags)


# kda_recompute_w_u on Hopper with K = V = 128 has a kernel of its own: csrc/sm90.

HOPPER_HEAD_DIM = 128
SMALL_CALL_ITEMS = 8
"""Up to this many chunks and value heads per multiprocessor, two blocks for each were measured to
be faster."""
L2_BYTES = 72 * 2**20
"""Bytes of the last results that are written so as to stay in L2. The L2 has 50 MB and retains
about 33 of these; values up to 120 MB measured the same."""


@cache
def hopper_recompute_kernel(float16: bool, with_q: bool, whole_items: bool = True) -> Kernel:
    """The stage ``kda_recompute_w_u`` on Hopper for K = V = 128, a 16-bit dtype, and q given or not. ``whole_items``:
    some blocks of the launch have whole items, and all of them the shared memory for one (:class:`RecomputeGrid`)."""
    flags = {"K_DIM": HOPPER_HEAD_DIM, "HALF_F16": float16, "WITH_Q": with_q}
    return make_kernel("sm90/stages/recompute_hopper", RECOMPUTE, 0 if whole_items else 1, **flags)


class RecomputeGrid(NamedTuple):
    """How the blocks of :func:`hopper_recompute_kernel` divide the items (chunks times value heads)
    of a call."""

    whole: int
    """The first items, an even number of them, have one block each; each other item has two blocks
    of half its channels. A block of half an item needs less shared memory: a multiprocessor holds four,
    as registers allow, but three where some blocks of the launch have whole items."""
    grid: int
    """Blocks."""
    staggered: int
    """The first blocks, those that start together, issue their loads one after another at about the
    rate of memory. Otherwise all of them would wait for memory at the same time, and then all
    compute."""
    first_in_l2: int
    """Results from this item on stay in L2, where the next kernel finds them and no write to memory
    delays this one."""


def recompute_grid(items: int, multiprocessors: int, empty: int, with_q: bool) -> RecomputeGrid:
    """The division of ``items`` chunks and value heads of a call.

    The last items of a long call have two blocks each, so that multiprocessors finish at about the
    same time. With many empty items it is unknown which items are the last, and twice as many idle
    blocks would cost more.

    Args:
        items: chunks times value heads, those that may turn out empty included.
        multiprocessors: of the device.
        empty: about how many of the items hold no tokens, as the slots of a pack may.
        with_q: q is given.
    """
    last = multiprocessors + (empty if empty <= 4 * multiprocessors else 0)
    whole = 0 if items <= SMALL_CALL_ITEMS * multiprocessors else (items - last) // 2 * 2
    written = 2 * 64 * HOPPER_HEAD_DIM * (3 + with_q)
    return RecomputeGrid(
        whole=whole,
        grid=whole + 2 * (items - whole),
        staggered=multiprocessors * (3 if whole else 4),
        first_in_l2=max(items - empty - L2_BYTES // written, 0),
    )
