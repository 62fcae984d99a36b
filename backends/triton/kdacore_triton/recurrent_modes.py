"""Where the states of a recurrent or fused decode call come from and go to, as constexprs and strides of a kernel."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import Request
from kdacore_triton.kernels import recurrent as kernels


def state_strides(r: Request, state: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Strides over rows, heads, K and V of a state, or of a fresh one."""
    row, head, a, b = contiguous_strides(r.state_shape) if state is None else state.stride()
    return (row, head, b, a) if r.state_v_first else (row, head, a, b)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense array of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def read_mode(r: Request, x: Any) -> int:
    """The kernel's READ: where its states come from."""
    if x.initial_state is None:
        return int(kernels.READ_NONE.value)
    by_rank = (kernels.READ_SEQUENCE, kernels.READ_INDEXED, kernels.READ_ACCEPTED)
    return int(by_rank[r.state_indices_ndim].value)


def write_mode(r: Request) -> int:
    """The kernel's WRITE: where its states go."""
    if r.inplace_state:
        by_rank = (kernels.WRITE_SEQUENCE, kernels.WRITE_INDEXED, kernels.WRITE_EACH)
        return int(by_rank[r.write_indices_ndim or r.state_indices_ndim].value)
    return int((kernels.WRITE_SEQUENCE if r.output_final_state else kernels.WRITE_NONE).value)
