"""Which kernels are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Iterator

from kdacore_cuda import chunk_backward_segments_kernels
from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.chunk_backward_kernels import packaged_chunk_backward_kernels
from kdacore_cuda.chunk_forward_dataflow_kernels import packaged_dataflow_kernels
from kdacore_cuda.chunk_forward_kernels import checkpoint_tail_kernel, packaged_chunk_forward_kernels
from kdacore_cuda.chunk_forward_segments_kernels import packaged_segments_kernels
from kdacore_cuda.chunk_slices_kernels import packaged_slices_kernels
from kdacore_cuda.kernel_source import KernelSource
from kdacore_cuda.recurrent_kernels import packaged_recurrent_kernels
from kdacore_cuda.stages_kernels import packaged_stages_kernels


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """The kernels that :func:`kdacore_cuda.package_build.build_all` compiles for the real
    architecture ``arch``.

    Not packaged, and so compiled on the first call: stages with K != V and, except on Hopper, the
    chunk forward with a float32 ``g``.
    """
    yield from packaged_recurrent_kernels()
    yield from packaged_stages_kernels(arch)
    if arch == HOPPER:
        yield from packaged_chunk_backward_kernels()
        yield from chunk_backward_segments_kernels.packaged_segments_kernels()
        yield from packaged_segments_kernels()
        yield from packaged_dataflow_kernels()
        yield from packaged_slices_kernels()
        yield checkpoint_tail_kernel()
    yield from packaged_chunk_forward_kernels(arch)
