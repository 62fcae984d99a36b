"""The launches of a slice of a row that ranks share, as data: what each is given, and where in its
buffers the arrays lie. Calls from JAX are made of them, with contiguous arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import launches as chunk_backward_launches
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel, prepare_kernel
from kdacore_cuda.forms.backward.launches import BackwardLaunches, Places
from kdacore_cuda.forms.backward.segments import WORKSPACE
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_cuda.kernel_parameters import (
    CHUNK_BACKWARD,
    ITEM_SIZES,
    SEGMENT_LENGTHS,
    SEGMENTS,
    TRANSITION,
    V_STRIDES,
)
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch
from kdacore_cuda.runtime.launcher import Launcher

TOKENS = ("q", "k", "v", "g", "beta")
GIVEN = (*TOKENS, "A_log", "dt_bias", "cu_seqlens")
"""The arrays of a call that a slice's kernels may take."""
_STRIDES = tuple(f"{name}_{axis}" for name in TOKENS for axis in ("sb", "st", "sh"))


class ForwardSliceLaunches(NamedTuple):
    """The launches of a slice's forward. Buffers are in bytes."""

    begin: tuple[PlannedLaunch, ...]
    """With the call's arrays, the results ``M`` and ``C``, and the buffers ``workspace`` and
    ``segment_starts``, which :attr:`finish` needs."""
    finish: tuple[PlannedLaunch, ...]
    """With ``cu_seqlens``, ``starts``, the two buffers, and the results ``o``, ``final_state`` and
    ``checkpoints``. It writes ``segment_starts`` anew. None if :attr:`as_whole`."""
    as_whole: bool
    """The results come from a whole call."""
    results: int
    """``G``: sequences whose transition is asked for."""
    workspace_bytes: int
    segment_starts_bytes: int
    arch: str


def forward_launches(r: Request) -> ForwardSliceLaunches:
    """The launches of :func:`kdacore_cuda.forms.slices.forward.begin` and ``finish``."""
    plan = chunk_forward_slices.plan_of(r)
    offsets: Places = {"cu_seqlens": ("cu_seqlens", 0)} if r.packed else {}
    maps: Places = {
        "addends": ("workspace", plan.addends_offset),
        "maps": ("workspace", plan.operands_bytes),
    }
    operands: Places = {"last": ("workspace", 0)}
    segments: Places = {"v": ("v", 0), **offsets, "chunk_operands": ("workspace", 0), **maps}
    segments["starts"] = ("segment_starts", 0)
    row = r.HV * r.K * r.V
    sizes = SEGMENTS.last(row, row, *plan.chunks.strides[V_STRIDES], *plan.sizes)

    def planned(name: str, launch: tuple[Launcher, int], places: Places, fixed: Any) -> PlannedLaunch:
        return PlannedLaunch(name, *launch, places, fixed)

    prepared = {**plan.chunks.sizes, **dict(zip(_STRIDES, plan.chunks.strides, strict=True))}
    begin = (
        planned("prepare", plan.prepare, _arguments(r) | operands, prepared),
        planned("maps", plan.maps, segments, sizes),
        planned(
            *("transition", plan.transition, offsets | maps | {"M": ("M", 0), "C": ("C", 0)}),
            TRANSITION.last(*plan.transition_sizes),
        ),
    )
    results: Places = {"o": ("o", 0), "h0": ("starts", 0)}
    if r.output_final_state:
        results["ht"] = ("final_state", 0)
    if r.checkpoint_every:
        results["ckpt"] = ("checkpoints", 0)
    finish = [planned("output", plan.output, segments | results, sizes)]
    if plan.starts is not None:
        finish.insert(0, planned("starts", plan.starts, segments | results, sizes))
    return ForwardSliceLaunches(
        begin=begin,
        finish=() if plan.as_whole else tuple(finish),
        as_whole=plan.as_whole,
        results=plan.results,
        workspace_bytes=plan.operands_bytes + plan.starts_offset,
        segment_starts_bytes=plan.segments_bytes - plan.starts_offset,
        arch=plan.chunks.arch,
    )


class BackwardSliceLaunches(NamedTuple):
    """The launches of a slice's backward. Buffers are in bytes."""

    begin: tuple[PlannedLaunch, ...]
    """With the call's arrays, ``d_o``, ``d_final``, ``starts``, the result ``d_slice_start``, and the
    buffers ``operands``, ``borders`` and ``both``, which :attr:`scan` needs."""
    scan: tuple[PlannedLaunch, ...]
    """With the same, ``ends`` in place of ``d_final`` and ``d_starts`` of ``d_slice_start``. It reads
    ``operands`` and writes the other buffers."""
    gradients: BackwardLaunches
    """Those behind the scan are its second group, with ``both``."""
    results: int
    """``G``: sequences whose gradient at the slice's start is asked for."""
    operands_bytes: int
    borders_bytes: int


def backward_launches(r: Request) -> BackwardSliceLaunches:
    """The launches of :func:`kdacore_cuda.forms.slices.backward.backward_begin` and
    ``backward_finish``."""
    plan, chunks = chunk_backward_slices.plan_of(r), chunk_backward.plan_of(r)
    wanted: Any = InputGrads(*(r.has(x) for x in InputGrads._fields))
    whole = chunk_backward_launches.launches_of(r, chunks.strides, wanted)
    numbers: dict[str, Any] = {**plan.chunks.sizes, **dict(zip(_STRIDES, chunks.strides, strict=True))}

    # What the gradients kernel reads lies where the second group of the whole call expects it.
    kept: Places = {x: place for x, place in whole.first[0].arrays.items() if place[0] == "both"}
    slots = plan.slots * r.HV
    bytes_of = {
        name: slots * elements * ITEM_SIZES[dtype] for name, (elements, dtype) in WORKSPACE.items()
    } | {
        name: chunks.sizes["units"] * elements * ITEM_SIZES[dtype]
        for name, (elements, dtype) in chunk_backward.WORKSPACE.items()
    }
    operands, operands_bytes = _placed("operands", bytes_of, set(bytes_of) - set(kept) - {"starts", "ends"})
    borders, borders_bytes = _placed("borders", bytes_of, {"starts", "ends"})
    arrays = _arguments(r) | kept | operands | borders | {"d_o": ("d_o", 0), "h0": ("starts", 0)}

    def planned(name: str, kernel: ChunkBackwardKernel, blocks: int, **flows: str) -> PlannedLaunch:
        places = arrays | {field: (array, 0) for field, array in flows.items()}
        return PlannedLaunch(name, chunk_backward.launcher(kernel), blocks, places, numbers)

    prepare = prepare_kernel(chunks.float_gate, chunks.bounded)
    begin = (
        planned("prepare", prepare, chunks.grid(prepare, r.device.index)),
        planned(*plan.maps),
        planned(*plan.slice_gradient, d_ht="d_final", d_h0="d_slice_start"),
    )
    scan = tuple(planned(*step, d_ht="ends", d_h0="d_starts") for step in (plan.chain, plan.scan))
    return BackwardSliceLaunches(
        begin=begin,
        scan=scan,
        gradients=whole._replace(second=tuple(_with_segments(whole.second, plan.chunks.sizes))),
        results=plan.results,
        operands_bytes=operands_bytes,
        borders_bytes=borders_bytes,
    )


def _arguments(r: Request) -> Places:
    return {name: (name, 0) for name in GIVEN if r.has(name)}


def _placed(buffer: str, bytes_of: dict[str, int], names: set[str]) -> tuple[Places, int]:
    """Places of some arrays one after another, each at a multiple of 256 bytes, and the bytes of all."""
    places, end = {}, 0
    for name in (x for x in bytes_of if x in names):
        places[name] = buffer, end
        end += -(-bytes_of[name] // 256) * 256
    return places, end


def _with_segments(launches: tuple[PlannedLaunch, ...], sizes: dict[str, Any]) -> Iterator[PlannedLaunch]:
    """Launches of a whole call with the slice's own segments, as torch's calls have them."""
    own = {name: sizes[name] for name in (*SEGMENT_LENGTHS, "segments")}
    for x in launches:
        same = x.launcher.params is CHUNK_BACKWARD
        yield x._replace(fixed={**x.fixed, **own}) if same else x
