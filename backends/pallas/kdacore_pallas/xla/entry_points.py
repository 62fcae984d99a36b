"""Entry points of the ``xla`` backend: each converts the arrays and runs a program compiled for the
request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.types import GateGrads, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.xla import chunk_backward as chunk_backward_pass
from kdacore_pallas.xla import chunk_forward as chunk_forward_pass
from kdacore_pallas.xla import (
    chunk_forward_gpu,
    chunk_forward_threads,
    gate,
    host_arrays,
    recurrent,
    stages,
)

Array = Any


def _traced_request(request: Request) -> Request:
    """The request without the fields that only dispatch reads, which must not cause another
    compilation."""
    return replace(request, kind="jax", tensors=(), traced=False)


def _run(fn: Callable[..., Any], request: Request, inputs: Any, *more: Any) -> Any:
    """Call ``fn``, compiled for this request, with JAX arrays."""
    return compiled_program(fn, _traced_request(request))(_to_jax(request, inputs), *more)


def _to_jax(request: Request, inputs: Any) -> Any:
    """Convert the inputs, without those that are read or written on the host only."""
    if "cu_seqlens_cpu" in type(inputs)._fields:
        inputs = inputs._replace(cu_seqlens_cpu=None)
    if isinstance(inputs, RecurrentInputs):
        inputs = inputs._replace(out=None)
    return host_arrays.to_jax(request, inputs)


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    """``chunk_kda`` and ``chunk_gated_delta_rule``: by threads, by the GPU program, or by one
    program."""
    arrays, key = _to_jax(request, inputs), _traced_request(request)
    threads = chunk_forward_threads.thread_count(key, arrays)
    if threads > 1:
        found = chunk_forward_threads.forward(key, arrays, threads)
    else:
        on_gpu = chunk_forward_gpu.serves(request)
        found = compiled_program((chunk_forward_gpu if on_gpu else chunk_forward_pass).forward, key)(arrays)
    result: Outputs = host_arrays.from_jax(request, found)
    return result


def chunk_backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of the chunked ops."""
    more = host_arrays.to_jax(request, saved), host_arrays.to_jax(request, grads)
    result: InputGrads = host_arrays.from_jax(
        request, _run(chunk_backward_pass.backward, request, inputs, *more)
    )
    return result


def recurrent_forward(request: Request, inputs: Any) -> Outputs:
    """``fused_recurrent_kda`` and its GDN form."""
    out = host_arrays.from_jax(request, _run(recurrent.forward, request, inputs))
    return host_arrays.write_back(request, inputs, out)


def recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of the recurrent ops."""
    d = host_arrays.to_jax(request, grads)
    result: InputGrads = host_arrays.from_jax(request, _run(recurrent.backward, request, inputs, (), d))
    return result


def gate_forward(request: Request, inputs: Any) -> Array:
    """``kda_gate``."""
    return host_arrays.from_jax(request, _run(gate.kda_gate, request, inputs))


def gate_backward(request: Request, inputs: Any, dlog: Array) -> GateGrads:
    """Gradients of ``kda_gate``."""
    d = host_arrays.to_jax(request, (dlog,))[0]
    result: GateGrads = host_arrays.from_jax(request, _run(gate.kda_gate_backward, request, inputs, d))
    return result


def chunk_gate(request: Request, inputs: Any) -> Array:
    """``kda_chunk_gate``."""
    return host_arrays.from_jax(request, _run(stages.chunk_gate, request, inputs))


def chunk_intra(request: Request, inputs: Any) -> Any:
    """``kda_chunk_intra``."""
    return host_arrays.from_jax(request, _run(stages.chunk_intra, request, inputs))


def recompute_w_u(request: Request, inputs: Any) -> Any:
    """``kda_recompute_w_u``."""
    return host_arrays.from_jax(request, _run(stages.recompute_w_u, request, inputs))


def chunk_state(request: Request, inputs: Any) -> Any:
    """``delta_rule_chunk_state``."""
    return host_arrays.from_jax(request, _run(stages.chunk_state, request, inputs))


def chunk_output(request: Request, inputs: Any) -> Array:
    """``kda_chunk_output``."""
    return host_arrays.from_jax(request, _run(stages.chunk_output, request, inputs))
