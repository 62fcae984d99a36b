"""``chunk_kda`` on JAX arrays, forward and backward: the launches of the torch calls, made by XLA's
programs through the handler."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp

from kdacore.arrays.jax_meshes import summed_like
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_cuda.forms.backward import launches as backward_launches
from kdacore_cuda.forms.backward.launches import INPUTS
from kdacore_cuda.forms.chunk_launches import launches_of
from kdacore_cuda.forms.chunk_numbers import chunk_slots
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.jax.batching import run_batched
from kdacore_cuda.jax.launch import Arrays, Form, given_arrays, make_launches, state_results, written_rows
from kdacore_cuda.jax.partitioning import run_partitioned
from kdacore_cuda.kernel_parameters import SUM_SCALE
from kdacore_cuda.runtime.device_figures import planned


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` on traced arrays of CUDA devices.

    Args:
        request: as of :func:`kdacore_cuda.forms.chunk_forward.forward`.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        As that function; where states are written in place, the pool as it then is.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
    """
    found = run_batched(
        partial(run_partitioned, _run_forward), planned(request), given_to_kernels(request, inputs)
    )
    final = found.get("final_state") if request.output_final_state else None
    return Outputs(found["o"], final, found.get("checkpoints"))


def backward(request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of ``chunk_kda`` with respect to every differentiable input, on traced arrays.

    Arguments, results and errors as of :func:`kdacore_cuda.forms.backward.gradients.backward`. A gradient of an
    array that is the same on all devices of a ``shard_map`` axis is the sum over it.
    """
    arrays = given_to_kernels(request, inputs) | {
        "d_o": jnp.zeros_like(inputs.v) if grads.o is None else grads.o
    }
    if grads.final_state is not None:
        arrays["d_ht"] = grads.final_state
    found = run_batched(partial(run_partitioned, _run_backward), planned(request), arrays)
    if inputs.g.dtype == jnp.float16:
        found["g"] = saturated(found["g"], jnp.float16)
    if "dt_bias" in found:
        found["dt_bias"] = found["dt_bias"].reshape(inputs.dt_bias.shape)  # type: ignore[union-attr]
    names = InputGrads._fields
    return InputGrads(*(summed_like(found[x], getattr(inputs, x)) if x in found else None for x in names))


def given_to_kernels(request: Request, inputs: ChunkInputs) -> Arrays:
    """The arrays of a call that kernels read; g not as float16, which they do not take."""
    given = given_arrays(request, inputs)
    if given["g"].dtype == jnp.float16:
        given["g"] = given["g"].astype(jnp.float32)
    return given


def _run_forward(request: Request, arrays: Any, groups: int) -> Arrays:
    r, launches = request, launches_of(request)
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    states, in_place = state_results(r, arrays)
    results |= states
    cleared = []
    if r.checkpoint_every:
        results["checkpoints"] = (r.checkpoint_shape, r.state_dtype)
        if r.packed or r.pool_size:  # no kernel writes the unused rows
            cleared.append("checkpoints")
    found = make_launches(r, launches, arrays, results, in_place, cleared, written_rows(r))
    return {name: found[name] for name in results}


def _run_backward(request: Request, arrays: Any, groups: int) -> Arrays:
    """Two calls of the handler, so that the memory of the first can become gradients."""
    r = request
    made = backward_launches.launches_of(r, wanted_of(r), sums_to_caller=groups > 1)
    inputs = {name: arrays[name] for name in INPUTS if name in arrays}
    flows = {name: arrays[name] for name in ("d_o", "d_ht") if name in arrays}
    results: dict[str, Form] = {}
    if "initial_state" in arrays:
        results["d_h0"] = form_of(arrays["initial_state"])
    before = make_launches(r, made.first, inputs | flows, results)
    arguments = inputs | {"d_o": arrays["d_o"], "both": before["both"]}
    gradients = gradients_behind_scan(r, made.second, arguments, groups)
    if "initial_state" in arrays:
        gradients["initial_state"] = before["d_h0"]
    return gradients


def wanted_of(r: Request) -> InputGrads:
    """The gradients of all that a call has."""
    return InputGrads(*[r.has(name) for name in InputGrads._fields])


def gradients_behind_scan(r: Request, launches: Launches, given: Arrays, groups: int) -> Arrays:
    """The second group of a backward's launches.

    Args:
        r: the call.
        launches: those, with sums left to the caller if there are several groups.
        given: the arrays of the call, ``d_o`` and ``both``.
        groups: as of :class:`kdacore_cuda.jax.batching.Run`.

    Returns:
        By name of the argument, the gradient of each but the initial state.
    """
    results: dict[str, Form] = {f"d{x}": form_of(given[x]) for x in ("q", "k", "v", "g", "beta")}
    results["both, written"] = form_of(given["both"])  # the gradients kernel leaves sums in it
    shared = [x for x in ("A_log", "dt_bias") if x in given]
    if groups == 1:
        results |= {_SUMS[x]: form_of(given[x]) for x in shared}
    else:  # a sum for each group, by XLA, of what the gradients kernel leaves for each chunk
        results |= {_PARTS[x]: ((chunk_slots(r), given[x].size), "float32") for x in shared}
    cleared = [_PARTS[x] for x in shared] if groups > 1 and r.packed else []
    after = make_launches(r, launches, given, results, {"both, written": "both"}, cleared)
    gradients = {x: after[f"d{x}"] for x in ("q", "k", "v", "g", "beta")}
    for x in shared:
        if groups == 1:
            gradients[x] = after[_SUMS[x]][None]
        else:
            parts = after[_PARTS[x]].reshape(groups, -1, given[x].size)
            sums = parts.sum(1).reshape(groups, *given[x].shape) / SUM_SCALE
            gradients[x] = saturated(sums, given[x].dtype).astype(given[x].dtype)
    return gradients


def saturated(x: Any, dtype: Any) -> Any:
    """``x`` cut off at the largest numbers of a dtype."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest)


_PARTS = {"A_log": "dA_part", "dt_bias": "dbias_part"}
"""Argument -> field of the float32 sums over each chunk, whose sum is its gradient."""
_SUMS = {"A_log": "d_A", "dt_bias": "d_bias"}
"""Argument -> the array of its gradient."""


def form_of(x: Any) -> Form:
    """That of an array."""
    return x.shape, x.dtype.name
