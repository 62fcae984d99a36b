"""Gradients of the chunk ops on JAX arrays: the launches of the torch calls, made by XLA's programs through the
handler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from kdacore.arrays.jax_meshes import summed_like
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms.backward.launches import launches_of
from kdacore_cuda.forms.chunk_numbers import chunk_slots
from kdacore_cuda.forms.gated_delta import backward_launches as gated_delta
from kdacore_cuda.forms.launches import TOKENS, Launches
from kdacore_cuda.jax.batching import Arrays, run_batched
from kdacore_cuda.jax.launch import Form, form_of, given_arrays, make_launches
from kdacore_cuda.jax.partitioning import run_partitioned
from kdacore_cuda.kernel_parameters import SUM_SCALE


@fitted_head_dims.backward
def backward(request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of ``chunk_kda`` or ``chunk_gated_delta_rule`` with respect to every differentiable input, on traced
    arrays.

    Arguments, results and errors as of :meth:`kdacore_cuda.forms.torch_gradients.TorchGradients.backward`. A gradient
    of an array that is the same on all devices of a ``shard_map`` axis is the sum over it.
    """
    arrays = given_arrays(request, inputs)
    arrays["d_o"] = jnp.zeros_like(inputs.v) if grads.o is None else grads.o
    if grads.final_state is not None:
        arrays["d_ht"] = grads.final_state
    return as_of_inputs(run_batched(partial(run_partitioned, _run), request, arrays), inputs)


def _run(r: Request, arrays: Arrays, groups: int) -> Arrays:
    wanted, to_caller = wanted_of(r), groups > 1
    initial = arrays.get("initial_state")
    states = {} if initial is None else {"d_h0": form_of(initial)}
    if r.scalar_gate:
        launches = gated_delta.launches_of(r, wanted, sums_to_caller=to_caller)
        return gradients_of(r, launches, arrays, groups, states)
    # Two calls of the handler, so that the memory of the first can become gradients.
    made = launches_of(r, wanted, sums_to_caller=to_caller)
    before = make_launches(r, made.first, arrays, states)
    gradients = gradients_of(r, made.second, arrays | {"both": before["both"]}, groups)
    return gradients if initial is None else gradients | {"initial_state": before["d_h0"]}


def wanted_of(r: Request) -> InputGrads:
    """The gradients of all that a call has."""
    return InputGrads(*[r.has(name) for name in InputGrads._fields])


_TOKENS = {x: f"d{x}" for x in TOKENS}
"""Argument -> the array of its gradient."""
_SUMS = {"A_log": "d_A", "dt_bias": "d_bias"}
"""The same of arguments that all rows have in common."""
_PARTS = {"A_log": "dA_part", "dt_bias": "dbias_part"}
"""Argument -> the float32 sums over each chunk, whose sum is its gradient."""


def gradients_of(
    r: Request, launches: Launches, arrays: Arrays, groups: int, states: Mapping[str, Form] = {}
) -> Arrays:
    """A backward's launches that write gradients.

    Args:
        r: the call.
        launches: those, with sums left to the caller if there are several groups.
        arrays: those of the call and ``d_o``; ``both``, which is written, if launches ahead of these have left it.
        groups: as of :class:`kdacore_cuda.jax.batching.Run`.
        states: the gradient of the states at the start, by the name of its array, if these launches write it.

    Returns:
        By name of the argument, the gradient of each; of the initial state if these launches write it.
    """
    shared = [x for x in _SUMS if x in arrays]
    names = _TOKENS | {x: _SUMS[x] if groups == 1 else _PARTS[x] for x in shared}
    results = {name: form_of(arrays[x]) for x, name in names.items()} | dict(states)
    if (
        groups > 1
    ):  # a sum for each group, by XLA, of what the gradients kernel leaves for each chunk; no pack
        results |= {_PARTS[x]: ((chunk_slots(r), arrays[x].size), "float32") for x in shared}
    in_place = {"both, written": "both"} if "both" in arrays else {}  # for sums
    made = make_launches(r, launches, arrays, results, in_place)
    gradients = {x: made[name] for x, name in names.items()}
    for x in shared:
        if groups == 1:
            gradients[x] = gradients[x][None]
        else:
            sums = gradients[x].reshape(groups, -1, arrays[x].size).sum(1) / SUM_SCALE
            dtype = arrays[x].dtype
            gradients[x] = saturated(sums.reshape(groups, *arrays[x].shape), dtype).astype(dtype)
    for name in states:
        gradients["initial_state"] = made[name]
    return gradients


def as_of_inputs(found: Arrays, inputs: ChunkInputs) -> InputGrads:
    """Gradients in the shapes and dtypes of their inputs, None where there is none; each summed over the mesh axes over
    which its input is the same."""
    if inputs.g.dtype == jnp.float16:
        found["g"] = saturated(found["g"], jnp.float16)
    given = ((found.get(x), getattr(inputs, x)) for x in InputGrads._fields)
    return InputGrads(*(None if d is None else summed_like(d.reshape(x.shape), x) for d, x in given))


def saturated(x: Any, dtype: Any) -> Any:
    """``x`` cut off at the largest numbers of a dtype."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest)
