"""How much dynamic shared memory a kernel asks for.

The kernel's source says it: ``KDA_SHARED_BYTES(sizeof(SharedMemory))`` in csrc makes a constant of the cubin. The build
reads that constant (:mod:`kdacore_cuda.build.cubin_contents`) and records it in the manifest of the packaged cubins.
"""

from __future__ import annotations

from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.build import cubin_lookup
from kdacore_cuda.build.kernel_source import KernelSource


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
    return cubin_lookup.launch_sizes(kernel, arch).shared
