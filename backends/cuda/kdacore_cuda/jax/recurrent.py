"""The recurrent ops on JAX arrays: the launch of the torch calls, made by XLA's programs through the
handler."""

from __future__ import annotations

from functools import partial
from typing import Any

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda.forms.recurrent.launches import launches_of
from kdacore_cuda.jax.batching import run_batched
from kdacore_cuda.jax.launch import Arrays, Form, given_arrays, make_launches, state_results, written_rows
from kdacore_cuda.jax.partitioning import run_partitioned
from kdacore_cuda.runtime.device_figures import planned


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on traced arrays of CUDA
    devices.

    Args:
        request: as of :func:`kdacore_cuda.forms.recurrent.forward.forward`.
        inputs: its arrays, shaped as :class:`kdacore.types.RecurrentInputs` says.

    Returns:
        As that function; where states are written in place, the pool as it then is.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
    """
    found = run_batched(partial(run_partitioned, _run), planned(request), given_arrays(request, inputs))
    return Outputs(found["o"], found.get("final_state") if request.output_final_state else None)


def _run(request: Request, arrays: Any, groups: int) -> Arrays:
    r = request
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    states, in_place = state_results(r, arrays)
    return make_launches(r, launches_of(r), arrays, results | states, in_place, same=written_rows(r))
