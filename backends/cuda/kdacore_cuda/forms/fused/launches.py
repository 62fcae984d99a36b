"""The launches of the fused form as data."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.architectures import has_hopper_kernel
from kdacore_cuda.forms.array_places import ForwardLaunches, Places, only
from kdacore_cuda.forms.fused.checkpoints import tail_grid, tail_launcher, tail_sizes
from kdacore_cuda.forms.fused.forward import plan_of
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch


def launches_of(
    r: Request, arrays: Places, strides: tuple[int, ...], rows: tuple[int, int], g_type: str
) -> ForwardLaunches:
    """The launches, given where the call's arrays are, the strides of its tokens, those of its states' rows, and the
    dtype of the g that kernels are given."""
    plan = plan_of(r)
    places = only(arrays, CHUNK_FORWARD)
    if plan.workspace_size:
        places["workspace"] = ("workspace", 0)
    fixed = CHUNK_FORWARD.last(*rows, *strides, *plan.sizes)
    used = 4 * plan.workspace_size
    launches = [PlannedLaunch("fused", plan.launcher, plan.grid, places, fixed)]
    if r.checkpoint_count and has_hopper_kernel(r.K, plan.arch):
        used = -(-used // 256) * 256
        states = ("workspace", used)
        used += 4 * r.checkpoint_count * r.HV * r.K * r.V
        places["mark_states"] = states
        launches.append(_tail(r, arrays, states, rows[1], strides, g_type))
    return ForwardLaunches(tuple(launches), used, plan.arch)


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
    places = only(arrays, launcher.params) | {"mark_states": states}
    return PlannedLaunch("tail", launcher, tail_grid(r), places, fixed)
