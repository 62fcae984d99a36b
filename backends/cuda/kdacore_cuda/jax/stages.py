"""The training stages ``kda_chunk_intra`` and ``kda_recompute_w_u`` on JAX arrays: the launches of the
torch calls, made by XLA's programs through the handler."""

from __future__ import annotations

from typing import Any

from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda.forms.stages.launches import ARRAYS, launches_of
from kdacore_cuda.jax.batching import run_batched
from kdacore_cuda.jax.launch import Arrays, Form, given_arrays, make_launches
from kdacore_cuda.runtime.device_figures import planned


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.chunk_intra`, on traced arrays."""
    return IntraOutputs(**run_batched(_run, planned(request), given_arrays(request, inputs)))


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.recompute_w_u`, on traced arrays."""
    return RecomputeOutputs(**run_batched(_run, planned(request), given_arrays(request, inputs)))


def _run(request: Request, arrays: Any, groups: int) -> Arrays:
    r, results = request, ARRAYS[request.op].results
    widths = {"Aqk": r.chunk_size, "Akk": r.chunk_size, "w": r.K, "u": r.V, "kg": r.K, "qg": r.K}
    forms: dict[str, Form] = {
        name: ((r.B, r.T, r.HV, widths[name]), r.dtype) for name in results if name != "qg" or "q" in arrays
    }
    return make_launches(r, launches_of(r), arrays, forms)
