"""Which kernels are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Iterator

from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.backward import segments_kernels as chunk_backward_segments_kernels
from kdacore_cuda.forms.backward.kernels import packaged_chunk_backward_kernels
from kdacore_cuda.forms.dataflow.kernels import packaged_dataflow_kernels
from kdacore_cuda.forms.fused.kernels import checkpoint_tail_kernel, packaged_chunk_forward_kernels
from kdacore_cuda.forms.recurrent.kernels import packaged_recurrent_kernels
from kdacore_cuda.forms.segments.kernels import packaged_segments_kernels
from kdacore_cuda.forms.slices.kernels import packaged_slices_kernels
from kdacore_cuda.forms.stages.kernels import packaged_stages_kernels


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """The kernels that :func:`kdacore_cuda.build.packaging.build_all` compiles for the real
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
