"""Kernel options that follow from a request: PTX or not, and the precision of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs

from kdacore.types import Request

INTERPRETING = bool(knobs.runtime.interpret)
"""Do kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was first imported)?"""

EXACT_KEYS = 32
"""Up to this many channels of k, 16-bit inputs take tf32 operands.

bfloat16 operands (the inverse, u, v' and the decayed keys) give an error of 2.9e-3 in the state on average, whatever
the head dims. Over a few hundred elements it varies beyond the contract's 3.3e-3. Many roundings contribute, none of
them most; tiles this small cost little in float32.
"""


def on_nvidia(request: Request) -> bool:
    """May kernels use PTX and NVIDIA's dot precisions? Not in the interpreter, not on AMD."""
    return not INTERPRETING and not request.device.arch.startswith("gfx")


def has_narrow_operands(request: Request) -> bool:
    """Do matrix products take bfloat16 operands? For 16-bit inputs of more than a few channels, on a GPU."""
    return request.dtype != "float32" and request.K > EXACT_KEYS and not INTERPRETING


def full_precision(request: Request) -> str:
    """The precision of products that do not take bfloat16 operands: what the inputs' dtype asks for."""
    if INTERPRETING or not on_nvidia(request):
        return "ieee"
    return "tf32x3" if request.dtype == "float32" else "tf32"


def dense(x: torch.Tensor | None) -> Any:
    """``x`` with contiguous strides, copied only if it has others. None stays None."""
    return None if x is None else x.contiguous()
