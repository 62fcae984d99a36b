"""The stage ``kda_recompute_w_u`` on Hopper, K = V = 128: csrc/sm90/stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build import KernelSource
from kdacore_cuda.prefill_kernels import HOPPER

HEAD_DIM = 128
THREADS = 128


def shared_bytes(parts: int) -> int:
    """Dynamic shared memory of a block that takes one of ``parts``; csrc/sm90/stages/recompute_hopper_memory.cuh."""
    width = HEAD_DIM // parts
    return 64 * (2 * 2 * width + 4 * width + 2 * 64 + 4)


class Division(NamedTuple):
    """How the chunks and value heads of a call are given to blocks, which begin in pairs."""

    whole: int
    """The first of them, an even number, have a block each; each of the others has two, half its channels each."""
    grid: int
    """Blocks."""
    shared: int
    """Dynamic shared memory of each, in bytes: a multiprocessor has room for three where some take a whole one, else
    for four, as registers allow no fifth."""
    in_turn: int
    """The first of them, those that begin at once, ask for what they need one after another, at about the rate it
    comes. Else all would have theirs, and compute, at the same time."""
    kept: int
    """The results of this chunk and value head, and of those after it, are to stay in L2: whoever takes them next finds
    them there, and while this kernel runs they need not go to memory."""


FEW_ITEMS = 8
"""Chunks and value heads a multiprocessor up to which halves alone are faster, as measured."""

KEPT_BYTES = 72 * 2**20
"""Of the last results, this much is to stay in L2. It holds 50 MB and keeps some 33 of these; up to 120 MB the same."""


def divide(items: int, processors: int, empty: int, with_q: bool) -> Division:
    """For ``items`` chunks and value heads, the last ``empty`` of which, about, turn out to be none.

    The last of a long call are halves: multiprocessors end more alike. Where there are many empty ones it is not known
    which are the last, and twice as many blocks that do nothing would cost more.
    """
    last = processors + (empty if empty <= 4 * processors else 0)
    whole = 0 if items <= FEW_ITEMS * processors else (items - last) // 2 * 2
    parts = 1 if whole else 2
    written = 2 * 64 * HEAD_DIM * (3 + with_q)
    return Division(
        whole=whole,
        grid=whole + 2 * (items - whole),
        shared=shared_bytes(parts),
        in_turn=processors * (3 if whole else 4),
        kept=max(items - empty - KEPT_BYTES // written, 0),
    )


def serves(K: int, V: int, arch: str) -> bool:
    """Whether this kernel takes such calls; common/stages/recompute.cu takes all others."""
    return K == V == HEAD_DIM and arch == HOPPER


def hopper_kernel(float16: bool, with_q: bool) -> KernelSource:
    """The kernel; takes :data:`kdacore_cuda.layout.RECOMPUTE`."""
    defines = (
        ("K_DIM", HEAD_DIM),
        ("HALF_F16", int(float16)),
        ("WITH_Q", int(with_q)),
        ("SHARED_WHOLE", shared_bytes(1)),
        ("SHARED_HALF", shared_bytes(2)),
    )
    return KernelSource("sm90/stages/recompute_hopper.cu", "recompute_hopper", defines)


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped."""
    for float16, with_q in product((False, True), repeat=2):
        yield hopper_kernel(float16, with_q)
