"""``chunk_kda`` on a slice of a row that continues on other ranks, on JAX arrays: the launches of the
torch calls, made by XLA's programs through the handler.

Each pass makes two calls, before and after the exchange. Buffers of the first are operands of the
second; those that the second overwrites are aliased to its results, so they take memory once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.arrays.jax_meshes import summed_like
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request, SliceForward
from kdacore_cuda.forms.slices.launches import (
    GIVEN,
    BackwardSliceLaunches,
    backward_launches,
    forward_launches,
)
from kdacore_cuda.jax import chunk as jax_chunk
from kdacore_cuda.jax.batching import run_looped
from kdacore_cuda.jax.chunk import form_of, given_to_kernels, gradients_behind_scan, saturated, wanted_of
from kdacore_cuda.jax.launch import Arrays, Form, make_launches
from kdacore_cuda.runtime.device_figures import planned

STATE = (128, 128)
_CARRIED = ("workspace", "saved")
"""Buffers from the first half of a forward to the second."""


def begin(request: Request, inputs: ChunkInputs, leaving: Any) -> SliceForward:
    """As :func:`kdacore_cuda.forms.slices.forward.begin`, on traced arrays."""
    arrays = _arguments(request, inputs)
    found = run_looped(_run_begin, planned(request), arrays)
    pending = {x: found[x] for x in _CARRIED} if "workspace" in found else None
    return SliceForward(found["M"], found["C"], pending)


def finish(request: Request, inputs: ChunkInputs, pending: Arrays | None, starts: Any) -> Outputs:
    """As :func:`kdacore_cuda.forms.slices.forward.finish`, on traced arrays."""
    if pending is None:
        out = jax_chunk.forward(request, inputs._replace(initial_state=starts))
        return out if request.output_final_state else out._replace(final_state=None)
    arrays = {"v": _arguments(request, inputs)["v"], "starts": starts, **pending}
    if request.packed:
        arrays["cu_seqlens"] = inputs.cu_seqlens
    found = run_looped(_run_finish, planned(request), arrays)
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
    found = run_looped(_run_backward_begin, planned(request), arrays)
    d_start = found.pop("d_slice_start")
    return d_start, found | {"d_o": arrays["d_o"]}


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
    found = run_looped(_run_backward_finish, planned(request), arrays)
    if inputs.g.dtype == jnp.float16:
        found["g"] = saturated(found["g"], jnp.float16)
    if "dt_bias" in found:
        found["dt_bias"] = found["dt_bias"].reshape(inputs.dt_bias.shape)  # type: ignore[union-attr]
    given = inputs._replace(initial_state=starts)
    names = InputGrads._fields
    return InputGrads(*(summed_like(found[x], getattr(given, x)) if x in found else None for x in names))


def _arguments(request: Request, inputs: ChunkInputs) -> Arrays:
    return {name: x for name, x in given_to_kernels(request, inputs).items() if name in GIVEN}


def _states(count: int, r: Request) -> Form:
    return (count, r.HV, *STATE), "float32"


def _run_begin(request: Request, arrays: Any, groups: int) -> Arrays:
    made = forward_launches(request)
    results: dict[str, Form] = {x: _states(made.results, request) for x in ("M", "C")}
    found = make_launches(request, made.begin, arrays, results)
    return found if made.finish is not None else {x: found[x] for x in results}


def _run_finish(request: Request, arrays: Any, groups: int) -> Arrays:
    r, made = request, forward_launches(request)
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    if r.output_final_state:
        results["final_state"] = _states(r.N, r)
    if r.checkpoint_every:
        results["checkpoints"] = (r.checkpoint_shape, r.state_dtype)
    if made.finish is None:
        raise ValueError("the results of this slice come from a whole call")
    written, in_place = _written(arrays, "saved")
    found = make_launches(r, made.finish, arrays, results | written, in_place)
    return {x: found[x] for x in results}


def _run_backward_begin(request: Request, arrays: Any, groups: int) -> Arrays:
    made = _backward(request, groups)
    return make_launches(request, made.begin, arrays, {"d_slice_start": _states(made.results, request)})


def _run_backward_finish(request: Request, arrays: Any, groups: int) -> Arrays:
    """Two calls of the handler, so that the operands' memory can become gradients."""
    r, made = request, _backward(request, groups)
    inputs = {name: arrays[name] for name in GIVEN if name in arrays} | {"d_o": arrays["d_o"]}
    used = inputs | {x: arrays[x] for x in ("starts", "ends", "operands", "borders", "both")}
    written, in_place = _written(arrays, "borders", "both")
    results = {"d_starts": _states(r.N, r), **written}
    before = make_launches(r, made.scan, used, results, in_place)
    given = inputs | {"both": before["both, written"]}
    gradients = gradients_behind_scan(r, made.gradients, given, groups)
    return gradients | {"initial_state": before["d_starts"]}


def _backward(r: Request, groups: int) -> BackwardSliceLaunches:
    return backward_launches(r, wanted_of(r), sums_to_caller=groups > 1)


def _written(arrays: Arrays, *names: str) -> tuple[dict[str, Form], dict[str, str]]:
    """Results in the place of buffers that launches write, and whose memory each is."""
    return (
        {f"{x}, written": form_of(arrays[x]) for x in names},
        {f"{x}, written": x for x in names},
    )
