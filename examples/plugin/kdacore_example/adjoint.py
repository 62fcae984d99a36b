"""Gradients of the recurrence: every line of ``scan.states`` and ``scan.forward`` turned around, last token first."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.types import InputGrads, OutputGrads, Request
from kdacore_example.scan import Array, Tokens, layout, read, states


def backward(request: Request, inputs: Any, grads: OutputGrads) -> InputGrads:
    """Gradients of every input; nothing was saved by the forward, the states are computed again."""
    x, start = read(request, inputs)
    history = list(states(x, start))
    do = np.zeros_like(x.v) if grads.o is None else request.scale * np.asarray(grads.o, np.float64)
    dstate = np.zeros_like(start)
    if grads.final_state is not None:
        dstate = dstate + layout(request, np.asarray(grads.final_state, np.float64))
    dx = Tokens(*(np.zeros_like(a) for a in x))
    for t in reversed(range(request.T)):
        dstate = _step(t, x, dx, do[:, t], dstate, *history[t])
    return _as_given(request, inputs, x, dx, dstate)


def _step(t: int, x: Tokens, dx: Tokens, do: Array, dstate: Array, before: Array, after: Array) -> Array:
    """Fills row t of ``dx``; from the gradient of the state after token t to that of the state before."""
    k, beta, decay = x.k[:, t], x.beta[:, t, :, None], x.decay[:, t, :, :, None]
    decayed = decay * before
    error = x.v[:, t] - np.einsum("bhk,bhkv->bhv", k, decayed)

    dx.q[:, t] = np.einsum("bhkv,bhv->bhk", after, do)
    dstate = dstate + np.einsum("bhk,bhv->bhkv", x.q[:, t], do)

    derror_over_beta = np.einsum("bhk,bhkv->bhv", k, dstate)
    dx.beta[:, t] = np.einsum("bhv,bhv->bh", derror_over_beta, error)
    derror = beta * derror_over_beta
    dx.v[:, t] = derror
    dx.k[:, t] = beta * np.einsum("bhkv,bhv->bhk", dstate, error) - np.einsum(
        "bhkv,bhv->bhk", decayed, derror
    )

    ddecayed = dstate - np.einsum("bhk,bhv->bhkv", k, derror)
    dx.decay[:, t] = np.einsum("bhkv,bhkv->bhk", ddecayed, before)
    return decay * ddecayed


def _as_given(request: Request, inputs: Any, x: Tokens, dx: Tokens, dstate: Array) -> InputGrads:
    """Each gradient shaped and typed like its input."""
    B, T, group = request.B, request.T, request.HV // request.H

    def shared(d: Array) -> Array:
        return d.reshape(B, T, request.H, group, request.K).sum(3)

    state = inputs.initial_state
    return InputGrads(
        q=shared(dx.q).astype(inputs.q.dtype),
        k=shared(dx.k).astype(inputs.k.dtype),
        v=dx.v.astype(inputs.v.dtype),
        g=(dx.decay * x.decay).astype(inputs.g.dtype),
        beta=dx.beta.astype(inputs.beta.dtype),
        initial_state=None if state is None else layout(request, dstate).astype(state.dtype),
    )
