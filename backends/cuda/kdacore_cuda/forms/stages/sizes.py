"""What the request of a training stage determines: its kernel, its grid, and the numbers among its parameters."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kdacore.types import Request
from kdacore_cuda.build.shared_memory import shared_bytes, shared_bytes_of_each
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.stages.kernels import (
    STAGE_THREADS,
    hopper_recompute_kernel,
    intra_kernel,
    recompute_grid,
    recompute_kernel,
)
from kdacore_cuda.kernel_parameters import FLAGS, INTRA, RECOMPUTE
from kdacore_cuda.request_encoding import is_int64, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.launch_sequence import LaunchSequence
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache


class StagePlan(NamedTuple):
    """What the request of a stage alone determines."""

    launcher: Launcher
    grid: int
    arch: str
    sizes: tuple[Any, ...]
    """The parameters after the strides."""
    sequences: dict[tuple[int, ...], LaunchSequence]
    """By the strides of the arrays (:func:`kdacore_cuda.forms.stages.launches.sequence_of`)."""


def _make_plan(r: Request) -> StagePlan:
    float16, arch = r.dtype == "float16", arch_of(r)
    sizes: tuple[Any, ...] = (
        *(r.T, r.N, r.H, r.HV, r.num_chunks),
        *(FLAGS["CU64"] * is_int64(r, "cu_seqlens"), type_code(r, "beta")),
    )
    items = (1 if r.packed else r.B) * r.num_chunks * r.HV
    if r.op == "kda_chunk_intra":
        return StagePlan(_intra_launcher(r.K, float16, arch), items, arch, (*sizes, r.scale), {})
    if not chosen(r).own_recompute:
        return StagePlan(_recompute_launcher(r.K, r.V, float16, arch), items, arch, (*sizes, 0, 0, 0), {})
    # A pack has a slot for every chunk its tokens could fill; on average half of the sequences fill
    # their last one.
    empty = (r.num_chunks - -(-r.T // r.chunk_size)) // 2 * r.HV if r.packed else 0
    d = recompute_grid(items, multiprocessors_of(r), empty, r.has("q"))
    launcher = _hopper_recompute_launcher(float16, r.has("q"), d.whole > 0)
    return StagePlan(launcher, d.grid, arch, (*sizes, d.whole, d.staggered, d.first_in_l2), {})


plan_of = PlanCache(_make_plan)


@cache
def _intra_launcher(K: int, float16: bool, arch: str) -> Launcher:
    kernel = intra_kernel(K, float16)
    return Launcher(kernel, INTRA, STAGE_THREADS, shared_bytes(kernel, arch))


@cache
def _recompute_launcher(K: int, V: int, float16: bool, arch: str) -> Launcher:
    kernel = recompute_kernel(K, V, float16)
    return Launcher(kernel, RECOMPUTE, STAGE_THREADS, shared_bytes(kernel, arch))


@cache
def _hopper_recompute_launcher(float16: bool, with_q: bool, some_whole: bool) -> Launcher:
    kernel = hopper_recompute_kernel(float16, with_q)
    of_whole, of_half = shared_bytes_of_each(kernel)
    return Launcher(kernel, RECOMPUTE, STAGE_THREADS, of_whole if some_whole else of_half)
