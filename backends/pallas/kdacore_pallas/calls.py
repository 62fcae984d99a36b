"""Entry points of the ``xla`` backend: conversion, jit keyed on the request, and the functions that do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.types import GateGrads, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas import convert, shares
from kdacore_pallas.compiled import compiled
from kdacore_pallas.xla import chunk, chunk_gpu, gate, recurrent, stages
from kdacore_pallas.xla import chunk_backward as chunk_reverse

Array = Any


def _traced_request(request: Request) -> Request:
    """The request as compilation should see it: what only dispatch reads must not cause another compilation."""
    return replace(request, kind="jax", tensors=(), traced=False)


def _run(fn: Callable[..., Any], request: Request, inputs: Any, *more: Any) -> Any:
    """Call ``fn`` compiled for this request; what it reads from the host only is dropped."""
    return compiled(fn, _traced_request(request))(_enter(request, inputs), *more)


def _enter(request: Request, inputs: Any) -> Any:
    """JAX arrays of what the device reads."""
    if "cu_seqlens_cpu" in type(inputs)._fields:
        inputs = inputs._replace(cu_seqlens_cpu=None)
    if isinstance(inputs, RecurrentInputs):
        inputs = inputs._replace(out=None)
    return convert.enter(request, inputs)


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    arrays, alike = _enter(request, inputs), _traced_request(request)
    parts = shares.count(alike, arrays)
    whole = chunk_gpu.forward if chunk_gpu.serves(request) else chunk.forward
    found = shares.forward(alike, arrays, parts) if parts > 1 else compiled(whole, alike)(arrays)
    result: Outputs = convert.leave(request, found)
    return result


def chunk_backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    more = convert.enter(request, saved), convert.enter(request, grads)
    result: InputGrads = convert.leave(request, _run(chunk_reverse.backward, request, inputs, *more))
    return result


def recurrent_forward(request: Request, inputs: Any) -> Outputs:
    out = convert.leave(request, _run(recurrent.forward, request, inputs))
    return convert.write_back(request, inputs, out)


def recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    d = convert.enter(request, grads)
    result: InputGrads = convert.leave(request, _run(recurrent.backward, request, inputs, (), d))
    return result


def gate_forward(request: Request, inputs: Any) -> Array:
    return convert.leave(request, _run(gate.kda_gate, request, inputs))


def gate_backward(request: Request, inputs: Any, dlog: Array) -> GateGrads:
    d = convert.enter(request, (dlog,))[0]
    result: GateGrads = convert.leave(request, _run(gate.kda_gate_backward, request, inputs, d))
    return result


def chunk_gate(request: Request, inputs: Any) -> Array:
    return convert.leave(request, _run(stages.chunk_gate, request, inputs))


def chunk_intra(request: Request, inputs: Any) -> Any:
    return convert.leave(request, _run(stages.chunk_intra, request, inputs))


def recompute_w_u(request: Request, inputs: Any) -> Any:
    return convert.leave(request, _run(stages.recompute_w_u, request, inputs))


def chunk_state(request: Request, inputs: Any) -> Any:
    return convert.leave(request, _run(stages.chunk_state, request, inputs))


def chunk_output(request: Request, inputs: Any) -> Array:
    return convert.leave(request, _run(stages.chunk_output, request, inputs))
