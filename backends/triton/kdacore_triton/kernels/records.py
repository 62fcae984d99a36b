"""Records of candidates: what tokens did to a state, written by one call and applied to the state in a later one."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import positive


@triton.jit
def replayed(S, records, strides, row, count, h, hv, ik, iv, mk, mv, SCALAR_GATE: tl.constexpr):
    """A tile of the state after the first ``count`` records of a row, float32, not rounded yet.

    The operations, and how they round, are those of the token itself: a product, then one fma.
    """
    update = records.update + row * strides.update_row + hv * strides.update_head + iv * strides.update_cell
    key = records.key + row * strides.key_row + h * strides.key_head + ik * strides.key_cell
    decay = records.decay + row * strides.decay_row + hv * strides.decay_head
    for j in range(count):
        u = tl.load(update + j * strides.update_token, mask=mv, other=0.0)
        k = tl.load(key + j * strides.key_token, mask=mk, other=0.0)
        if SCALAR_GATE:
            S = S * tl.load(decay + j * strides.decay_token)
        else:
            d = tl.load(decay + ik * strides.decay_cell + j * strides.decay_token, mask=mk, other=0.0)
            S = S * d[:, None]
        S = tl.fma(k[:, None], u[None, :], S)
    return S


@triton.jit
def record_token(
    records, strides, row, t, h, hv, ik, iv, mk, mv, update, key, decay, last_of_head, last_of_group,
    SCALAR_GATE: tl.constexpr,
):  # fmt: skip
    """Write what token ``t`` did; nothing without a row, nor behind its last record.

    ``update`` belongs to the tile. ``decay`` is the head's and is written where it is ``last_of_head``, ``key`` is the
    group's and is written where it is ``last_of_group``: tiles before may still replay what they replace.
    """
    token = t.to(tl.int64)
    room = tl.minimum(row + 1, strides.tokens - t)
    p = records.update + row * strides.update_row + token * strides.update_token + hv * strides.update_head
    tl.store(p + iv * strides.update_cell, update, mask=mv & positive(iv, room))
    p = records.key + row * strides.key_row + token * strides.key_token + h * strides.key_head
    tl.store(p + ik * strides.key_cell, key, mask=mk & positive(ik, tl.minimum(room, last_of_group)))
    p = records.decay + row * strides.decay_row + token * strides.decay_token + hv * strides.decay_head
    room = tl.minimum(room, last_of_head)
    if SCALAR_GATE:
        tl.store(p, decay, mask=room > 0)
    else:
        tl.store(p + ik * strides.decay_cell, decay, mask=mk & positive(ik, room))
