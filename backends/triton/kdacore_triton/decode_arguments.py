"""Numbers that the decode kernels take: strides of tokens, of the convolution's arrays and of records."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import Request


def strides_of(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of an array; zeros of one that is absent."""
    return (0,) * count if x is None else x.stride()[:count]


def token_strides(r: Request, x: Any) -> tuple[int, ...]:
    """Strides of q, k, v, g and beta over batch, token and head."""
    if "x" in x._fields:
        row = x.x.stride()[:2]
        tokens = (*row, r.K, *row, r.K, *row, r.V)
    else:
        tokens = (*x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3])
    return (*tokens, *x.g.stride()[:3], *x.beta.stride()[:3])


def conv_strides(x: Any) -> tuple[int, ...]:
    """The members of ``ConvolutionStrides``."""
    state, windows = getattr(x, "conv_state", None), getattr(x, "conv_windows", None)
    return (
        *strides_of(getattr(x, "conv_weight", None), 2),
        *strides_of(state, 3),
        0 if state is None else state.shape[2],
        *strides_of(windows, 4),
        0 if windows is None else windows.shape[1],
    )


def record_strides(x: Any) -> tuple[int, ...]:
    """The members of ``CandidateRecordStrides``."""
    if x.record_update is None:
        return (0,) * 13
    parts = (x.record_update, x.record_key, x.record_decay)
    strides = [s for part in parts for s in (*part.stride(), 0)[:4]]
    return (*strides, x.record_update.shape[1])
