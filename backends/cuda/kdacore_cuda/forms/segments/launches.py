"""The launches of the segments form as data."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.array_places import MARKS, ROWS, ForwardLaunches, Places, only, operands, with_strides
from kdacore_cuda.forms.segments.forward import plan_of
from kdacore_cuda.kernel_parameters import PREPARE_MARKED, SEGMENTS, V_STRIDES
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch


def launches_of(
    r: Request, arrays: Places, strides: tuple[int, ...], rows: tuple[int, int]
) -> ForwardLaunches:
    """The launches, given where the call's arrays are, the strides of its tokens, and those of its states' rows."""
    plan = plan_of(r)
    (name, prepare, units), *others = plan.launches
    given = only(arrays, SEGMENTS, "v", "cu_seqlens", "o", "h0", "ht", "ckpt", *ROWS, *MARKS)
    prepared, records = with_strides(plan.chunks.sizes, strides), operands(arrays, plan.records_offset)
    if plan.marked:
        records |= only(arrays, PREPARE_MARKED, *MARKS)
        prepared |= dict(zip(("marks", "null_index"), plan.marked, strict=True))
        given["mark_states"] = ("workspace", 0)
    given["chunk_operands"] = ("workspace", plan.operands_offset)
    given["addends"] = ("workspace", plan.addends_offset)
    buffer = "kept" if plan.keeps else "workspace"
    given |= {"maps": (buffer, plan.maps_offset), "starts": (buffer, plan.starts_offset)}
    sizes = SEGMENTS.last(*rows, *strides[V_STRIDES], *plan.sizes)
    launches = [PlannedLaunch(name, prepare, units, records, prepared)]
    launches += [PlannedLaunch(name, launcher, grid, given, sizes) for name, launcher, grid in others]
    return ForwardLaunches(tuple(launches), plan.workspace_bytes, plan.chunks.arch, plan.kept_bytes)
