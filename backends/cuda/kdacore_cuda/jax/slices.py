"""A chunk op on a slice of a row that continues on other ranks, on JAX arrays: the launches of the
torch calls, made by XLA's programs through the handler.

Each pass makes two calls, before and after the exchange. Buffers of the first are operands of the
second; those that the second overwrites are aliased to its results, so they take memory once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request, SliceForward
from kdacore_cuda.forms.slices.by_op import backward_launches, forward_launches
from kdacore_cuda.forms.slices.halves import GIVEN
from kdacore_cuda.jax import forward
from kdacore_cuda.jax.backward import as_of_inputs, gradients_of, wanted_of
from kdacore_cuda.jax.batching import Arrays, run_batched
from kdacore_cuda.jax.launch import Form, given_arrays, make_launches


def begin(request: Request, inputs: ChunkInputs, leaving: Any) -> SliceForward:
    """As :func:`kdacore_cuda.forms.slices.forward.begin`, on traced arrays."""
    found = run_batched(_run_begin, request, _arguments(request, inputs), joins=False)
    M, C = found.pop("M"), found.pop("C")
    return SliceForward(M, C, found or None)


def finish(request: Request, inputs: ChunkInputs, pending: Arrays | None, starts: Any) -> Outputs:
    """As :func:`kdacore_cuda.forms.slices.forward.finish`, on traced arrays."""
    if pending is None:
        return forward.forward(request, inputs._replace(initial_state=starts))
    arrays = _arguments(request, inputs) | pending | {"starts": starts}
    found = run_batched(_run_finish, request, arrays, joins=False)
    return Outputs(found["o"], found.get("final_state"), found.get("checkpoints"))


def backward_begin(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    grads: OutputGrads,
    starts: Any,
    entering: Any,
) -> tuple[Any, Arrays]:
    """As :func:`kdacore_cuda.forms.slices.backward.backward_begin`, on traced arrays."""
    arrays = _arguments(request, inputs) | {"starts": starts}
    arrays["d_o"] = jnp.zeros_like(inputs.v) if grads.o is None else grads.o
    if grads.final_state is not None:
        arrays["d_final"] = grads.final_state
    found = run_batched(_run_backward_begin, request, arrays, joins=False)
    return found.pop("d_slice_start"), found | {"d_o": arrays["d_o"]}


def backward_finish(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    pending: Arrays,
    grads: OutputGrads,
    starts: Any,
    ends: Any,
) -> InputGrads:
    """As :func:`kdacore_cuda.forms.slices.backward.backward_finish`, on traced arrays. A gradient of an
    array that is the same on all devices of a ``shard_map`` axis is the sum over it."""
    arrays = _arguments(request, inputs) | pending | {"starts": starts, "ends": ends}
    found = run_batched(_run_backward_finish, request, arrays, joins=False)
    return as_of_inputs(found, inputs._replace(initial_state=starts))


def _arguments(request: Request, inputs: ChunkInputs) -> Arrays:
    return {name: x for name, x in given_arrays(request, inputs).items() if name in GIVEN}


def _states(count: int, r: Request) -> Form:
    return (count, r.HV, r.K, r.V), "float32"


def _run_begin(r: Request, arrays: Arrays, groups: int) -> Arrays:
    made = forward_launches(r)
    results = {x: _states(made.results, r) for x in ("M", "C")}
    found = make_launches(r, made.begin, arrays, results)
    return found if made.finish is not None else {x: found[x] for x in results}


def _run_finish(r: Request, arrays: Arrays, groups: int) -> Arrays:
    launches = forward_launches(r).finish
    if launches is None:
        raise ValueError("the results of this slice come from a whole call")
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    if r.output_final_state:
        results["final_state"] = _states(r.N, r)
    if r.checkpoint_every:
        results["checkpoints"] = (r.checkpoint_shape, r.state_dtype)
    found = make_launches(r, launches, arrays, results, {"saved, written": "saved"})
    return {x: found[x] for x in results}


def _run_backward_begin(r: Request, arrays: Arrays, groups: int) -> Arrays:
    made = backward_launches(r, wanted_of(r))
    return make_launches(r, made.begin, arrays, {"d_slice_start": _states(made.results, r)})


def _run_backward_finish(r: Request, arrays: Arrays, groups: int) -> Arrays:
    made, d_starts = backward_launches(r, wanted_of(r)), {"d_starts": _states(r.N, r)}
    if made.scan is None:
        return gradients_of(r, made.gradients, arrays, groups, d_starts)
    # Two calls of the handler, so that the operands' memory can become gradients.
    written = {f"{x}, written": x for x in ("borders", "both")}
    before = make_launches(r, made.scan, arrays, d_starts, written)
    given = arrays | {"both": before["both, written"]}
    return gradients_of(r, made.gradients, given, groups) | {"initial_state": before["d_starts"]}
