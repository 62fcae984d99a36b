"""The kernels of ``chunk_gated_delta_rule`` on Hopper, K = V = 128."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.kernel_parameters import GATED_DELTA, GATED_DELTA_BACKWARD, SUMS
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/gated_delta"


@cache
def records_kernel() -> Kernel:
    """The record of every chunk and value head: a block for each chunk and key head."""
    return make_kernel(f"{_SOURCES}/chunk_records", GATED_DELTA)


@cache
def walk_kernel(warpgroups: int, keeps: bool = False) -> Kernel:
    """Outputs and states of every sequence and value head, from the records.

    Args:
        warpgroups: per block. 2: a block carries a whole state; 1: two blocks share one. The same bits.
        keeps: it also writes u and the states at the start of chunks, for the backward.
    """
    params = GATED_DELTA_BACKWARD if keeps else GATED_DELTA
    return make_kernel(f"{_SOURCES}/walk_records", params, WARPGROUPS=warpgroups, KEEPS=keeps)


@cache
def backward_walk_kernel(warpgroups: int, with_states: bool) -> Kernel:
    """Gradients of every state in reverse, and of v.

    Args:
        warpgroups: as of :func:`walk_kernel`.
        with_states: further blocks compute u and the states again, beside those.
    """
    macros = {"WARPGROUPS": warpgroups, "WITH_STATES": with_states}
    return make_kernel(f"{_SOURCES}/walk_backward", GATED_DELTA_BACKWARD, **macros)


@cache
def grads_kernel() -> Kernel:
    """Every input gradient but that of v; one block a multiprocessor loops over chunks and key heads."""
    return make_kernel(f"{_SOURCES}/unit_grads", GATED_DELTA_BACKWARD)


@cache
def sums_kernel() -> Kernel:
    """Gradients of A_log and dt_bias: sums over chunks, one block a value head."""
    return make_kernel(f"{_SOURCES}/gate_sums", SUMS)
