"""How a kernel is launched: its source, the struct of its parameters, block size and shared memory."""

from __future__ import annotations

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.kernel_parameters import ParamStruct

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory a kernel may use without raising its limit."""

_OVERLAP_ARCH = 90
"""Compute capability (times 10) from which a launch may start before the previous one has ended."""


def overlaps_launches(arch: str) -> bool:
    """Whether a launch may start before the previous one has ended on this real architecture."""
    return int("".join(filter(str.isdigit, arch))) >= _OVERLAP_ARCH


class Launcher:
    """A kernel, and how it is launched.

    Every kernel waits for the previous launch by itself (``wait_for_inputs`` of
    csrc/common/ptx.cuh). So, from compute capability 9.0, the driver may place its blocks before
    the stream's previous kernel has ended.

    Args:
        kernel: what to build.
        params: the struct its entry takes by value.
        threads: block size.
        shared: dynamic shared memory in bytes.
    """

    def __init__(self, kernel: KernelSource, params: ParamStruct, threads: int, shared: int) -> None:
        self.kernel, self.params, self.threads, self.shared = kernel, params, threads, shared
