"""The launch of a training stage as data."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.stages import kernels
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.request_encoding import strides_behind, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import Launch, Program


class StageArrays(NamedTuple):
    """The arrays of a stage's kernels, beside ``cu_seqlens``."""

    strided: tuple[str, ...]
    """Arguments. The kernels take their batch, token and head strides, in that order."""
    results: tuple[str, ...]


ARRAYS = {
    "kda_chunk_intra": StageArrays(("q", "k", "gc", "beta"), ("Aqk", "Akk")),
    "kda_recompute_w_u": StageArrays(("k", "v", "beta", "gc", "Akk", "q"), ("w", "u", "kg", "qg")),
}
"""By op. Without q its strides are those of k, and there is no qg."""
_SIZES = ("T", "N", "H", "HV", "NT", "flags", "beta_type", "scale", "whole", "in_turn", "kept", "blocks")


def launches_of(r: Request, strides: tuple[int, ...] = ()) -> Launches:
    """The launch of a call.

    Args:
        r: the call.
        strides: of :attr:`StageArrays.strided`, three each, in elements; those of contiguous arrays if not given.
    """
    float16, arch, arrays = r.dtype == "float16", arch_of(r), ARRAYS[r.op]
    blocks = (1 if r.packed else r.B) * r.num_chunks * r.HV
    whole = staggered = first_in_l2 = 0
    if r.op == "kda_chunk_intra":
        kernel = kernels.intra_kernel(r.K, float16)
    elif chosen(r).own_recompute:
        # A pack has a slot for every chunk its tokens could fill; on average half of the sequences fill
        # their last one.
        empty = (r.num_chunks - -(-r.T // r.chunk_size)) // 2 * r.HV if r.packed else 0
        grid = kernels.recompute_grid(blocks, multiprocessors_of(r), empty, r.has("q"))
        whole, blocks, staggered, first_in_l2 = grid
        kernel = kernels.hopper_recompute_kernel(float16, r.has("q"), whole > 0)
    else:
        kernel = kernels.recompute_kernel(r.K, r.V, float16)
    flags = FLAGS["CU64"] * (r.packed and r.spec("cu_seqlens").dtype == "int64")
    values = (
        *(r.T, r.N, r.H, r.HV, r.num_chunks, flags, type_code(r, "beta"), r.scale),
        *(whole, staggered, first_in_l2, blocks),
    )
    numbers = dict(zip(_SIZES, values, strict=True))
    numbers |= dict(zip(_stride_names(r.op), strides or _contiguous(r, arrays), strict=True))
    return Launches(_program(r.op, kernel), numbers, arch)


@cache
def _program(op: str, kernel: Kernel) -> Program:
    step = Launch(op, kernel, "blocks", {"g": "gc"})
    arrays = *ARRAYS[op].strided, "cu_seqlens", *ARRAYS[op].results
    return Program((step,), arrays, (*_stride_names(op), *_SIZES))


@cache
def _stride_names(op: str) -> tuple[str, ...]:
    names = ("g" if name == "gc" else name for name in ARRAYS[op].strided)
    return tuple(f"{name}_{axis}" for name in names for axis in ("sb", "st", "sh"))


def _contiguous(r: Request, arrays: StageArrays) -> tuple[int, ...]:
    specs = (r.spec(name if r.has(name) else "k") for name in arrays.strided)
    return tuple(s for spec in specs for s in strides_behind(spec.shape[1:])[:3])
