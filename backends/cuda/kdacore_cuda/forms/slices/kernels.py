"""The kernels for slices of a row that several ranks share (context parallelism) on Hopper,
K = V = 128; beside those for segments of whole calls."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, SEGMENTS, TRANSITION
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_FORWARD, _BACKWARD = "sm90/chunk_forward/segments", "sm90/chunk_backward"


@cache
def transition_kernel(blocks: int) -> Kernel:
    """Forward: a slice's M and C from the maps of its segments; ``blocks`` (4 or 8, same bits, as for the kernels
    below) per result, value head, and M or C."""
    return make_kernel(f"{_FORWARD}/transition", TRANSITION, ROWS=128 // blocks)


@cache
def starts_kernel(blocks: int) -> Kernel:
    """Forward: the state at the start of every segment; ``blocks`` per sequence and value head."""
    return make_kernel(f"{_FORWARD}/slice_starts", SEGMENTS, ROWS=128 // blocks)


@cache
def slice_gradient_kernel(blocks: int) -> Kernel:
    """Backward: the gradient of the state at the slice's start, as far as this rank knows it;
    ``blocks`` per result and value head."""
    return make_kernel(f"{_BACKWARD}/slice_gradient", CHUNK_BACKWARD, ROWS=128 // blocks)


@cache
def chain_kernel(blocks: int) -> Kernel:
    """Backward: the state at the start of every segment and its gradient at every end; ``blocks`` per
    sequence, value head and direction."""
    return make_kernel(f"{_BACKWARD}/slice_chain", CHUNK_BACKWARD, ROWS=128 // blocks)
