"""The launches of the chunk forward as data: what each is given, and where in the workspace its
arrays lie. Cached calls from torch prepack them, and calls from JAX are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdacore.types import Request
from kdacore_cuda.forms.dataflow import forward as chunk_forward_dataflow
from kdacore_cuda.forms.fused import forward as chunk_forward
from kdacore_cuda.forms.fused.checkpoints import tail_grid, tail_launcher, tail_sizes
from kdacore_cuda.forms.fused.kernels import has_hopper_kernel
from kdacore_cuda.forms.segments import forward as chunk_forward_segments
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD, PREPARE_MARKED, SEGMENTS, V_STRIDES, WALK
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch, check_launches

TOKENS = ("q", "k", "v", "g", "beta")
_STRIDES = tuple(f"{name}_{axis}" for name in TOKENS for axis in ("sb", "st", "sh"))
_SMALL = ("A_log", "dt_bias", "cu_seqlens")
_ROWS = ("reads", "has_initial", "writes")
_MARKS = ("mark_offsets", "mark_rows")

Places = dict[str, tuple[str, int]]
"""Field of a kernel's parameters to the name of an array and an offset in it, in bytes."""


class ForwardLaunches(NamedTuple):
    """The launches of a forward, in order, with the arrays that :func:`arrays_of` names, ``launch``
    (a number, different in every call), ``workspace`` and ``kept``."""

    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    arch: str
    kept_bytes: int = 0
    """Of what :mod:`kdacore_cuda.forms.segments.saved` says, 0 where nothing is kept."""


def arrays_of(r: Request) -> dict[str, str]:
    """The arrays that a call's kernels take: field of their parameters to the name of the argument
    (that of the result for ``o``, ``ht`` and ``ckpt``), of those that the call has."""
    given = {name: name for name in (*TOKENS, *_SMALL)}
    given |= {"h0": "initial_state", "reads": "state_indices", "has_initial": "has_initial_state"}
    given |= {"mark_offsets": "checkpoint_offsets", "mark_rows": "checkpoint_indices"}
    arrays = {field: name for field, name in given.items() if r.has(name)}
    arrays["o"] = "o"
    if r.inplace_state or r.output_final_state:
        arrays["ht"] = "final_state"
    if r.inplace_state and r.written_indices:
        arrays["writes"] = r.written_indices
    if r.checkpoint_every:
        arrays["ckpt"] = "checkpoints"
    return arrays


def launches_of(
    request: Request,
    strides: tuple[int, ...] = (),
    state_rows: tuple[int, int] | None = None,
    g_type: str = "",
) -> ForwardLaunches:
    """The launches of :func:`kdacore_cuda.forms.fused.forward.forward`.

    Args:
        request: the call.
        strides: batch, token and head strides of q, k, v, g and beta, in elements; those of contiguous
            arrays if not given.
        state_rows: elements from a row of the states read, and of those written, to the next; likewise.
        g_type: dtype of the g that kernels are given, where it is not the request's.
    """
    r, plan = request, chunk_forward.plan_of(request)
    arrays: Places = {field: (name, 0) for field, name in arrays_of(r).items()}
    arrays["launch"] = ("launch", 0)
    row = r.HV * r.K * r.V
    strides, rows = strides or plan.strides, state_rows or (row, row)
    if plan.in_dataflow:
        launches, used = _dataflow(r, arrays, strides)
    elif plan.in_segments:
        launches, used = _segments(r, arrays, strides, rows)
    else:
        fixed = CHUNK_FORWARD.last(*rows, *strides, *plan.sizes)
        places = _only(arrays, CHUNK_FORWARD) | {"workspace": ("workspace", 0)}
        if not plan.workspace_size:
            del places["workspace"]
        launches = [PlannedLaunch("fused", plan.launcher, plan.grid, places, fixed)]
        used = 4 * plan.workspace_size
    if r.checkpoint_count and has_hopper_kernel(r.K, plan.arch) and not plan.in_segments:
        used = -(-used // 256) * 256
        states = ("workspace", used)
        used += 4 * r.checkpoint_count * row
        launches = [x._replace(arrays={**x.arrays, "mark_states": states}) for x in launches]
        launches.append(_tail(r, arrays, states, rows[1], strides, g_type or r.spec("g").dtype))
    check_launches(launches)
    kept_bytes = chunk_forward_segments.plan_of(r).kept_bytes if plan.in_segments else 0
    return ForwardLaunches(tuple(launches), used, plan.arch, kept_bytes)


def _only(arrays: Places, params: Any, *names: str) -> Places:
    """Those of ``arrays`` that are fields of ``params``, in the order of its fields."""
    fields = [name for name, _ in params.fields]
    return {field: arrays[field] for field in fields if field in arrays and (not names or field in names)}


def _prepare(chunks: Any, strides: tuple[int, ...]) -> dict[str, Any]:
    return {**chunks.sizes, **dict(zip(_STRIDES, strides, strict=True))}


def _operands(arrays: Places, first: int = 0) -> Places:
    """What the launch that prepares chunks is given; ``first``: where operands begin in the workspace."""
    tokens: Mapping[str, tuple[str, int]] = {x: arrays[x] for x in (*TOKENS, *_SMALL) if x in arrays}
    return {**tokens, "last": ("workspace", first)}


def _dataflow(r: Request, arrays: Places, strides: tuple[int, ...]) -> tuple[list[PlannedLaunch], int]:
    plan = chunk_forward_dataflow.plan_of(r)
    flags: Places = {"ready": ("workspace", plan.flags_offset), "launch": arrays["launch"]}
    walk = _only(arrays, WALK, "v", "o", "h0", "ht", "ckpt") | {"chunk_operands": ("workspace", 0)} | flags
    launches = [
        PlannedLaunch(
            "prepare",
            plan.prepare,
            plan.prepare_grid,
            _operands(arrays) | flags,
            _prepare(plan.chunks, strides),
        ),
        PlannedLaunch(
            *("walk", chunk_forward_dataflow.walk_launcher(), plan.walk_grid),
            *(walk, WALK.last(*strides[V_STRIDES], *plan.walk_sizes)),
        ),
    ]
    return launches, plan.workspace_bytes


def _segments(
    r: Request, arrays: Places, strides: tuple[int, ...], rows: tuple[int, int]
) -> tuple[list[PlannedLaunch], int]:
    plan = chunk_forward_segments.plan_of(r)
    (name, prepare, units), *others = plan.launches
    given = _only(arrays, SEGMENTS, "v", "cu_seqlens", "o", "h0", "ht", "ckpt", *_ROWS, *_MARKS)
    operands, prepared = _operands(arrays, plan.records_offset), _prepare(plan.chunks, strides)
    if plan.marked:
        operands |= _only(arrays, PREPARE_MARKED, *_MARKS)
        prepared |= dict(zip(("marks", "null_index"), plan.marked, strict=True))
        given["mark_states"] = ("workspace", 0)
    given["chunk_operands"] = ("workspace", plan.operands_offset)
    given["addends"] = ("workspace", plan.addends_offset)
    buffer = "kept" if plan.keeps else "workspace"
    given |= {"maps": (buffer, plan.maps_offset), "starts": (buffer, plan.starts_offset)}
    sizes = SEGMENTS.last(*rows, *strides[V_STRIDES], *plan.sizes)
    launches = [PlannedLaunch(name, prepare, units, operands, prepared)]
    launches += [PlannedLaunch(name, launcher, grid, given, sizes) for name, launcher, grid in others]
    return launches, plan.workspace_bytes


def _tail(
    r: Request,
    arrays: Places,
    states: tuple[str, int],
    row: int,
    strides: tuple[int, ...],
    g_type: str,
) -> PlannedLaunch:
    launcher = tail_launcher()
    fixed = launcher.params.last(row, *strides[3:], *tail_sizes(r, g_type))  # of k, v, g and beta
    places = _only(arrays, launcher.params) | {"mark_states": states}
    return PlannedLaunch("tail", launcher, tail_grid(r), places, fixed)
