"""The kernels of ``chunk_kda`` in two launches that run side by side on Hopper, K = V = 128."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, WALK
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/chunk_forward/dataflow"

WALK_BLOCKS = 2
"""Blocks of :func:`walk_kernel` for each sequence and value head."""


@cache
def prepare_units_kernel(float_gate: bool, bounded: bool) -> Kernel:
    """Operands of each chunk (arguments as of :mod:`kdacore_cuda.forms.backward.kernels`); a block computes one unit
    after another, several at once."""
    flags = {"G_FLOAT": float_gate, "BOUNDED": bounded, "FOR_SEGMENTS": True, "SIDE_BY_SIDE": True}
    return make_kernel(f"{_SOURCES}/prepare_units", CHUNK_BACKWARD, **flags)


def prepare_blocks(units: int, items: int, multiprocessors: int) -> int:
    """Blocks of :func:`prepare_units_kernel`: one for each multiprocessor that the walks of ``items`` sequences times
    value heads leave, as far as there are ``units`` for them."""
    return min(units, max(1, multiprocessors - WALK_BLOCKS * items))


@cache
def walk_kernel() -> Kernel:
    """Outputs, checkpoints and final states: two blocks per sequence and value head."""
    return make_kernel(f"{_SOURCES}/walk", WALK)
