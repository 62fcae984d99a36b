"""The recurrence, one token at a time, for all sequences and heads at once.

Each step works on arrays whose shape does not depend on the number of tokens, so later tokens cannot change
a bit of earlier results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kdacore.types import Outputs, Request

Array = np.ndarray[Any, Any]


class Tokens(NamedTuple):
    """The inputs in float64, q and k repeated for every value head: ``[B, T, HV, ...]``."""

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array


def read(request: Request, inputs: Any) -> tuple[Tokens, Array]:
    """The tokens, and the states they start from as ``[N, HV, K, V]``."""
    group = request.HV // request.H
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs[:5])
    tokens = Tokens(np.repeat(q, group, 2), np.repeat(k, group, 2), v, np.exp(g), beta)
    if inputs.initial_state is None:
        return tokens, np.zeros((request.N, request.HV, request.K, request.V))
    return tokens, layout(request, np.asarray(inputs.initial_state, np.float64))


def layout(request: Request, state: Array) -> Array:
    """From the caller's layout of states to ``[N, HV, K, V]``, or back."""
    return state.swapaxes(-1, -2) if request.state_v_first else state


def states(x: Tokens, start: Array) -> Iterator[tuple[Array, Array]]:
    """The state before and after each token."""
    before = start
    for t in range(x.q.shape[1]):
        decayed = x.decay[:, t, :, :, None] * before
        error = x.v[:, t] - np.einsum("bhk,bhkv->bhv", x.k[:, t], decayed)
        after = decayed + np.einsum("bh,bhk,bhv->bhkv", x.beta[:, t], x.k[:, t], error)
        yield before, after
        before = after


def forward(request: Request, inputs: Any) -> Outputs:
    """``chunk_kda`` and ``fused_recurrent_kda``: here one and the same."""
    x, start = read(request, inputs)
    o = np.empty(x.v.shape, inputs.v.dtype) if getattr(inputs, "out", None) is None else inputs.out
    last = start
    for t, (_, last) in enumerate(states(x, start)):
        o[:, t] = request.scale * np.einsum("bhk,bhkv->bhv", x.q[:, t], last)
    if not request.output_final_state:
        return Outputs(o)
    dtype = np.float32 if inputs.initial_state is None else inputs.initial_state.dtype
    dtype = np.float64 if request.state_dtype == "float64" else dtype
    return Outputs(o, np.ascontiguousarray(layout(request, last), dtype))
