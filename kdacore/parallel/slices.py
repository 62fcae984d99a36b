"""The functions of a slice for backends that offer none: composed of calls of their ``forward`` and ``backward``.

The map of a slice comes from two calls over its leaving part: C is the final state from zeros; M is the final state
from the identity with values of zero, which has K columns. So a slice costs three forwards, and two backwards: the
first, from a gradient of zero beyond the slice, finds what goes to the rank before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from array_api_compat import array_namespace, device

from kdacore import plugin_faults
from kdacore.dispatch import results, selection
from kdacore.errors import UnsupportedError
from kdacore.parallel import checked_slices
from kdacore.registry import REGISTRY
from kdacore.types import (
    Array,
    Backward,
    InputGrads,
    OutputGrads,
    Outputs,
    Request,
    SliceForward,
    SliceFunctions,
    TensorSpec,
)


def slice_functions(backend: str, request: Request, *, asked_only: bool = False) -> SliceFunctions:
    """The functions that serve a slice: the backend's own, or composed ones.

    Args:
        backend: can serve ``request``.
        request: the slice's own call, as :class:`kdacore.types.SliceFunctions` describes it.
        asked_only: nothing will run: hardware need not be here, and nothing is self-checked.

    Raises:
        UnsupportedError: the backend has no functions for a slice, and cannot serve the calls they are composed of.
    """
    own = _offered(backend, request)
    if own is None:
        return composed(backend, request, asked_only=asked_only)
    return checked_slices.checked(backend, request, own)


def is_composed(backend: str, request: Request) -> bool:
    """Would the functions of :func:`slice_functions` be composed ones?"""
    return _offered(backend, request) is None


def _offered(backend: str, request: Request) -> SliceFunctions | None:
    """The backend's own functions. Composed ones give the same, so what is wrong with the offer is reported and ends no
    call, not even where it is wrong on one rank alone."""
    make = REGISTRY.get(backend).backend.ops[request.op].slices
    if make is None:
        return None
    where, what = f"backend {backend}", f"slices of {request.op}"
    offered, error = plugin_faults.attempt(make, request)
    if error is not None:
        plugin_faults.report(where, what, error)
        return None
    problem = None if offered is None else checked_slices.problem_of(offered)
    if problem:
        plugin_faults.complain(where, what, "answer", problem)
        return None
    found: SliceFunctions | None = offered
    return found


def composed(backend: str, request: Request, *, asked_only: bool = False) -> SliceFunctions:
    """Like :func:`slice_functions`, whatever the backend offers itself."""
    forward = results.typed_forward(backend, request.op)
    whole = _with_states(request, request.V, request.packed, request.N)
    # Two sequences of the pack are looked at: what is before the leaving part, and that part.
    count = 2 if request.packed else request.B
    inference = dataclasses.replace(
        request, needs_grad=False, checkpoint_every=0, features=request.features - {"checkpoints"}
    )
    maps = {width: _with_states(inference, width, request.packed, count) for width in (request.V, request.K)}
    for asked in (whole, *maps.values()):
        _require(backend, asked, asked_only)

    def begin(_: Request, inputs: Any, leaving: Any) -> SliceForward:
        xp, v = array_namespace(inputs.q), inputs.v
        given = inputs._replace(cu_seqlens_cpu=None)
        if request.packed:
            part = _sequence(xp, inputs.cu_seqlens, leaving)
            offsets = xp.concat([xp.zeros_like(part[:1]), part], axis=0)
            given = given._replace(cu_seqlens=offsets)
        found = []
        for width, values, start in (
            (request.V, v, _zeros(xp, request, count, request.V, v)),
            (request.K, xp.zeros((*v.shape[:3], request.K), dtype=v.dtype, device=device(v)), None),
        ):
            if start is None:
                start = _identity(xp, request, count, v)
            asked = maps[width]
            state = forward(asked, given._replace(v=values, initial_state=start)).final_state
            checked_slices.check(backend, asked, "forward", "final_state", state, asked.state_shape)
            found.append(state[1:] if request.packed else state)
        return SliceForward(found[1], found[0])

    def finish(_: Request, inputs: Any, pending: Any, starts: Array) -> Outputs:
        outputs: Outputs = forward(whole, inputs._replace(initial_state=starts))
        return outputs if request.output_final_state else outputs._replace(final_state=None)

    def gradients(inputs: Any, saved: Any, starts: Array, do: Any, dstate: Any) -> InputGrads:
        given = (whole, inputs._replace(initial_state=starts), saved, OutputGrads(do, dstate))
        grads: InputGrads = checked_slices.typed(
            backend, whole, "backward", _backward_of(backend, request.op), given, InputGrads
        )
        return grads

    def backward_begin(
        _: Request, inputs: Any, saved: Any, grads: OutputGrads, starts: Array, entering: Any
    ) -> tuple[Array, Any]:
        # Without either the gradient is zero, and backends need not be asked for it.
        if grads.o is None and grads.final_state is None:
            dstart = array_namespace(starts).zeros_like(starts)
        else:
            dstart = gradients(inputs, saved, starts, *grads).initial_state
        if not request.packed:
            return dstart, None
        return array_namespace(starts).take(dstart, entering, axis=0), None

    def backward_finish(
        _: Request, inputs: Any, saved: Any, pending: Any, grads: OutputGrads, starts: Array, ends: Array
    ) -> InputGrads:
        return gradients(inputs, saved, starts, grads.o, ends)

    return SliceFunctions(begin, finish, backward_begin, backward_finish)


def _backward_of(backend: str, op: str) -> Backward:
    backward = REGISTRY.get(backend).backend.ops[op].backward
    if backward is None:
        raise RuntimeError(f"{backend} was selected for a gradient it cannot compute")
    return backward


def _with_states(request: Request, width: int, packed: bool, count: int) -> Request:
    """The request with ``width`` value channels, ``count`` sequences, and states given and asked for."""
    r, state = request, TensorSpec((count, request.HV, request.K, width), request.state_dtype)
    specs = {**dict(r.tensors), "v": TensorSpec((r.B, r.T, r.HV, width), r.dtype), "initial_state": state}
    if packed:
        specs["cu_seqlens"] = TensorSpec((count + 1,), specs["cu_seqlens"].dtype)
        if count != r.N:
            specs.pop("cu_seqlens_cpu", None)
    return dataclasses.replace(
        r,
        V=width,
        N=count,
        tensors=tuple(specs.items()),
        output_final_state=True,
        features=r.features | {"initial_state", "final_state"},
    )


def _require(backend: str, request: Request, asked_only: bool) -> None:
    """Raise UnsupportedError where a backend cannot serve one of the calls that a slice is composed of."""
    registered = REGISTRY.get(backend)
    candidate = selection.judge(registered, request, assumed=asked_only)
    reasons = candidate.reasons
    if not reasons and not candidate.verified and not asked_only:
        from kdacore.selfcheck import check  # here, as in dispatch

        problem = check.problem(registered, request, run=True)
        reasons = () if problem is None else (problem,)
    if reasons:
        raise UnsupportedError(
            request.op,
            f"cp: backend {backend!r} has no transition of a slice (OpImpl.slices), nor can it serve the call that one "
            f"would be composed of (V={request.V}, with states)",
            {backend: reasons},
        )


def _sequence(xp: Any, offsets: Array, number: Array) -> Array:
    """``[begin, end]`` of one sequence of a pack."""
    return xp.concat([xp.take(offsets, number, axis=0), xp.take(offsets, number + 1, axis=0)], axis=0)


def _zeros(xp: Any, request: Request, count: int, width: int, like: Array) -> Array:
    dtype = getattr(xp, request.state_dtype)
    return xp.zeros((count, request.HV, request.K, width), dtype=dtype, device=device(like))


def _identity(xp: Any, request: Request, count: int, like: Array) -> Array:
    eye = xp.eye(request.K, dtype=getattr(xp, request.state_dtype), device=device(like))
    # With memory of its own: backends need not take states that are broadcast.
    return eye + _zeros(xp, request, count, request.K, like)
