"""What a caller's surroundings would do to a backend's torch ops: autocast."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_UNCHANGED: AbstractContextManager[Any] = nullcontext()
_can_autocast = functools.cache(torch.amp.is_autocast_available)


def autocasts(x: torch.Tensor) -> bool:
    """Does ``torch.autocast`` change the dtypes that ops on such a tensor compute in, here and now?"""
    where = x.device.type
    return bool(_can_autocast(where) and torch.is_autocast_enabled(where))


def as_given(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, ops on such tensors compute in the dtypes they are given: the contract wants float32 at least."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else _UNCHANGED
