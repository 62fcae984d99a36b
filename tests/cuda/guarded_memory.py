"""Memory between guards: a kernel that writes before or behind an array that the host gave it is found out.

Host and device work out for themselves how much of a workspace there is, and where in it things lie. Guards hold NaN in
every format, so that what is read beyond an array does not go unnoticed either.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from kdacore_cuda.runtime import torch_launch

GUARD = 4096
"""Bytes on each side."""


class Guards:
    """Of the arrays that are still there."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def make(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An array of this shape and dtype between two guards."""
        data = math.prod(size) * dtype.itemsize
        whole = torch.empty(GUARD + -(-data // 64) * 64 + GUARD, dtype=torch.uint8)
        whole[:GUARD] = 255
        whole[GUARD + data :] = 255
        array = whole[GUARD : GUARD + data].view(dtype).view(size).detach()  # results may be no views
        key = id(array)
        self._guards[key] = whole[:GUARD], whole[GUARD + data :]
        weakref.finalize(array, self._guards.pop, key, None)
        return array

    def check(self, kernel: str) -> None:
        """AssertionError if a guard has been written."""
        for before, behind in list(self._guards.values()):  # threads that play ranks make arrays meanwhile
            assert (before == 255).all(), f"{kernel} wrote before an array"
            assert (behind == 255).all(), f"{kernel} wrote behind an array"


def guard(monkeypatch: pytest.MonkeyPatch) -> Guards:
    """``Tensor.new_empty`` of CPU tensors, and torch's allocator there, give guarded memory from now on."""
    guards, plain = Guards(), torch.Tensor.new_empty

    def new_empty(
        self: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **more: Any
    ) -> torch.Tensor:
        if more or self.device.type != "cpu":
            return plain(self, *size, dtype=dtype, **more)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return guards.make(tuple(shape), dtype or self.dtype)

    def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return guards.make(size, dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch_launch, "allocator", lambda device_type: empty)
    return guards
