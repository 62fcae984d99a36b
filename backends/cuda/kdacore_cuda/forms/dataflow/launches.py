"""The two launches of the dataflow form as data."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.array_places import ForwardLaunches, Places, only, operands, with_strides
from kdacore_cuda.forms.dataflow.forward import plan_of, walk_launcher
from kdacore_cuda.kernel_parameters import V_STRIDES, WALK
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch


def launches_of(r: Request, arrays: Places, strides: tuple[int, ...]) -> ForwardLaunches:
    """The launches, given where the call's arrays are, and the strides of its tokens."""
    plan = plan_of(r)
    flags: Places = {"ready": ("workspace", plan.flags_offset), "launch": arrays["launch"]}
    walk = only(arrays, WALK, "v", "o", "h0", "ht", "ckpt") | {"chunk_operands": ("workspace", 0)} | flags
    prepared, sizes = with_strides(plan.chunks.sizes, strides), (*strides[V_STRIDES], *plan.walk_sizes)
    launches = (
        PlannedLaunch("prepare", plan.prepare, plan.prepare_grid, operands(arrays) | flags, prepared),
        PlannedLaunch("walk", walk_launcher(), plan.walk_grid, walk, WALK.last(*sizes)),
    )
    return ForwardLaunches(launches, plan.workspace_bytes, plan.chunks.arch)
