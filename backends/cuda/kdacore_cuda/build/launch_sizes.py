"""What launches of a kernel must match: threads, bytes of parameters, and how much shared memory it asks for.

The kernel's source says it: ``KDA_SHARED_BYTES(sizeof(SharedMemory))`` in csrc makes a constant of the cubin. The build
reads that constant (:mod:`kdacore_cuda.build.cubin_contents`) and records it in the manifest of the packaged cubins.
"""

from __future__ import annotations

from functools import cache

from kdacore_cuda.build.cubin_contents import LaunchSizes, read_launch_sizes
from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.packaged_cubins import find_packaged_sizes


@cache
def launch_sizes(kernel: KernelSource, arch: str) -> LaunchSizes:
    """What launches of ``kernel`` must match; looked up once per process. Raises BackendBuildError where it is neither
    packaged nor cached, and NVRTC is missing or reports an error."""
    recorded = find_packaged_sizes(kernel, arch, source_key(kernel, arch))
    return compiled_sizes(kernel, arch) if recorded is None else recorded


def compiled_sizes(kernel: KernelSource, arch: str) -> LaunchSizes:
    """:func:`launch_sizes`, from the cubin."""
    return read_launch_sizes(load_or_compile(kernel, arch), kernel.entry)
