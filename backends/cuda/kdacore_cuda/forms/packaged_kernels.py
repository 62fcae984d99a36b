"""Which kernels are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product

from kdacore_cuda.architectures import HEAD_DIMS, HOPPER, has_hopper_kernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.choice import (
    SCANNERS,
    RecurrentMode,
    Split,
    cluster_sizes,
    decode_splits,
    has_hopper_recompute,
)
from kdacore_cuda.forms.backward import kernels as backward
from kdacore_cuda.forms.dataflow import kernels as dataflow
from kdacore_cuda.forms.decode import kernels as decode
from kdacore_cuda.forms.fused import kernels as fused
from kdacore_cuda.forms.gated_delta import kernels as gated_delta
from kdacore_cuda.forms.recurrent import kernels as recurrent
from kdacore_cuda.forms.segments import kernels as segments
from kdacore_cuda.forms.slices import kernels as slices
from kdacore_cuda.forms.stages import kernels as stages
from kdacore_cuda.gated_delta_variant import PACKAGED, Variant, cut_variant
from kdacore_cuda.runtime.kernel import Kernel

_EITHER, _YES, _NO = (False, True), (True,), (False,)
_HALVES = "bfloat16", "float16"
_STATES = "float32", "bfloat16"
_RECORD_MODES = RecurrentMode.GENERAL, RecurrentMode.CONTIGUOUS
_ONE_TOKEN_MODES = RecurrentMode.ONE_TOKEN, RecurrentMode.ONE_TOKEN_HEAD_GATE
_DECODE_MODES = RecurrentMode.GENERAL, *_ONE_TOKEN_MODES
_WARPGROUPS, _BLOCKS = (1, 2), (4, 8)


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """The kernels that :func:`kdacore_cuda.build.packaging.build_all` compiles for the real
    architecture ``arch``.

    Not packaged, and so compiled on the first call: stages with K != V; except on Hopper, the chunk
    forward with a float32 ``g``; the gated delta rule with head dims other than 64 and 128, or
    with float16 and another head dim than 128; the recurrent ops with float16 states, but for one
    token with K = V = 128; and the fused decode step with records of candidates, where states are float16
    or K = V = 64.
    """
    states = HEAD_DIMS, _EITHER, _STATES
    kernels = [
        _each(recurrent.recurrent_kernel, *states, RecurrentMode),
        _each(recurrent.recurrent_kernel, (128,), _EITHER, ("float16",), _ONE_TOKEN_MODES),
        _each(recurrent.records_kernel, *states, _RECORD_MODES),
        _each(recurrent.record_tokens_kernel, HEAD_DIMS),
        _each(recurrent.commit_kernel, *states),
        _each(decode.windows_kernel, HEAD_DIMS),
        _each(decode.windows_kernel, (128,), _YES),
        _each(decode.commit_windows_kernel),
        _each(decode.decode_kernel, (128,), _EITHER, _STATES, (Split(1, 1),), (RecurrentMode.GENERAL,), _YES),
        *[_of_decode(mode, dtype, arch) for mode in _DECODE_MODES for dtype in ("float32", *_HALVES)],
        *[_of_tokens(mode, dtype, arch) for mode in _ONE_TOKEN_MODES for dtype in _STATES],
    ]
    kernels += _of_hopper() if arch == HOPPER else []
    for K in HEAD_DIMS:
        kernels += _of_head_dim(K, arch)
    return (kernel.source for kernel in chain.from_iterable(kernels))


def _each(function: Callable[..., Kernel], *values: Iterable[object]) -> Iterator[Kernel]:
    """The kernels that a function gives for all combinations of values of its arguments."""
    return (function(*arguments) for arguments in product(*values))


def _of_decode(mode: RecurrentMode, state_dtype: str, arch: str) -> Iterator[Kernel]:
    """The kernels of the fused decode step; those for one token have one head dim."""
    head_dims = HEAD_DIMS if mode == RecurrentMode.GENERAL else (128,)
    splits = decode_splits(mode, state_dtype, arch)
    return _each(decode.decode_kernel, head_dims, _EITHER, (state_dtype,), splits, (mode,))


def _of_tokens(mode: RecurrentMode, state_dtype: str, arch: str) -> Iterator[Kernel]:
    """The kernels of the fused decode step for several tokens, whose blocks have four warps."""
    splits = [split for split in decode_splits(mode, state_dtype, arch) if split.four_warps]
    return _each(decode.tokens_kernel, _EITHER, (state_dtype,), splits, (mode,))


def _of_hopper() -> list[Iterator[Kernel]]:
    return [
        _each(decode.sequences_kernel, _EITHER),
        _each(stages.hopper_recompute_kernel, _EITHER, _EITHER),
        _each(backward.scan_kernel, _WARPGROUPS, _EITHER),
        _each(backward.scan_outputs_kernel, _WARPGROUPS),
        _each(backward.prepare_kernel, _EITHER, _EITHER),
        _each(backward.grads_kernel, _EITHER, _EITHER, _EITHER),
        *_of_other_head_dims(),
        _each(backward.sums_kernel),
        _each(backward.groups_kernel),
        _each(backward.segment_maps_kernel, _WARPGROUPS, _EITHER),
        _each(backward.segment_chain_kernel, _BLOCKS),
        _each(segments.segments_prepare_kernel, _EITHER, _EITHER, _EITHER),
        _each(segments.prepare_marked_kernel, _EITHER, _EITHER),
        _each(segments.maps_kernel),
        _each(segments.maps_of_slice_kernel, _EITHER),
        _each(segments.chain_kernel, _BLOCKS),
        _each(segments.output_kernel, (1,)),
        _each(segments.output_kernel, (2,), _EITHER, _EITHER),
        _each(dataflow.prepare_units_kernel, _EITHER, _NO),
        _each(dataflow.walk_kernel),
        *chain.from_iterable(map(_of_gated_delta, PACKAGED)),
        _each(gated_delta.sums_kernel),
        _each(slices.transition_kernel, _BLOCKS),
        _each(slices.starts_kernel, _BLOCKS),
        _each(slices.slice_gradient_kernel, _BLOCKS),
        _each(slices.chain_kernel, _BLOCKS),
        _each(fused.checkpoint_tail_kernel),
    ]


def _of_other_head_dims() -> Iterator[Iterator[Kernel]]:
    """The kernels of ``chunk_kda`` whose heads have other channels and values than 128."""
    yield _each(fused.chunk_forward_kernel, (128,), (2, 4), *(_EITHER, _EITHER), (HOPPER,), _NO, _NO, _YES)
    yield _each(backward.prepare_kernel, _EITHER, _EITHER, _NO, _NO, _YES)
    yield _each(backward.scan_kernel, _WARPGROUPS, _NO, _YES)
    yield _each(backward.scan_outputs_kernel, _WARPGROUPS, _YES)
    yield _each(backward.grads_kernel, _EITHER, _EITHER, _EITHER, _YES)
    yield _each(backward.sums_kernel, _YES)
    yield _each(backward.groups_kernel, _YES)


def _of_gated_delta(of: Variant) -> Iterator[Iterator[Kernel]]:
    """The kernels of a variant: those of calls with checkpoints at chosen tokens, or of all others."""
    either, warpgroups = (_NO if of.marks else _EITHER), range(1, of.blocks() + 1)
    yield _each(gated_delta.walk_kernel, warpgroups, either, (of,))
    yield _each(gated_delta.walk_beside_kernel, (of,))
    in_segments = cut_variant(of)
    segments = (in_segments,), _NO if of.marks or of.size == 64 else _EITHER  # of a slice of a row, or not
    yield _each(gated_delta.first_segments_kernel, *segments)
    yield _each(gated_delta.later_segments_kernel, *segments)
    if not of.float16:
        yield _each(gated_delta.first_segments_kernel, (in_segments,), _NO, _YES)
        yield _each(gated_delta.later_segments_kernel, (in_segments,), _NO, _YES)
    if of.marks:
        yield _each(gated_delta.to_checkpoints_kernel, (of,))
        return
    either_size = dict.fromkeys((of, in_segments))
    yield _each(gated_delta.records_kernel, either_size)
    yield _each(gated_delta.grads_kernel, either_size)
    yield _each(gated_delta.records_beside_kernel, (of,))
    yield _each(gated_delta.outer_segments_kernel, *segments)
    yield _each(gated_delta.inner_segments_kernel, *segments)
    yield _each(gated_delta.backward_walk_kernel, warpgroups, _EITHER, (of,))


def _of_head_dim(K: int, arch: str) -> Iterator[Iterator[Kernel]]:
    """The kernels that differ between architectures."""
    yield _each(stages.intra_kernel, (K,), _EITHER)
    if not has_hopper_recompute(K, K, arch):
        yield _each(stages.recompute_kernel, (K,), (K,), _EITHER)
    gates = _EITHER, _EITHER if arch == HOPPER else _NO
    yield _each(fused.chunk_forward_kernel, (K,), cluster_sizes(K, arch), *gates, (arch,))
    if has_hopper_kernel(K, arch):  # of many short sequences; with others that prepare
        yield _each(fused.chunk_forward_kernel, (K,), (SCANNERS,), *gates, (arch,), _YES)
        sizes = cluster_sizes(K, arch)
        yield _each(fused.chunk_forward_kernel, (K,), sizes, *gates, (arch,), _NO, _YES)
