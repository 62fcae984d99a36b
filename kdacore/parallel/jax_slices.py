"""The functions of a slice (:class:`kdacore.types.SliceFunctions`), composed of calls of a backend's ``forward`` and
``backward`` on JAX arrays.

The map of a slice comes from one forward: columns of values do not mix, so the values ``[v | 0]`` from the state
``[0 | I]`` end in ``[C | M]``. Where the backend cannot serve ``V + K`` columns, two calls give one each.

Both backward functions call ``backward``. Of the first only the gradient of the initial state is used; XLA removes
what else that takes where the backend is plain JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kdacore.parallel.jax_layout import pack_of_one
from kdacore.types import (
    ChunkInputs,
    Forward,
    InputGrads,
    OpImpl,
    OutputGrads,
    Outputs,
    Request,
    SliceForward,
    SliceFunctions,
    TensorSpec,
)

Array = Any


def started(request: Request, N: int | None = None) -> Request:
    """``request`` with an initial state, of ``N`` sequences if it is another number than its own."""
    shape = (request.N if N is None else N, *request.state_shape[1:])
    features = request.features | {"initial_state"}
    request = dataclasses.replace(request, N=shape[0], features=features)
    return with_specs(request, initial_state=TensorSpec(shape, request.state_dtype))


def whole_request(request: Request) -> Request:
    """The slice's call with starts, and with final states: where no caller has gradients for them, other ranks have."""
    features = request.features | {"final_state"}
    return started(dataclasses.replace(request, output_final_state=True, features=features))


def with_specs(request: Request, **specs: TensorSpec) -> Request:
    """``request`` with these arrays beside its own, or in place of those of the same names."""
    return dataclasses.replace(request, tensors=tuple((dict(request.tensors) | specs).items()))


def map_request(request: Request, V: int) -> Request:
    """The call for a map, with ``V`` columns of values: of a pack, two sequences, the second of them the part."""
    request = dataclasses.replace(
        request,
        V=V,
        needs_grad=False,
        output_final_state=True,
        checkpoint_every=0,
        disable_recompute=False,
        features=(request.features | {"final_state"}) - {"checkpoints"},
    )
    v = request.spec("v")
    specs = {"v": TensorSpec((*v.shape[:-1], V), v.dtype)}
    if request.packed:
        specs["cu_seqlens"] = TensorSpec((3,), "int32")
    return started(with_specs(request, **specs), 2 if request.packed else None)


def composed(request: Request, impl: OpImpl, serves: Callable[[Request], bool]) -> SliceFunctions:
    """The functions of a slice from those of a whole call.

    Args:
        request: the slice's own call.
        impl: the backend's op, with a backward.
        serves: whether the backend can serve a request.
    """
    forward, backward = impl.forward, impl.backward
    wide = serves(map_request(request, request.K + request.V))

    def begin(request: Request, inputs: ChunkInputs, leaving: Array | None) -> SliceForward:
        part = inputs._replace(cu_seqlens_cpu=None)
        if leaving is not None:
            part = part._replace(cu_seqlens=pack_of_one(inputs.cu_seqlens, leaving))
        if wide:
            joint = _end(request, part, forward, columns_of_v=True, columns_of_one=True)
            return SliceForward(joint[..., request.V :], joint[..., : request.V])
        M = _end(request, part, forward, columns_of_v=False, columns_of_one=True)
        return SliceForward(M, _end(request, part, forward, columns_of_v=True, columns_of_one=False))

    def finish(request: Request, inputs: ChunkInputs, pending: Any, starts: Array) -> Outputs:
        out: Outputs = forward(whole_request(request), inputs._replace(initial_state=starts))
        return out if request.output_final_state else out._replace(final_state=None)

    def whole_backward(
        request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], do: Array, starts: Array, ends: Any
    ) -> InputGrads:
        ends = jnp.zeros_like(starts) if ends is None else ends
        inputs = inputs._replace(initial_state=starts)
        grads: InputGrads = backward(  # type: ignore[misc]
            whole_request(request), inputs, saved, OutputGrads(do, ends)
        )
        return grads

    def backward_begin(
        request: Request,
        inputs: ChunkInputs,
        saved: tuple[Array, ...],
        grads: OutputGrads,
        starts: Array,
        entering: Array | None,
    ) -> tuple[Array, None]:
        d = whole_backward(request, inputs, saved, grads.o, starts, grads.final_state).initial_state
        return (d if entering is None else d[entering]), None  # type: ignore[index]

    def backward_finish(
        request: Request,
        inputs: ChunkInputs,
        saved: tuple[Array, ...],
        pending: Any,
        grads: OutputGrads,
        starts: Array,
        ends: Array,
    ) -> InputGrads:
        return whole_backward(request, inputs, saved, grads.o, starts, ends)

    return SliceFunctions(begin, finish, backward_begin, backward_finish)


def _end(
    request: Request, part: ChunkInputs, forward: Forward, columns_of_v: bool, columns_of_one: bool
) -> Array:
    """What each part ends in: from zero by the values, from the identity by values of zero, or both side by side."""
    K, V = request.K, request.V
    widths = (V * columns_of_v, K * columns_of_one)
    call = map_request(request, sum(widths))
    v, one = part.v[..., : widths[0]], jnp.eye(K, widths[1], dtype=request.state_dtype)
    v = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], widths[1]), v.dtype)], -1)
    one = jnp.concatenate([jnp.zeros((K, widths[0]), one.dtype), one], -1)
    start = jnp.broadcast_to(one, call.state_shape)
    end: Array = forward(call, part._replace(v=v, initial_state=start)).final_state
    return end if part.cu_seqlens is None else end[1:]
