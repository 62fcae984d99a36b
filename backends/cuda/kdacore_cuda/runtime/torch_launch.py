"""Torch's devices, streams and memory as launches need them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from kdacore.arrays.torch.private import allocator as allocator
from kdacore_cuda.architectures import overlaps_launches
from kdacore_cuda.runtime import driver, executor
from kdacore_cuda.runtime.program import cubin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kdacore_cuda.runtime.kernel import Kernel
    from kdacore_cuda.runtime.program import Program

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""Index of the current CUDA device."""
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Handle of the current stream of a CUDA device."""


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of the CUDA device ``index``."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def clusters_at_once(kernel: Kernel, arch: str, index: int) -> int:
    """How many of a kernel's clusters run at once on the CUDA device ``index``, as its driver said when it was first
    asked; 0 where there is no device to ask. Raises BackendBuildError or DriverError."""
    if not torch.cuda.is_available():
        return 0
    with torch.cuda.device(index):
        source, (threads, shared) = kernel.source, kernel.block(arch)
        identity, cubin = cubin_of(source, arch)
        here = executor.executor()
        here.add_kernel(identity, cubin)
        handle = here.handle(identity, source.entry, shared, index)
        launch = source.macros["CLUSTER"], threads, shared, overlaps_launches(arch)
        return driver.driver().clusters_at_once(handle, *launch, index)


@cache
def memory_rate(index: int) -> int:
    """Bytes a second that the memory of the CUDA device ``index`` delivers at most."""
    return driver.driver().memory_rate(index)


def architecture(index: int) -> str:
    """That of the CUDA device ``index``, such as ``sm_90``; empty if there is none, or if nobody has used CUDA yet,
    which is not started to find out."""
    if not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return ""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def new_buffers(like: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Uninitialised buffers of so many bytes on ``like``'s device. They come from torch's allocator and go back to it
    with the tensor: no memory is kept from one call to the next."""
    return {name: like.new_empty(size, dtype=torch.uint8) for name, size in sizes.items()}


def run(
    program: Program, numbers: bytes, arch: str, like: torch.Tensor, arrays: Mapping[str, torch.Tensor | None]
) -> None:
    """Make the launches of a program on the current stream of ``like``'s device.

    Args:
        program: the launches.
        numbers: those it takes (:meth:`kdacore_cuda.runtime.program.Program.pack_numbers`).
        arch: the real architecture whose machine code to load.
        like: a tensor on the device.
        arrays: by their names in the program; the address of an absent one is 0.

    Raises BackendBuildError or DriverError.
    """
    index = like.get_device()
    at = [0 if (x := arrays.get(name)) is None else x.data_ptr() for name in program.arrays]
    values = program.pack_addresses(*at) + numbers
    if current_device() != index:
        with torch.cuda.device(index):
            return executor.start_of(program, arch, index)(current_stream(index), values)
    return executor.start_of(program, arch, index)(current_stream(index), values)
