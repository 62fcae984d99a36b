"""Stand-ins for arrays that a kernel cannot write where they are.

The chunk kernels write dense outputs, and in Triton's interpreter, which rounds to bfloat16 by truncation, bfloat16
results are written in float32 and rounded afterwards.
"""

from __future__ import annotations

import torch


def staged(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a kernel writes in the place of ``x``, dense and of this dtype: itself where it is both."""
    return x.to(dtype).contiguous()


def written_back(x: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """``x``, with what was written to its stand-in; elements that were not written keep their bits."""
    if stand_in is x:
        return x
    if stand_in.dtype == x.dtype:
        return x.copy_(stand_in)
    # A conversion there and back may change the bits of a NaN.
    kept = stand_in.view(torch.int32) == x.to(stand_in.dtype).contiguous().view(torch.int32)
    return x.copy_(torch.where(kept, x, stand_in.to(x.dtype)))
