"""The short causal convolution of a decode step, and the windows of tokens that it keeps from call to call.

A window is the ``TAPS - 1`` tokens before the next one, as they came: its rows are copied without arithmetic. Windows
of one program are numbered back in time: ``r1`` is the token before, ``r2`` the one before that, ``r3`` the third.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import positive, product, sigmoid


@triton.jit
def load_taps(conv, strides, c, mask, TAPS: tl.constexpr):
    """Weights of channels ``c``, float32: of the token itself and of the three before it; and the bias."""
    at = conv.conv_weight + c * strides.weight_channel
    f0 = tl.load(at + (TAPS - 1) * strides.weight_tap, mask=mask, other=0.0).to(tl.float32)
    f1 = tl.load(at + (TAPS - 2) * strides.weight_tap, mask=mask, other=0.0).to(tl.float32)
    f2 = f1
    f3 = f1
    if TAPS > 2:
        f2 = tl.load(at + (TAPS - 3) * strides.weight_tap, mask=mask, other=0.0).to(tl.float32)
    if TAPS > 3:
        f3 = tl.load(at + (TAPS - 4) * strides.weight_tap, mask=mask, other=0.0).to(tl.float32)
    bias = f1 * 0.0
    if conv.conv_bias is not None:
        bias = tl.load(conv.conv_bias + c, mask=mask, other=0.0).to(tl.float32)
    return f0, f1, f2, f3, bias


@triton.jit
def convolve(x, r1, r2, r3, f0, f1, f2, f3, bias, TAPS: tl.constexpr):
    """One token after the SiLU, float32."""
    y = x.to(tl.float32) * f0
    y = tl.fma(r1.to(tl.float32), f1, y)
    if TAPS > 2:
        y = tl.fma(r2.to(tl.float32), f2, y)
    if TAPS > 3:
        y = tl.fma(r3.to(tl.float32), f3, y)
    y += bias
    # v is subtracted from: a plain product could be contracted with that in some kernels and not in others.
    return product(y, sigmoid(y))


@triton.jit
def load_old(conv, strides, rows, c, mask, column):
    """One token of a window: column ``column`` of it, counted from its oldest."""
    first = tl.maximum(rows.preceding - 1, 0)
    there = mask & positive(c, rows.live)
    at = conv.conv_state + rows.state * strides.state_row + (first + column) * strides.state_column
    if conv.conv_windows is None:
        x = tl.load(at + c * strides.state_channel, mask=there, other=0.0)
    else:
        candidate = there & positive(c, tl.minimum(rows.preceding, rows.windows + 1))
        mine = conv.conv_windows + rows.windows * strides.windows_row + first * strides.windows_token
        mine += column * strides.windows_tap
        there = there & positive(c, 1 - rows.preceding)
        x = tl.load(at + c * strides.state_channel, mask=there, other=0.0)
        y = tl.load(mine + c * strides.windows_channel, mask=candidate, other=0.0)
        x = tl.where(candidate, y, x)
    return x


@triton.jit
def load_window(conv, strides, rows, c, mask, TAPS: tl.constexpr):
    """The window of channels ``c`` before a sequence's first token, in the dtype of x."""
    r1 = load_old(conv, strides, rows, c, mask, TAPS - 2)
    r2 = r1
    r3 = r1
    if TAPS > 2:
        r2 = load_old(conv, strides, rows, c, mask, TAPS - 3)
    if TAPS > 3:
        r3 = load_old(conv, strides, rows, c, mask, TAPS - 4)
    return r1, r2, r3


@triton.jit
def line_at(x, x_token, i, mask, r1, r2, r3, m, TAPS: tl.constexpr):
    """Place ``m`` in a window with the tokens behind it. ``x``: address of the first token, ``i``: its channels."""
    behind = positive(i, m - (TAPS - 2))
    token = tl.maximum(m - (TAPS - 1), 0).to(tl.int64)
    value = tl.load(x + token * x_token + i, mask=mask & behind, other=0.0)
    old = r1
    if TAPS > 2:
        old = tl.where(positive(i, (TAPS - 2) - m), r2, old)
    if TAPS > 3:
        old = tl.where(positive(i, (TAPS - 3) - m), r3, old)
    return tl.where(behind, value, old)


@triton.jit
def leave_window(
    conv, strides, rows, x, x_token, i, c, mask, r1, r2, r3, length, candidates,
    TAPS: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write what a sequence leaves of channels ``c``: its row of the state, and its windows.

    All threads must have loaded their windows before. ``candidates``: positive when it keeps the windows of its tokens.
    ``EACH``: it writes a state after each token, so with windows the row stays; with records, the row gets the window
    that was read.
    """
    there = mask & positive(c, rows.state + 1)
    at = conv.conv_state + rows.state * strides.state_row + c * strides.state_channel
    if ONE and conv.conv_windows is None:
        last = tl.load(x + i, mask=mask, other=0.0)
        if TAPS > 3:
            tl.store(at, r2, mask=there)
        if TAPS > 2:
            tl.store(at + (TAPS - 3) * strides.state_column, r1, mask=there)
        tl.store(at + (TAPS - 2) * strides.state_column, last, mask=there)
    else:
        shift = length
        columns = length * 0 + (TAPS - 1)
        if conv.conv_windows is None:
            long = tl.minimum(candidates, length) > 0
            shift = tl.where(long, 1, shift)
            columns = tl.where(long, TAPS - 2 + length, columns)
        else:
            shift = tl.where(candidates > 0, 0, shift)
            if EACH:
                columns = columns * 0
            count = tl.where(candidates > 0, tl.minimum(length, strides.tokens), 0)
            kept = mask & positive(c, rows.windows + 1)
            mine = conv.conv_windows + rows.windows * strides.windows_row + c * strides.windows_channel
            for t in range(count):
                for j in tl.static_range(TAPS - 1):
                    value = line_at(x, x_token, i, mask, r1, r2, r3, t + 1 + j, TAPS)
                    tl.store(mine + t * strides.windows_token + j * strides.windows_tap, value, mask=kept)
        for j in range(tl.minimum(columns, strides.columns)):
            value = line_at(x, x_token, i, mask, r1, r2, r3, j + shift, TAPS)
            tl.store(at + j * strides.state_column, value, mask=there)
