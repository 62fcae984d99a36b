"""The GPU's roundings in Triton's interpreter, which alone multiplies in float32 and gets bfloat16 wrong.

Products take bfloat16 operands, or tf32 ones cut to 10 bits as the hardware does; stores and conversions round to
nearest even. Measured against what an H200 recorded for random calls, errors agree to two or three digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kdacore.types import Request
from kdacore_triton import chunk_backward_plan, chunk_forward, chunk_forward_plan
from kdacore_triton.chunk_forward_choice import EXACT_KEYS

Array = NDArray[Any]


def to_bf16(x: Array) -> Array:
    """float32 as the bits of bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(np.shape(x))


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(np.shape(bits))


def cut_to_tf32(x: Array) -> Array:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *_: Any) -> Any:
    x, y = a.data, b.data
    if a.dtype.scalar == tl.bfloat16:
        x, y = from_bf16(x), from_bf16(y)
    elif getattr(precision, "name", precision) in ("TF32", "tf32"):
        x, y = cut_to_tf32(x), cut_to_tf32(y)
    sums = np.matmul(x.astype(np.float64), y.astype(np.float64)) + d.data
    return TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)


def _rounding_casts(builder_cast: Any) -> Any:
    def cast(self: Any, x: Any, to: Any, *mode: Any) -> Any:
        a, b = x.dtype.scalar, to.scalar
        if b == tl.bfloat16 and a != tl.bfloat16:
            return TensorHandle(to_bf16(x.data.astype(np.float32)), b)
        if a == tl.bfloat16 and b != tl.bfloat16:
            return TensorHandle(from_bf16(x.data).astype(interpreter._get_np_dtype(b)), b)
        return builder_cast(self, x, to, *mode)

    return cast


def _negate(builder_negate: Any) -> Any:
    def negate(self: Any, x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return TensorHandle(x.data ^ np.uint16(0x8000), tl.bfloat16)
        return builder_negate(self, x)

    return negate


def _arithmetic(builder_op: Any) -> Any:
    """bfloat16 arithmetic; of that kernels have negations alone, in some versions as differences from 0."""

    def op(self: Any, a: Any, b: Any, f: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16 and f in (np.add, np.subtract, np.multiply):
            return TensorHandle(to_bf16(f(from_bf16(a.data), from_bf16(b.data))), tl.bfloat16)
        return builder_op(self, a, b, f)

    return op


def _narrow(request: Request) -> bool:
    return request.dtype != "float32" and request.K > EXACT_KEYS


def _precision(request: Request) -> str:
    return "tf32x3" if request.dtype == "float32" else "tf32"


@contextmanager
def gpu_roundings() -> Iterator[None]:
    """While this holds, chunk calls are planned as on an NVIDIA GPU and round as there."""
    build = InterpreterBuilder
    casts = (
        "cast_impl",
        "create_fp_to_fp",
        "create_fp_ext",
        "create_fp_trunc",
        "create_ui_to_fp",
        "create_si_to_fp",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in casts:
            patch.setattr(build, name, _rounding_casts(getattr(build, name)))
        if hasattr(build, "create_fneg"):  # Triton 3.6 subtracts from 0 instead
            patch.setattr(build, "create_fneg", _negate(build.create_fneg))
        patch.setattr(build, "binary_op", _arithmetic(build.binary_op))
        patch.setattr(build, "create_dot", _dot)
        for plans in (chunk_backward_plan, chunk_forward_plan):
            patch.setattr(plans, "has_narrow_operands", _narrow)
            patch.setattr(plans, "full_precision", _precision)
        patch.setattr(chunk_forward, "plan_for", chunk_forward_plan.ChunkForwardPlan)
        chunk_backward_plan.plan_backward.cache_clear()
        try:
            yield
        finally:
            chunk_backward_plan.plan_backward.cache_clear()
