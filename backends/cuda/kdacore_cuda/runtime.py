"""The one place a launch leaves Python: device and stream of the current call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kdacore_cuda.fixed import FixedLauncher
from kdacore_cuda.launch import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""Index of the current CUDA device."""
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def launch(launcher: Launcher, grid: int, arch: str, like: torch.Tensor, values: tuple[Any, ...]) -> None:
    """Launch ``grid`` blocks on the current stream of ``like``'s device. A grid of 0 launches nothing."""
    if not grid:
        return
    index = like.get_device()
    if current_device() == index:
        launcher(grid, index, arch, _current_stream(index), values)
        return
    with torch.cuda.device(index):
        launcher(grid, index, arch, _current_stream(index), values)


def starter(launcher: FixedLauncher, grid: int, arch: str, index: int) -> Callable[[tuple[Any, ...]], None]:
    """:func:`launch` with all but the values fixed. Device ``index`` must be the current one."""
    start = launcher.start_of(grid, index, arch)
    return lambda values: start(_current_stream(index), values)


@cache
def processors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
