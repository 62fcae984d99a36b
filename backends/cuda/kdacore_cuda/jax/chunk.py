"""``chunk_kda`` on JAX arrays, forward and backward: the launches of the torch calls, made by XLA's
programs through the handler."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp

from kdacore.arrays.jax_meshes import summed_like
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_cuda.forms import chunk_forward_launches
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import launches as chunk_backward_launches
from kdacore_cuda.forms.backward.launches import INPUTS
from kdacore_cuda.jax.batching import run_batched
from kdacore_cuda.jax.launch import Arrays, Form, given_arrays, make_launches, state_results
from kdacore_cuda.jax.partitioning import run_partitioned
from kdacore_cuda.kernel_parameters import SUM_SCALE
from kdacore_cuda.runtime.device_figures import planned
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch


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
    r = request
    made = chunk_forward_launches.launches_of(r, g_type=arrays["g"].dtype.name)
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    states, in_place = state_results(r, arrays)
    results |= states
    cleared = []
    if r.checkpoint_every:
        results["checkpoints"] = (r.checkpoint_shape, r.state_dtype)
        if r.packed or r.pool_size:  # no kernel writes the unused rows
            cleared.append("checkpoints")
    if made.workspace_bytes:
        results["workspace"] = ((made.workspace_bytes,), "uint8")
    found = make_launches(r, made.arch, made.launches, arrays, results, in_place, cleared)
    found.pop("workspace", None)
    return found


def _run_backward(request: Request, arrays: Any, groups: int) -> Arrays:
    """Two calls of the handler, so that the memory of the first can become gradients."""
    r = request
    wanted: Any = InputGrads(*(r.has(x) for x in InputGrads._fields))
    made = chunk_backward_launches.launches_of(r, chunk_backward.plan_of(r).strides, wanted)
    given = {"h0" if name == "initial_state" else name: x for name, x in arrays.items()}
    inputs = {name: given[name] for name in INPUTS if name in given}
    flows = {name: given[name] for name in ("d_o", "d_ht") if name in given}

    results: dict[str, Form] = {
        "both": ((made.both_bytes,), "uint8"),
        "first": ((made.first_bytes,), "uint8"),
    }
    if "h0" in given:
        results["d_h0"] = form_of(given["h0"])
    first = present(made.first, {*inputs, *flows, *results})
    before = make_launches(r, made.arch, first, inputs | flows, results)

    arguments = inputs | {"d_o": given["d_o"], "both": before["both"]}
    gradients = gradients_behind_scan(r, made, arguments, groups)
    if "h0" in given:
        gradients["initial_state"] = before["d_h0"]
    return gradients


def gradients_behind_scan(
    r: Request, made: chunk_backward_launches.BackwardLaunches, given: Arrays, groups: int
) -> Arrays:
    """The second group of a backward's launches.

    Args:
        r: the call.
        made: its launches.
        given: the arrays of the call, ``d_o`` and ``both``.
        groups: as of :class:`kdacore_cuda.jax.batching.Run`.

    Returns:
        By name of the argument, the gradient of each but the initial state.
    """
    results: dict[str, Form] = {f"d{x}": form_of(given[x]) for x in ("q", "k", "v", "g", "beta")}
    results["both, written"] = form_of(given["both"])  # the gradients kernel leaves sums in it
    buffers: dict[str, Form] = {
        "second": ((made.second_bytes,), "uint8"),
        "zeroed": ((made.zeroed_floats,), "float32"),
    }
    results |= {name: form for name, form in buffers.items() if form[0][0]}
    shared = [x for x in ("A_log", "dt_bias") if x in given]
    second = list(made.second)
    if groups == 1:
        results |= {_SUMS[x]: form_of(given[x]) for x in shared}
    else:  # a sum for each group, by XLA, of what the gradients kernel leaves for each chunk
        slots = chunk_backward.plan_of(r).slots
        results |= {_PARTS[x]: ((slots, given[x].size), "float32") for x in shared}
        places = {_PARTS[x]: (_PARTS[x], 0) for x in shared}
        second = [
            x._replace(arrays={**x.arrays, **places}) if x.name == "grads" else x
            for x in second
            if x.name != "sums"
        ]
    after = make_launches(
        *(r, made.arch, present(second, {*given, *results}), given, results),
        in_place={"both, written": "both"},
        cleared=["zeroed"] if "zeroed" in results else [],
    )
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


def present(launches: Iterable[PlannedLaunch], names: set[str]) -> list[PlannedLaunch]:
    """The launches without the arrays that this call does not have."""
    return [
        x._replace(arrays={field: place for field, place in x.arrays.items() if place[0] in names})
        for x in launches
    ]
