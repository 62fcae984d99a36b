"""The launches of the kept form as data."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.kernels import prepare_kernel
from kdacore_cuda.forms.backward.launches import INPUTS
from kdacore_cuda.forms.kept.forward import outputs_kernel
from kdacore_cuda.forms.kept.sizes import kept_places
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch

ARRAYS = (*INPUTS, "o", "ht", "kept")
"""What the launches may take."""
_STRIDES = tuple(f"{name}_{axis}" for name in INPUTS[:5] for axis in ("sb", "st", "sh"))


def launches_of(request: Request, strides: tuple[int, ...]) -> tuple[PlannedLaunch, ...]:
    """The launches of :func:`kdacore_cuda.forms.kept.forward.forward`, g not float16, given the
    batch, token and head strides of q, k, v, g and beta."""
    r, plan = request, chunk_backward.plan_of(request)
    places = {name: (name, 0) for name in INPUTS if r.has("initial_state" if name == "h0" else name)}
    places |= {name: ("kept", offset) for name, offset in kept_places(plan.sizes["units"]).items()}
    results = {"o": ("o", 0)} | ({"ht": ("ht", 0)} if r.output_final_state else {})
    fixed = {**plan.sizes, **dict(zip(_STRIDES, strides, strict=True))}
    kernels = {
        "prepare": (prepare_kernel(plan.float_gate, plan.bounded), places),
        "outputs": (outputs_kernel(r), places | results),
    }
    return tuple(
        PlannedLaunch(name, chunk_backward.launcher(x), plan.grid(x, r.device.index), arrays, fixed)
        for name, (x, arrays) in kernels.items()
    )
