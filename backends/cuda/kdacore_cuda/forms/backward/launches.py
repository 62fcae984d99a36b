"""The launches of the chunk backward as data, for cached calls to prepack: what each is given, and
where in the workspace its arrays lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.backward.kernels import (
    GROUPS_THREADS,
    ChunkBackwardKernel,
    grads_kernel,
    prepare_kernel,
)
from kdacore_cuda.forms.backward.sizes import READ_BY_SCAN_ONLY, WORKSPACE
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.kept.sizes import kept_places
from kdacore_cuda.forms.segments import saved as chunk_kept_segments
from kdacore_cuda.kernel_parameters import ITEM_SIZES, TYPES
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "h0")
FIRST_ARRAYS = (*INPUTS, "d_o", "d_ht", "d_h0", "kept", "both", "first")
"""Arrays that the first launches may take; ``both`` and ``first`` are buffers of the workspace,
``kept`` is that of :mod:`kdacore_cuda.forms.kept.sizes` or :mod:`kdacore_cuda.forms.segments.saved`."""
SECOND_ARRAYS = (
    *(*INPUTS, "d_o", "kept", "both", "second", "zeroed"),
    *("dq", "dk", "dv", "dg", "dbeta", "d_A", "d_bias"),
)
"""Arrays that the other launches may take; ``second`` and ``zeroed`` are buffers of the
workspace."""

Places = dict[str, tuple[str, int]]
"""Field of a kernel's parameters to the name of an array and an offset in it, in bytes."""
KernelLaunch = tuple[str, ChunkBackwardKernel, int]
"""Name, kernel and blocks of a launch."""
_STRIDES = tuple(f"{name}_{axis}" for name in INPUTS[:5] for axis in ("sb", "st", "sh"))


class BackwardLaunches(NamedTuple):
    """The launches of a backward in two groups, so that memory of the first can become gradients.

    ``arch`` is the architecture whose kernels are loaded. Buffers are in bytes, 0 where there is
    none.
    """

    first: tuple[PlannedLaunch, ...]
    """With :data:`FIRST_ARRAYS`."""
    second: tuple[PlannedLaunch, ...]
    """With :data:`SECOND_ARRAYS`; they write the gradients."""
    both_bytes: int
    """Of the buffer that lives through both groups."""
    first_bytes: int
    """Of the buffer that is freed when the first group is queued."""
    second_bytes: int
    """Of the buffer that is allocated after that."""
    zeroed_floats: int
    """Float32 numbers of another such, which begins as zeros."""
    arch: str
    takes_kept: bool
    """The forward's buffer is read; without it, these launches cannot serve a call."""


def launches_of(
    request: Request, strides: tuple[int, ...], wanted: InputGrads, kept_segments: bool = False
) -> BackwardLaunches:
    """The launches of :func:`kdacore_cuda.forms.backward.gradients.backward`.

    Args:
        request: the call; g is not float16.
        strides: batch, token and head strides of q, k, v, g and beta.
        wanted: for each gradient whether a call returns it. Parts of the others may be left out.
        kept_segments: the forward keeps what :mod:`kdacore_cuda.forms.segments.saved` says.

    The values of their parameters are those of that function, except that sums for gradients of
    A_log and dt_bias, and the gradient of the initial state, are 0 where they are not wanted.
    """
    r, plan = request, chunk_backward.plan_of(request)
    index, units = r.device.index, plan.sizes["units"]
    saves_operands = chosen(r).saves == "operands"
    kept_at = kept_places(units) if saves_operands else {}
    made, scan_workspace, own_sizes = _first_launches(r, plan, saves_operands, kept_segments)
    if kept_segments:
        kept_at = chunk_kept_segments.kept_places(scan_workspace["starts"] // chunk_kept_segments.START_BYTES)
    first, both, second, zeroed = (_Buffer(name) for name in ("first", "both", "second", "zeroed"))
    work = {name: ("kept", offset) for name, offset in kept_at.items()}
    work |= {
        name: (first if name in READ_BY_SCAN_ONLY else both).add(units * elements * ITEM_SIZES[dtype])
        for name, (elements, dtype) in WORKSPACE.items()
        if name not in kept_at
    }
    work |= {name: first.add(size) for name, size in scan_workspace.items() if name not in kept_at}
    sums = zeroed if r.packed else both  # no kernel writes those of a pack's unused slots
    parts = {
        part: sums.add(units * 4 * width)
        for part, width, is_wanted in (("dbias_part", r.K, wanted.dt_bias), ("dA_part", 1, wanted.A_log))
        if is_wanted
    }
    gradients = _places_of_gradients(r, plan.grouped, wanted, second)

    inputs = {name: (name, 0) for name in INPUTS if r.has("initial_state" if name == "h0" else name)}
    flows = {name: (name, 0) for name in ("d_o", "d_ht", "d_h0") if name != "d_h0" or wanted.initial_state}
    fixed: dict[str, Any] = {**plan.sizes, **own_sizes, **dict(zip(_STRIDES, strides, strict=True))}

    def planned(launch: KernelLaunch, *arrays: Places) -> PlannedLaunch:
        given = {field: place for group in (inputs, *arrays) for field, place in group.items()}
        name, kernel, blocks = launch
        return PlannedLaunch(name, chunk_backward.launcher(kernel), blocks, given, fixed)

    grads = grads_kernel(plan.float_gate, plan.grouped, plan.bounded)
    left = {name: work[name] for name in WORKSPACE if name not in READ_BY_SCAN_ONLY}
    last = [
        planned(("grads", grads, plan.grid(grads, index)), left, gradients, parts, {"d_o": ("d_o", 0)}),
    ]
    if plan.grouped:
        last += [
            _group(r, x, strides[3 * i : 3 * i + 3], gradients[f"d{x}"])
            for i, x in enumerate(("q", "k"))
            if getattr(wanted, x)
        ]
    if parts:
        last.append(_sums(r, parts))
    return BackwardLaunches(
        first=tuple(planned(launch, work, flows) for launch in made),
        second=tuple(last),
        both_bytes=both.bytes,
        first_bytes=first.bytes,
        second_bytes=second.bytes,
        zeroed_floats=zeroed.bytes // 4,
        arch=plan.arch,
        takes_kept=bool(kept_at),
    )


def _first_launches(
    r: Request, plan: chunk_backward.ChunkBackwardPlan, kept: bool, kept_segments: bool
) -> tuple[tuple[KernelLaunch, ...], dict[str, int], dict[str, int]]:
    """What is launched before the gradients; bytes of the arrays that it needs beside the common
    workspace, and numbers that it takes beside those of ``plan``, by field."""
    index = r.device.index
    if kept:
        return (chunk_backward.reverse_launch(r, index),), {}, {}
    prepare = prepare_kernel(plan.float_gate, plan.bounded)
    launches, segments = chunk_backward.scan_launches(r, index, kept_segments)
    all_launches = (("prepare", prepare, plan.grid(prepare, index)), *launches)
    if segments is None:
        return all_launches, {}, {}
    return all_launches, chunk_backward_segments.workspace_bytes(segments, r.HV), segments.sizes


def _places_of_gradients(r: Request, grouped: bool, wanted: InputGrads, second: _Buffer) -> Places:
    """Where the gradients kernel writes: to a call's results, or to the buffer where they are yet
    to be summed (dq and dk of each value head, float32) or not wanted."""
    places: Places = {}
    for x, width in (("q", r.K), ("k", r.K), ("v", r.V), ("g", r.K), ("beta", 1)):
        summed = grouped and x in ("q", "k")
        if summed or not getattr(wanted, x):
            size = 4 if summed else ITEM_SIZES[r.spec(x).dtype]
            places[f"d{x}"] = second.add(r.B * r.T * r.HV * width * size)
        else:
            places[f"d{x}"] = (f"d{x}", 0)
    return places


class _Buffer:
    """Arrays one after another, each at a multiple of 256 bytes from the buffer's start."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes = name, 0

    def add(self, size: int) -> tuple[str, int]:
        """The place of an array of ``size`` bytes: this buffer's name, and an offset."""
        place = self.name, self.bytes
        self.bytes += -(-size // 256) * 256
        return place


def _group(r: Request, x: str, strides: tuple[int, ...], part: tuple[str, int]) -> PlannedLaunch:
    rows = r.B * r.T * r.H
    sizes = chunk_backward.plan_of(r).sizes
    fixed = dict(zip(("x_sb", "x_st", "x_sh"), strides, strict=True))
    fixed |= {"rows": rows, **{name: sizes[name] for name in ("T", "H", "HV", "flags")}}
    return PlannedLaunch(
        f"groups of {x}",
        chunk_backward._groups_launcher(),
        -(-rows // (GROUPS_THREADS // 32)),
        {"x": (x, 0), "part": part, "out": (f"d{x}", 0)},
        fixed,
    )


def _sums(r: Request, parts: Places) -> PlannedLaunch:
    results = {"dA_part": ("d_A", "A_type", "A_log"), "dbias_part": ("d_bias", "bias_type", "dt_bias")}
    fixed = {"slots": chunk_backward.plan_of(r).slots, "HV": r.HV}
    arrays = dict(parts)
    for part in parts:
        field, kind, name = results[part]
        arrays[field] = (field, 0)
        fixed[kind] = TYPES[r.spec(name).dtype]
    return PlannedLaunch("sums", chunk_backward._sums_launcher(), r.HV, arrays, fixed)
