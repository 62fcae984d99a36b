"""What the checks of processes over gloo share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kdacore import config


class Here(NamedTuple):
    rank: int
    size: int
    group: Any
    folder: Path


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    os.environ.update(values)
    config.refresh()
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        config.refresh()


@contextlib.contextmanager
def raises(error: type[Exception], *parts: str) -> Iterator[None]:
    """The error, with all of these in its message."""
    try:
        yield
    except error as raised:
        for part in parts:
            assert part in str(raised), f"{part!r} not in: {raised}"
        return
    raise AssertionError(f"no {error.__name__}")


def plain_arrays(here: Here, T: int, dtype: Any = torch.float32, heads: int = 1) -> list[Any]:
    x = torch.randn(1, T, heads, 16, dtype=dtype)
    return [x, x, x, -x.abs(), torch.rand(1, T, heads, dtype=dtype)]
