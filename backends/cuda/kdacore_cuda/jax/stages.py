"""The training stages ``kda_chunk_intra`` and ``kda_recompute_w_u`` on JAX arrays: the launches of the
torch calls, made by XLA's programs through the handler."""

from __future__ import annotations

from functools import partial
from typing import Any

from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda.forms.stages import forward as stages
from kdacore_cuda.jax.batching import run_batched
from kdacore_cuda.jax.launch import Arrays, Form, given_arrays, make_launches
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.runtime.device_figures import planned
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.chunk_intra`, on traced arrays."""
    r = request
    results: dict[str, Form] = dict.fromkeys(("Aqk", "Akk"), ((r.B, r.T, r.HV, r.chunk_size), r.dtype))
    run = partial(_run, ("q", "k", "gc", "beta"), results)
    return IntraOutputs(**run_batched(run, planned(r), given_arrays(r, inputs)))


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.recompute_w_u`, on traced arrays."""
    r = request
    names = ("w", "u", "kg", *(("qg",) if r.has("q") else ()))
    results: dict[str, Form] = {x: ((r.B, r.T, r.HV, r.V if x == "u" else r.K), r.dtype) for x in names}
    run = partial(_run, ("k", "v", "beta", "gc", "Akk", "q" if r.has("q") else "k"), results)
    return RecomputeOutputs(**run_batched(run, planned(r), given_arrays(r, inputs)))


def _run(
    strided: tuple[str, ...], results: dict[str, Form], request: Request, arrays: Any, groups: int
) -> Arrays:
    """One launch. ``strided``: the arrays whose strides it takes, in that order."""
    plan = stages.plan_of(request)
    strides = [s for x in strided for s in contiguous_strides(arrays[x].shape)[:3]]
    places = {"g" if x == "gc" else x: (x, 0) for x in (*arrays, *results)}
    fixed = plan.launcher.params.last(*strides, *plan.sizes)
    launch = PlannedLaunch(request.op, plan.launcher, plan.grid, places, fixed)
    forms = {x: ((request.B, *shape[1:]), dtype) for x, (shape, dtype) in results.items()}
    return make_launches(request, plan.arch, [launch], arrays, forms)
