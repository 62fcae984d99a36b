"""Torch tensors in layouts that kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes the kernels read at once; every row of q, k, v and g starts on a multiple of it."""
_MAX_TOKEN_STRIDE = 2**27
"""Elements from one token to the next: kernels hold that distance, in bytes, in 32 bits. Other
strides have 64."""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, T, heads, width]`` itself when all its rows are contiguous and aligned, else a
    contiguous copy."""
    size = x.element_size()
    strides = x.stride()
    misaligned = any(s * size % ALIGNMENT for s in strides[:-1]) or x.data_ptr() % ALIGNMENT
    if strides[-1] == 1 and strides[1] < _MAX_TOKEN_STRIDE and not misaligned:
        return x
    copy = x.contiguous()
    return copy if copy.data_ptr() != x.data_ptr() else x.clone()


def aligned_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer of bytes itself, or a copy of one that lies off 16 bytes."""
    return buffer.clone() if buffer.data_ptr() % ALIGNMENT else buffer


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` itself when it is contiguous or None, else a contiguous copy. For arrays that need no
    alignment."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def contiguous_rows(states: torch.Tensor | None, row: int) -> tuple[torch.Tensor | None, int]:
    """States ``[P, HV, K, V]`` whose rows are contiguous each (a copy where they are not), and the elements from one
    row to the next; ``row`` where they lie side by side."""
    if states is None or states.is_contiguous():
        return states, row
    if states[:1].is_contiguous():
        return states, states.stride(0)
    return states.contiguous(), row
