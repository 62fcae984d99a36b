"""Entry points of the ``pallas`` backend: jit keyed on the request, heads per step, memory limits,
interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kdacore.types import InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.tpu import chunk_backward as chunk_backward_pass
from kdacore_pallas.tpu import chunk_forward as chunk_forward_pass
from kdacore_pallas.tpu import partitioning, recurrent, vmem
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.verifiers import interpreted
from kdacore_pallas.xla import chunk_backward as xla_backward
from kdacore_pallas.xla import recurrent as xla_recurrent
from kdacore_pallas.xla import state_pool

Array = Any


def launch(request: Request, need: int) -> Launch:
    """Compiled on a TPU, interpreted elsewhere."""
    if request.device.type != "tpu":
        return Launch(interpret=interpreted())
    return Launch(vmem_bytes=vmem.limit(need, request.device.arch))


def chunk_launch(request: Request, kernel: str, keep_starts: bool = False) -> tuple[int, Launch]:
    """q/k heads of a grid step of the ``forward`` or the ``backward`` kernel, and how to run it."""
    hb = vmem.heads_per_step(request)
    together = vmem.heads_together(request, kernel, hb, keep_starts)
    need = vmem.chunk_bytes(request, kernel, hb, keep_starts, together)
    return hb, replace(launch(request, need), together=together)


def _run(fn: Callable[..., Any], request: Request, inputs: Any, *more: Any) -> Any:
    # The dtype of g decides a block's size; nothing else of the tensors matters to compilation.
    tensors = tuple((n, s) for n, s in request.tensors if n in ("g", "initial_state"))
    inputs = inputs._replace(cu_seqlens_cpu=None)
    return compiled_program(fn, replace(request, tensors=tensors, traced=False))(inputs, *more)


def _forward(request: Request, inputs: Any, keep_starts: bool = False) -> Outputs:
    kernel = partial(_kernel_forward, keep_starts=keep_starts)
    if state_pool.uses_pool(request, inputs):
        return state_pool.around(kernel, request, inputs)
    return kernel(request, inputs)


def _backward_fits(request: Request) -> bool:
    """Whether the backward kernel fits in VMEM. If it does, so does a forward that keeps the chunks' start states."""
    need = vmem.chunk_backward_bytes(request, vmem.heads_per_step(request))
    return need <= vmem.VMEM.get(request.device.arch, need)


def _keeps_starts(request: Request) -> bool:
    """Whether the forward keeps the chunks' start states: asked for, and for a backward kernel that reads them."""
    return request.needs_grad and request.disable_recompute and _backward_fits(request)


def _kernel_forward(request: Request, inputs: Any, keep_starts: bool) -> Outputs:
    hb, how = chunk_launch(request, "forward", keep_starts)
    return chunk_forward_pass.forward(request, inputs, hb, how, keep_starts)


def _backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    if not _backward_fits(request):
        return xla_backward.backward(request, inputs, (), grads)
    return chunk_backward_pass.backward(request, inputs, saved, grads, *chunk_launch(request, "backward"))


def _split_forward(request: Request, inputs: Any) -> Outputs:
    keep_starts = _keeps_starts(request)  # of the whole call: each of its parts does the same
    run = partial(_forward, keep_starts=keep_starts)
    return partitioning.split_forward(run, request, inputs, keep_starts)


def _split_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    return partitioning.split_backward(_backward, request, inputs, saved, grads)


def _split_recurrent(request: Request, inputs: Any) -> Outputs:
    return partitioning.split_forward(_recurrent, request, inputs)


def _recurrent(request: Request, inputs: Any) -> Outputs:
    return recurrent.forward(request, inputs, launch(request, vmem.recurrent_bytes(request)))


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    """``chunk_kda`` and ``chunk_gated_delta_rule`` by the forward kernel. ``saved`` holds the state that each chunk
    starts from if the call may be differentiated and has ``disable_recompute``, else nothing."""
    out: Outputs = _run(_split_forward, request, inputs)
    return out


def chunk_backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of the chunked ops, by the backward kernel or, where it needs too much VMEM, in
    plain JAX."""
    out: InputGrads = _run(_split_backward, request, inputs, saved, grads)
    return out


def recurrent_forward(request: Request, inputs: Any) -> Outputs:
    """``fused_recurrent_kda`` and its GDN form by the recurrent kernel."""
    out: Outputs = _run(_split_recurrent, request, inputs)
    return out


def recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Runs in plain JAX: recurrent calls that are differentiated are short."""
    out: InputGrads = _run(xla_recurrent.backward, request, inputs, (), grads)
    return out
