"""Launches on torch's device and stream: every launch of the backend goes through this module."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kdacore_cuda.runtime.driver import driver
from kdacore_cuda.runtime.launch_sequence import LaunchSequence, StartAll
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.prepacked_launch import PrepackedLauncher, Start

if TYPE_CHECKING:
    from collections.abc import Callable

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""Index of the current CUDA device."""
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Handle of the current stream of a CUDA device."""


def launch(launcher: Launcher, grid: int, arch: str, like: torch.Tensor, values: tuple[Any, ...]) -> None:
    """Launch ``grid`` blocks on the current stream of ``like``'s device. A grid of 0 launches
    nothing.

    Args:
        launcher: the kernel.
        grid: blocks.
        arch: the real architecture whose cubin to load.
        like: a tensor on the device.
        values: the kernel's parameters, in the struct's order.

    Raises BackendBuildError or DriverError.
    """
    if not grid:
        return
    index = like.get_device()
    if current_device() == index:
        launcher(grid, index, arch, current_stream(index), values)
        return
    with torch.cuda.device(index):
        launcher(grid, index, arch, current_stream(index), values)


def run(sequence: LaunchSequence, arch: str, like: torch.Tensor, *addresses: int) -> None:
    """Make all launches of a sequence on the current stream of ``like``'s device.

    Args:
        sequence: the launches.
        arch: the real architecture whose cubins to load.
        like: a tensor on the device.
        addresses: of the arrays that the sequence names; 0 for an absent one.

    Raises BackendBuildError or DriverError.
    """
    index = like.get_device()
    if current_device() != index:
        with torch.cuda.device(index):
            return _start_of(sequence, arch, index)(current_stream(index), *addresses)
    return _start_of(sequence, arch, index)(current_stream(index), *addresses)


def _start_of(sequence: LaunchSequence, arch: str, index: int) -> StartAll:
    start = sequence.starts.get(index)
    if start is None:
        start = sequence.starts[index] = sequence_start(sequence, arch, index)
    return start


def prepacked_start(launcher: PrepackedLauncher, grid: int, arch: str, index: int) -> Start:
    """The launch of ``grid`` blocks on device ``index``, which must be current. A grid of 0
    launches nothing.

    Raises BackendBuildError or DriverError.
    """
    if not grid:
        return lambda stream, values: None
    return launcher.start_for(grid, index, arch)


def sequence_start(sequence: LaunchSequence, arch: str, index: int) -> StartAll:
    """The function that makes all launches of a sequence on device ``index``, which must be
    current.

    Raises BackendBuildError or DriverError.
    """
    return sequence.start_for(index, arch)


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of the CUDA device ``index``."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def clusters_at_once(launcher: Launcher, arch: str, index: int) -> int:
    """How many of a kernel's clusters run at once on the CUDA device ``index``, as its driver said when it was first
    asked; 0 where there is no device to ask. Raises BackendBuildError or DriverError."""
    if not torch.cuda.is_available():
        return 0
    if current_device() == index:
        return launcher.clusters_at_once(index, arch)
    with torch.cuda.device(index):
        return launcher.clusters_at_once(index, arch)


@cache
def memory_rate(index: int) -> int:
    """Bytes a second that the memory of the CUDA device ``index`` delivers at most."""
    return driver().memory_rate(index)


def architecture(index: int) -> str:
    """That of the CUDA device ``index``, such as ``sm_90``; empty if there is none, or if nobody has used CUDA yet,
    which is not started to find out."""
    if not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return ""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"
