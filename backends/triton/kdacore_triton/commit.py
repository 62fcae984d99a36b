"""``commit_records``: one launch for the states, and one for the windows of the convolution where there are any."""

from __future__ import annotations

from typing import Any

from kdacore.types import CommitInputs, CommitOutputs, Request
from kdacore_triton.decode_arguments import conv_strides, record_strides
from kdacore_triton.decode_tiles import commit_tile
from kdacore_triton.fixed_launch import FixedLaunch, PlanCache
from kdacore_triton.kernel_options import INTERPRETING, dense
from kdacore_triton.kernels.commit import commit_kernel, commit_windows_kernel
from kdacore_triton.kernels.groups import CellStrides
from kdacore_triton.launch import Launcher, cdiv, next_power_of_2
from kdacore_triton.recurrent_modes import state_strides

_states, _windows = Launcher(commit_kernel), Launcher(commit_windows_kernel)
_BLOCK = 256
"""Channels of a program."""
_MAX_GRID_Y = 65535
_MAX_LAUNCHES = 1024


def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """Apply records to states of a pool, of any strides.

    Returns: the arrays that were written: those of the call.

    Raises:
        BackendBuildError: a kernel could not be compiled. Nothing is written then.
    """
    plan = _plan(request)
    states, windows = plan.launches_for(inputs)
    indices = (dense(inputs.state_indices), dense(inputs.record_indices), dense(inputs.num_replayed))
    reads, rows, counts = indices
    records = (inputs.record_update, inputs.record_key, inputs.record_decay)
    pools = (inputs.initial_state, inputs.initial_state)
    if windows is not None:
        conv = (None, None, inputs.conv_state, inputs.conv_windows)
        numbers = (reads, dense(inputs.conv_indices), rows, counts)
        windows.build(
            *conv, numbers=numbers
        )  # what cannot be built must be found out before anything is written
    states(*pools, *records, numbers=(reads, dense(inputs.write_indices), rows, counts))
    if windows is not None:
        windows(*conv, numbers=numbers)
    return CommitOutputs(inputs.initial_state, inputs.conv_state)


class CommitPlan:
    """What a request determines, with its launches for each set of strides seen."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.launches: dict[Any, tuple[FixedLaunch, FixedLaunch | None]] = {}

    def launches_for(self, x: CommitInputs) -> tuple[FixedLaunch, FixedLaunch | None]:
        """The launches for the strides of these inputs: of the states, and of the windows."""
        given = (x.initial_state, x.record_update, x.record_key, x.record_decay, x.conv_state, x.conv_windows)
        key = tuple([None if a is None else (a.stride(), a.shape) for a in given])
        found = self.launches.get(key)
        if found is None:
            if len(self.launches) >= _MAX_LAUNCHES:
                self.launches.clear()
            found = self._states(x), None if x.conv_state is None else self._windows(x)
            self.launches[key] = found
        return found

    def _states(self, x: CommitInputs) -> FixedLaunch:
        r = self.request
        tile = commit_tile(r)
        programs = r.HV * cdiv(r.V, tile.BV)
        flat = r.N > _MAX_GRID_Y
        strides = state_strides(r, x.initial_state)
        scalars = (r.HV, *strides[:2], *strides[:2], *record_strides(x), self._null())
        constexprs = {
            "K": r.K, "V": r.V, "KP": next_power_of_2(r.K), "BV": tile.BV, "GROUP": r.HV // r.H,
            "POOL": CellStrides(*strides[2:], *strides[2:]), "SCALAR_GATE": r.scalar_gate, "FLAT": flat,
            "BY_HAND": INTERPRETING,
        }  # fmt: skip
        grid = (programs * r.N, 1, 1) if flat else (programs, r.N, 1)
        return FixedLaunch(_states, r.device.index, grid, scalars, constexprs, tile.num_warps)

    def _windows(self, x: Any) -> FixedLaunch:
        r, channels = self.request, x.conv_state.shape[1]
        scalars = (channels, x.record_update.shape[1], *conv_strides(x), self._null())
        history = 0 if x.conv_windows is None else x.conv_windows.shape[2]
        constexprs = {"HISTORY": history, "BLOCK": _BLOCK}
        grid = (r.N, cdiv(channels, _BLOCK), 1)
        return FixedLaunch(_windows, r.device.index, grid, scalars, constexprs, num_warps=_BLOCK // 32)

    def _null(self) -> int | None:
        return self.request.null_index if self.request.null_index >= 0 else None


_plan = PlanCache(CommitPlan)
