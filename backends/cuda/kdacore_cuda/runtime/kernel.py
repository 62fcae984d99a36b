"""A kernel as launches name it. How many threads and how much shared memory its blocks have, only the compiled kernel
says."""

from __future__ import annotations

from dataclasses import dataclass

from kdacore_cuda.build import launch_sizes
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.kernel_parameters import ParamStruct


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel to compile and launch. Functions that give one are cached, so the same kernel is the same object.

    Every kernel waits for the previous launch by itself (``wait_for_inputs`` of csrc/common/ptx.cuh). So, from compute
    capability 9.0, the driver may place its blocks before the stream's previous kernel has ended.
    """

    source: KernelSource
    params: ParamStruct
    """The struct that its entry takes by value."""
    kind: int = 0
    """Which of its kinds of blocks, in the order of the source, where they differ in shared memory."""

    def block(self, arch: str) -> tuple[int, int]:
        """Threads, and bytes of dynamic shared memory, of a block on the real architecture ``arch``. Raises
        BackendBuildError where the kernel had to be compiled and could not be."""
        sizes = launch_sizes.launch_sizes(self.source, arch)
        return sizes.threads, sizes.shared[self.kind]


def make_kernel(path: str, params: ParamStruct, kind: int = 0, /, **macros: int | None) -> Kernel:
    """The kernel of a source file, which has the file's name.

    Args:
        path: the file, relative to ``csrc``, without its suffix.
        params: as of :class:`Kernel`.
        kind: as of :class:`Kernel`.
        macros: what it is compiled with; those that are None are left out.
    """
    defines = tuple((name, int(value)) for name, value in macros.items() if value is not None)
    return Kernel(KernelSource(f"{path}.cu", path.rpartition("/")[2], defines), params, kind)
