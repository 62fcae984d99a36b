"""Entry points of the ``xla`` backend: each converts the arrays and runs a program compiled for the
request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.types import CommitInputs, CommitOutputs, GateGrads, InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.xla import (
    chunk_forward_gpu,
    chunk_forward_threads,
    decode,
    gate,
    host_arrays,
    host_decode_pools,
    host_pools,
    partitioning,
    parts,
    recurrent,
    stages,
    state_pool,
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
    for name in ("cu_seqlens_cpu", "out"):
        if name in type(inputs)._fields:
            inputs = inputs._replace(**{name: None})
    return host_arrays.to_jax(request, inputs)


def chunk_forward(request: Request, inputs: Any) -> Outputs:
    """``chunk_kda`` and ``chunk_gated_delta_rule``."""
    if request.kind != "jax":
        call = host_pools.on_host(request, inputs)
        found = _resolved_forward(_traced_request(call.request), _to_jax(request, call.inputs))
        return host_pools.write_back(request, inputs, call.written, host_arrays.from_jax(request, found))
    arrays, key = _to_jax(request, inputs), _traced_request(request)
    if not state_pool.uses_pool(request, arrays):
        return _resolved_forward(key, arrays)
    if chunk_forward_threads.thread_count(key, arrays) == 1:
        out: Outputs = compiled_program(_forward_around_pool, key)(arrays)
        return out
    resolved = compiled_program(state_pool.resolve, key)(state_pool.pool_arguments(arrays))
    out = _resolved_forward(state_pool.without_pool(key), state_pool.resolved_inputs(arrays, resolved))
    if resolved.written is None:
        return out
    pool = state_pool.written_pool(arrays)
    stored = compiled_program(_store, key)(pool, resolved.written, out.final_state)
    return out._replace(final_state=stored)


def _resolved_forward(key: Request, arrays: Any) -> Outputs:
    """A chunked call without pools, or whose pool arguments have been resolved: by threads, by the GPU
    program, or by one program."""
    threads = chunk_forward_threads.thread_count(key, arrays)
    if threads > 1:
        return chunk_forward_threads.forward(key, arrays, threads)
    out: Outputs = compiled_program(_one_program, key)(arrays)
    return out


def _one_program(request: Request, inputs: Any) -> Outputs:
    forward = chunk_forward_gpu.forward if chunk_forward_gpu.serves(request) else parts.forward
    return partitioning.split_forward(forward, request, inputs)


def _forward_around_pool(request: Request, inputs: Any) -> Outputs:
    return state_pool.around(_one_program, request, inputs)


def _backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    return partitioning.split_backward(parts.backward, request, inputs, saved, grads)


def _recurrent_forward(request: Request, inputs: Any) -> Outputs:
    return partitioning.split_forward(recurrent.forward, request, inputs)


def _recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    return partitioning.split_backward(recurrent.backward, request, inputs, saved, grads)


def _store(request: Request, pool: Array, rows: Array, states: Array) -> Array:
    return state_pool.store(pool, rows, states)


def chunk_backward(request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of the chunked ops."""
    more = host_arrays.to_jax(request, saved), host_arrays.to_jax(request, grads)
    result: InputGrads = host_arrays.from_jax(request, _run(_backward, request, inputs, *more))
    return result


def recurrent_forward(request: Request, inputs: Any) -> Outputs:
    """``fused_recurrent_kda`` and its GDN form."""
    if request.kind == "jax":
        return _run(_recurrent_forward, request, inputs)  # type: ignore[no-any-return]
    return _on_host_rows(recurrent.forward_rows, request, inputs)


def decode_forward(request: Request, inputs: Any) -> Outputs:
    """``fused_decode_kda`` and ``fused_decode_gated_delta_rule``."""
    if request.kind == "jax":
        return _run(decode.forward, request, inputs)  # type: ignore[no-any-return]
    return _on_host_rows(decode.forward_rows, request, inputs)


def _on_host_rows(forward: Callable[..., Outputs], request: Request, inputs: Any) -> Outputs:
    """A call of a NumPy or torch caller, on copies of the rows of its pools."""
    call = host_decode_pools.on_host(request, inputs)
    rows = host_arrays.to_jax(request, call.rows)
    out = host_arrays.from_jax(request, _run(forward, call.request, call.inputs, rows))
    return host_decode_pools.write_back(inputs, request, call.given, out)


def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """``commit_records``."""
    if request.kind == "jax":
        return _run(decode.commit, request, inputs)  # type: ignore[no-any-return]
    call = host_decode_pools.on_host(request, inputs)
    rows = host_arrays.to_jax(request, call.rows)
    out = host_arrays.from_jax(request, _run(decode.commit_rows, call.request, call.inputs, rows))
    return host_decode_pools.write_back_commit(inputs, call.given, out)


def recurrent_backward(
    request: Request, inputs: Any, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of the recurrent ops."""
    d = host_arrays.to_jax(request, grads)
    result: InputGrads = host_arrays.from_jax(request, _run(_recurrent_backward, request, inputs, (), d))
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
