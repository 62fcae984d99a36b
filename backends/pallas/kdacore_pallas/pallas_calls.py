"""Entry points of the ``pallas`` backend: jit keyed on the request, heads per step, memory limits, interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.types import InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas.compiled import compiled
from kdacore_pallas.kernels import chunk, memory, recurrent
from kdacore_pallas.kernels.forward import Launch
from kdacore_pallas.pallas_checks import interpreted
from kdacore_pallas.xla import chunk_backward as xla_backward
from kdacore_pallas.xla import recurrent as xla_recurrent

Array = Any


def launch(request: Request, need: int) -> Launch:
    """Compiled on a TPU, interpreted elsewhere."""
    if request.device.type != "tpu":
        return Launch(interpret=interpreted())
    return Launch(vmem_bytes=memory.limit(need, request.device.arch))


def _run(fn: Callable[..., Any], request: Request, inputs: Any, *more: Any) -> Any:
    # The dtype of g decides a block's size; nothing else of the tensors matters to compilation.
    tensors = tuple((n, s) for n, s in request.tensors if n in ("g", "initial_state"))
    inputs = inputs._replace(cu_seqlens_cpu=None)
    if isinstance(inputs, RecurrentInputs):
        inputs = inputs._replace(out=None)
    return compiled(fn, replace(request, tensors=tensors, traced=False))(inputs, *more)


def _forward(request: Request, inputs: Any) -> Outputs:
    hb = memory.best_heads(request)
    return chunk.forward(request, inputs, hb, launch(request, memory.forward_bytes(request, hb)))


def _backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    hb = memory.best_heads(request)
    need = memory.backward_bytes(request, hb)
    if need > memory.VMEM.get(request.device.arch, need):
        return xla_backward.backward(request, inputs, (), grads)
    return chunk.backward(request, inputs, saved, grads, hb, launch(request, need))


def _decode(request: Request, inputs: Any) -> Outputs:
    return recurrent.forward(request, inputs, launch(request, memory.decode_bytes(request)))


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    out: Outputs = _run(_forward, request, inputs)
    return out


def chunk_backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    out: InputGrads = _run(_backward, request, inputs, saved, grads)
    return out


def recurrent_forward(request: Request, inputs: Any) -> Outputs:
    out: Outputs = _run(_decode, request, inputs)
    return out


def recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """In plain JAX: decode calls that are differentiated are short."""
    out: InputGrads = _run(xla_recurrent.backward, request, inputs, (), grads)
    return out
