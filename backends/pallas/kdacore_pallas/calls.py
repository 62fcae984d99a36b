"""Entry points of the ``xla`` backend: conversion, jit keyed on the request, and the functions that do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.types import GateGrads, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas import convert
from kdacore_pallas.compiled import compiled
from kdacore_pallas.xla import chunk, gate, recurrent, stages
from kdacore_pallas.xla import chunk_backward as chunk_reverse

Array = Any


def _traced_request(request: Request) -> Request:
    """The request as compilation should see it: what only dispatch reads must not cause another compilation."""
    return replace(request, kind="jax", tensors=(), traced=False)


def _run(fn: Callable[..., Any], request: Request, inputs: Any, *more: Any) -> Any:
    """Call ``fn`` compiled for this request; what it reads from the host only is dropped."""
    if "cu_seqlens_cpu" in type(inputs)._fields:
        inputs = inputs._replace(cu_seqlens_cpu=None)
    if isinstance(inputs, RecurrentInputs):
        inputs = inputs._replace(out=None)
    arrays = convert.enter(request, inputs)
    return compiled(fn, _traced_request(request))(arrays, *more)


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    result: Outputs = convert.leave(request, _run(chunk.forward, request, inputs))
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
