"""Torch tensors as the pointers, strides and type codes a kernel takes. torch is imported by the caller's own arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdacore_cuda.layout import TYPES

if TYPE_CHECKING:
    import torch

BUILD_ARCHS = {"sm_90": "sm_90a", "sm_100": "sm_100f", "sm_103": "sm_100f"}
"""Architecture of a device -> the one its kernels are compiled for; the others are compiled for themselves."""


def build_arch(arch: str) -> str:
    """``sm_90`` -> ``sm_90a``: what to compile for a device."""
    return BUILD_ARCHS.get(arch, arch)


def aligned_rows(x: torch.Tensor, vector: int) -> torch.Tensor:
    """``x`` itself when a kernel can read ``vector`` consecutive elements of its last axis at once, else a copy."""
    if x.is_contiguous():
        good = x.shape[-1] % vector == 0
    else:
        strides = x.stride()
        good = strides[-1] == 1 and not any(s % vector for s in strides[:-1])
    if good and x.data_ptr() % (vector * x.element_size()) == 0:
        return x
    copy = x.contiguous()
    return copy if copy.data_ptr() != x.data_ptr() else x.clone()


def type_code(x: torch.Tensor | None) -> int:
    """Code of ``x``'s dtype for the kernels; 0 for an absent array."""
    return 0 if x is None else _code_of(x.dtype)


_CODES: dict[Any, int] = {}


def _code_of(dtype: Any) -> int:
    code = _CODES.get(dtype)
    if code is None:
        code = _CODES[dtype] = TYPES[str(dtype).removeprefix("torch.")]
    return code


def pointer(x: torch.Tensor | None) -> int:
    """Device address, 0 for an absent array."""
    return 0 if x is None else int(x.data_ptr())


def is_wide(x: torch.Tensor | None) -> bool:
    """int64 indices rather than int32."""
    return x is not None and x.element_size() == 8
