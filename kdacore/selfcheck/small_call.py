"""The small call of a request with its inputs, and its results beside the oracle's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kdacore.arrays import adapter_of
from kdacore.calls.arrays import host_values
from kdacore.calls.description import CallDescription
from kdacore.calls.small_call import call_of_request
from kdacore.calls.values import to_kind
from kdacore.ops import OPS
from kdacore.selfcheck.bounds import Quantity
from kdacore.types import OutputGrads, Request


class Pair(NamedTuple):
    """A result and its expected value, both NumPy."""

    quantity: Quantity
    dtype: str
    """that the result must have"""
    got: Any
    want: Any
    misfit: str = ""
    """What is wrong with the result before any value is looked at; then there are none here."""


_HOLD_NOTHING = (
    "initial_state",
    "write_pool",
    "record_update",
    "record_key",
    "record_decay",
    "conv_state",
    "conv_windows",
)
"""Arrays with rows that no sequence reads."""
WIDE = {"float64": "float64"}
"""dtype of a log decay by that of its input; float32 for all others."""


def small_call(request: Request, tokens: int, seed: int = 0) -> tuple[Request, Any]:
    """A short call that exercises what ``request`` exercises.

    Args:
        request: the call to shrink.
        tokens: tokens of each sequence; a ``fused_recurrent`` call keeps its own count when that is smaller.

    Returns:
        The small request and its arrays, of the request's kind and on its device.
    """
    call = call_of_request(request, tokens, seed)
    values = host_values(call)
    if call.pool:  # the whole pool is compared, so the rows that no sequence names are numbers too
        for name in _HOLD_NOTHING:
            if name in values:
                values[name] = np.nan_to_num(values[name])
    # By the request's own dtypes: it may have one for each of its indices.
    arrays = {name: _convert(request, name, x) for name, x in values.items()}
    specs = tuple(
        (n, dataclasses.replace(s, shape=tuple(arrays[n].shape))) for n, s in request.tensors if n in arrays
    )
    small = dataclasses.replace(_sized(request, call), tensors=specs)
    return small, OPS[request.op].inputs(**arrays)


def identity(request: Request, tokens: int) -> str:
    """Equal for two requests only if :func:`small_call` makes the same call of both. Makes no array."""
    small = _sized(request, call_of_request(request, tokens))
    # The small shapes follow from the sizes and the options, so the dtypes are what is left to tell apart.
    specs = tuple((n, dataclasses.replace(s, shape=())) for n, s in request.tensors)
    return repr(dataclasses.replace(small, tensors=specs))


def _sized(request: Request, call: CallDescription) -> Request:
    """The request with the sizes of its small call, its tensors as they were."""
    shape = call.shape
    return dataclasses.replace(
        request,
        B=shape.B,
        T=shape.T,
        H=shape.H,
        HV=shape.HV,
        N=shape.N,
        pool_size=call.state_rows if request.pool_size else 0,
        null_index=min(request.null_index, 0),
        write_pool_size=call.write_rows if request.write_pool_size else 0,
        checkpoint_count=call.checkpoints if request.checkpoint_count else 0,
        traced=False,
    )


def _convert(request: Request, name: str, x: Any) -> Any:
    device = "cuda" if request.device.type == "rocm" else request.device.type
    return to_kind(x, request.kind, request.spec(name).dtype, device)


def forward_pairs(request: Request, inputs: Any, result: Any) -> list[Pair]:
    """Each result of the call and its expected value."""
    from kdacore.oracle import commit, decode, gate, recurrence

    if request.op == "kda_gate":
        want = gate.oracle_gate(request, inputs)
        return _pair(request, "log decay", "o", WIDE.get(request.dtype, "float32"), result, want)
    before = _copy_pool(request, inputs)
    if OPS[request.op].family == "commit":
        committed = commit.oracle_commit(request, before)
        pairs = _pair(request, "pool", "state", request.state_dtype, result.pool, committed.pool)
        if committed.conv_state is None:
            return pairs
        dtype = request.spec("conv_state").dtype
        return pairs + _pair(request, "conv_state", "state", dtype, result.conv_state, committed.conv_state)
    oracle = decode.oracle_decode if OPS[request.op].family == "decode" else recurrence.oracle_forward
    expected = oracle(request, before)
    final = expected.final_state if request.output_final_state else None
    pairs = _pair(request, "o", "o", request.dtype, result.o, expected.o)
    pairs += _pair(request, "final_state", "state", request.state_dtype, result.final_state, final)
    pairs += _pair(
        request, "checkpoints", "state", request.state_dtype, result.checkpoints, expected.checkpoints
    )
    if request.inplace_state and not request.output_final_state:  # the pool was written where it lay
        name = request.written_pool
        pool = getattr(inputs, name)
        pairs += _pair(request, name, "state", request.state_dtype, pool, expected.final_state)
    return pairs + _beside(request, inputs, result, expected)


def _beside(request: Request, inputs: Any, result: Any, expected: Any) -> list[Pair]:
    """What a call writes beside ``out`` and its pool: the arrays themselves, or of JAX the new ones."""
    given = [name for name, _ in request.tensors]
    written = OPS[request.op].written_of(given, request.inplace_state)
    names = [name for name in written if name not in ("out", request.written_pool)]
    got = result.written if request.kind == "jax" else [getattr(inputs, name) for name in names]
    pairs: list[Pair] = []
    for name, x, want in zip(names, got, expected.written, strict=True):
        pairs += _pair(request, name, "state", request.spec(name).dtype, x, want)
    return pairs


def _pair(
    request: Request, name: str, quantity: Quantity, dtype: str, got: Any, want: Any | None
) -> list[Pair]:
    """One result and its oracle's, either may be None; neither makes no pair."""
    from kdacore.oracle.host_values import to_float64

    if got is None and want is None:
        return []
    misfit = _misfit(request, name, dtype, got, want is not None)
    if misfit:
        return [Pair(quantity, dtype, None, None, misfit)]
    return [Pair(quantity, dtype, to_float64(got), want)]


def _misfit(request: Request, name: str, dtype: str, got: Any, asked: bool) -> str:
    """How a result is not what the call asks for, whatever its values; empty when it is."""
    if not asked:
        return f"{name}, which was not asked for"
    if got is None:
        return f"no {name}"
    adapter = adapter_of(got)
    if adapter is None or adapter.kind != request.kind:
        return f"{name} as {type(got).__module__}.{type(got).__name__}, not as a {request.kind} array"
    found = adapter.spec(got).dtype
    return "" if found == dtype else f"{name} in {found}, not in {dtype}"


def _copy_pool(request: Request, inputs: Any) -> Any:
    """An in-place call has overwritten its pool; regenerate the inputs as they were."""
    return small_call(request, request.T)[1] if request.inplace_state else inputs


def backward_pairs(request: Request, inputs: Any, backward: Callable[..., Any]) -> list[Pair]:
    """The gradients beside the oracle's."""
    from kdacore.oracle import gate, recurrence
    from kdacore.oracle.host_values import to_float64

    rng = np.random.default_rng(7)
    if request.op == "kda_gate":
        dlog = rng.standard_normal(request.spec("g").shape)
        device = request.device.type
        got: Any = backward(request, inputs, to_kind(dlog, request.kind, "float32", device))
        want: Any = gate.oracle_gate_backward(request, inputs, dlog)
    else:
        do = rng.standard_normal((request.B, request.T, request.HV, request.V))
        given = _convert_as(request, do, "v")
        got = backward(request, inputs, (), OutputGrads(given, None))
        want = recurrence.oracle_backward(request, inputs, OutputGrads(to_float64(given), None))
    pairs: list[Pair] = []
    for name, a, b in zip(want._fields, got, want, strict=True):
        dtype = request.spec(name).dtype if request.has(name) else ""
        pairs += _pair(request, f"gradient of {name}", "gradient", dtype, a, b)
    return pairs


def _convert_as(request: Request, x: Any, name: str) -> Any:
    return _convert(request, name, x)
