"""Which row of a state pool a sequence starts from and which one it writes, read from a call's index arrays.

The index arrays are None where the call has none. ``null`` is a row number that names no slot besides the negative
ones, or None.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_slot(at, null):
    """The row number at an address, 64 bits; negative where it names no slot."""
    row = tl.load(at).to(tl.int64)
    if null is not None:
        row = tl.where(row == null, -1, row)
    return row


@triton.jit
def rows_of_sequence(n, state_indices, has_initial_state, null):
    """``(row, own)`` of sequence n: the row that it starts from, negative for zeros, and its slot, negative when it is
    padding."""
    own = n.to(tl.int64)
    if state_indices is not None:
        own = load_slot(state_indices + n, null)
    row = own
    if has_initial_state is not None:
        row = tl.where(tl.load(has_initial_state + n), row, -1)
    return row, own


@triton.jit
def row_written(n, own, state_indices, write_indices, null, INPLACE: tl.constexpr):
    """The row that sequence n's final state goes to, negative for none. ``own``: its slot."""
    goal = n.to(tl.int64)
    if INPLACE:
        goal = own
        if write_indices is not None:
            goal = load_slot(write_indices + n, null)
            if state_indices is not None:
                goal = tl.where(own < 0, -1, goal)
    return goal


@triton.jit
def pool_cell(
    d, vv, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr
):  # fmt: skip
    """Offsets in one head's state of channels ``d`` (columns) and values ``vv`` (rows), by the pool's own strides."""
    if K_STRIDE * KP + V_STRIDE * VP >= 2**31:
        d = d.to(tl.int64)
        vv = vv.to(tl.int64)
    return d[None, :] * K_STRIDE + vv[:, None] * V_STRIDE


@triton.jit
def row_mask(real, vv, row, MAYBE_NONE: tl.constexpr):
    """``real`` where there is a row, nowhere where it is negative.

    A comparison of a block: the interpreter of Triton 3.6 to 3.9 makes integers of a broadcast scalar comparison.
    """
    if MAYBE_NONE:
        real = real & (vv * 0 + row >= 0)[:, None]
    return real


@triton.jit
def load_pool_state(
    state, row, row_stride, hv, h_stride, cell, real, vv, MAYBE_NONE: tl.constexpr
):  # fmt: skip
    """The state of value head ``hv`` (64 bits) in a row, float32; 0 where not ``real``, and without a row."""
    at = state + row * row_stride + hv * h_stride + cell
    return tl.load(at, mask=row_mask(real, vv, row, MAYBE_NONE), other=0.0).to(tl.float32)
