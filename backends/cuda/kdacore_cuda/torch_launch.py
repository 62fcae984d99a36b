"""The one place a launch leaves Python: device and stream of the current call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kdacore_cuda.fixed import FixedLauncher, Start
from kdacore_cuda.launch import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""Index of the current CUDA device."""
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Handle of the current stream of a CUDA device."""


def launch(
    launcher: Launcher | FixedLauncher, grid: int, arch: str, like: torch.Tensor, values: tuple[Any, ...]
) -> None:
    """Launch ``grid`` blocks on the current stream of ``like``'s device. A grid of 0 launches nothing."""
    if not grid:
        return
    index = like.get_device()
    if current_device() == index:
        launcher(grid, index, arch, current_stream(index), values)
        return
    with torch.cuda.device(index):
        launcher(grid, index, arch, current_stream(index), values)


def starter(launcher: FixedLauncher, grid: int, arch: str, index: int) -> Start:
    """The launch of ``grid`` blocks, of a stream and what a call gives. Device ``index`` must be the current one."""
    return launcher.start_of(grid, index, arch)


@cache
def processors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
