"""The one place a launch leaves Python: device, stream and architecture of the current call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kdacore.types import Request
from kdacore_cuda.arrays import build_arch
from kdacore_cuda.launch import Launcher

if TYPE_CHECKING:
    import torch


def launch(launcher: Launcher, grid: int, request: Request, like: torch.Tensor, *values: Any) -> None:
    """Launch ``grid`` blocks on the current stream of ``like``'s device. A grid of 0 launches nothing."""
    import torch

    if not grid:
        return
    index = like.get_device()
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            _launch(launcher, grid, index, build_arch(request.device.arch), values)
    else:
        _launch(launcher, grid, index, build_arch(request.device.arch), values)


def _launch(launcher: Launcher, grid: int, index: int, arch: str, values: tuple[Any, ...]) -> None:
    import torch

    stream = torch._C._cuda_getCurrentRawStream(index)
    launcher((grid, 1, 1), index, arch, stream, *values)


@cache
def _processors(index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(like: torch.Tensor) -> int:
    """Multiprocessors of the device ``like`` is on."""
    return _processors(like.get_device())


@cache
def float32() -> Any:
    """``torch.float32``, without importing torch before the caller has."""
    import torch

    return torch.float32
