"""The launch of the recurrent ops as data, for contiguous arrays. Calls from JAX are made of it."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.recurrent import forward as recurrent
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch

_ARGUMENTS = {
    **{name: name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")},
    "h0": "initial_state",
    "indices": "state_indices",
    "accepted": "num_accepted_tokens",
    "has_initial": "has_initial_state",
}
"""Field of the kernels' parameters -> argument."""


def launch_of(request: Request) -> PlannedLaunch:
    """The launch of :func:`kdacore_cuda.forms.recurrent.forward.forward`, with the arrays ``o``, ``final_state``
    and, by their names, those of the call."""
    r, plan = request, recurrent.plan_of(request)
    launch, grid = plan.contiguous_launch
    arrays = {field: (name, 0) for field, name in _ARGUMENTS.items() if r.has(name)}
    arrays["o"] = ("o", 0)
    if r.inplace_state or r.output_final_state:
        arrays["ht"] = ("final_state", 0)
    if plan.written_indices:
        arrays["writes"] = (plan.written_indices, 0)
    fixed = {**launch.fixed, "h0_row": plan.state_row, "ht_row": plan.state_row}
    return PlannedLaunch("recurrent", launch.launcher, grid, arrays, fixed)
