"""Kernel options that follow from a request: PTX or not, and the precision of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs

from kdacore.types import Request
from kdacore_triton import chunk_forward_choice

INTERPRETING = bool(knobs.runtime.interpret)
"""Do kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was first imported)?"""


def on_nvidia(request: Request) -> bool:
    """May kernels use PTX and NVIDIA's dot precisions? Not in the interpreter, not on AMD."""
    return not INTERPRETING and not request.device.arch.startswith("gfx")


def has_narrow_operands(request: Request) -> bool:
    """Do matrix products take bfloat16 operands? For 16-bit inputs of more than a few channels, on a GPU."""
    return chunk_forward_choice.has_narrow_operands(request, INTERPRETING)


def full_precision(request: Request) -> str:
    """The precision of products that do not take bfloat16 operands: what the inputs' dtype asks for."""
    if INTERPRETING or not on_nvidia(request):
        return "ieee"
    return "tf32x3" if request.dtype == "float32" else "tf32"


def dense(x: torch.Tensor | None) -> Any:
    """``x`` with contiguous strides, copied only if it has others. None stays None."""
    return None if x is None else x.contiguous()
