"""What launches of a kernel must match, above all how much dynamic shared memory it asks for.

The kernel's source says it: ``KDA_SHARED_BYTES(sizeof(SharedMemory))`` in csrc makes a constant of the cubin. The build
reads that constant (:mod:`kdacore_cuda.build.cubin_contents`) and records it in the manifest of the packaged cubins.
"""

from __future__ import annotations

from functools import cache

from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.build.cubin_contents import LaunchSizes, read_launch_sizes
from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.packaged_cubins import find_packaged_sizes


def shared_bytes(kernel: KernelSource, arch: str = HOPPER) -> int:
    """Bytes of dynamic shared memory of a block of ``kernel``.

    Args:
        kernel: one whose blocks all have the same size.
        arch: where to look; the number is the same for every architecture that the kernel is compiled for.

    Raises:
        BackendBuildError: it is neither packaged nor cached, and NVRTC is missing or reports an error.
        ValueError: it has several kinds of blocks; see :func:`shared_bytes_of_each`.
    """
    (size,) = shared_bytes_of_each(kernel, arch)
    return size


def shared_bytes_of_each(kernel: KernelSource, arch: str = HOPPER) -> tuple[int, ...]:
    """:func:`shared_bytes` of each kind of block, in the order of the source."""
    return launch_sizes(kernel, arch).shared


@cache
def launch_sizes(kernel: KernelSource, arch: str) -> LaunchSizes:
    """What launches of ``kernel`` must match; looked up once per process. Raises BackendBuildError as
    :func:`shared_bytes` does."""
    recorded = find_packaged_sizes(kernel, arch, source_key(kernel, arch))
    return compiled_sizes(kernel, arch) if recorded is None else recorded


def compiled_sizes(kernel: KernelSource, arch: str) -> LaunchSizes:
    """:func:`launch_sizes`, from the cubin."""
    return read_launch_sizes(load_or_compile(kernel, arch), kernel.entry)
