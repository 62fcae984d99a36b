"""The five stage ops in float64 NumPy, chunk by chunk, as contract section 6 states them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kdacore.oracle.gate import LARGEST, oracle_gate
from kdacore.oracle.host_values import F64, to_float64, to_offsets
from kdacore.types import (
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    ChunkStateOutputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    RecomputeOutputs,
    Request,
)

LOG2E = float(np.log2(np.e))


class Chunk(NamedTuple):
    """Position of one chunk: batch row, token range, index on the chunk axis, sequence."""

    b: int
    tokens: slice
    slot: int
    n: int


def chunks_of(request: Request, cu_seqlens: Any) -> Iterator[Chunk]:
    """Every chunk of every sequence, in order. Chunks start anew at each sequence."""
    C = request.chunk_size
    bounds = to_offsets(request, cu_seqlens).tolist() if request.packed else None
    slot = 0
    for n in range(request.N):
        b = 0 if bounds else n
        start, end = (bounds[n], bounds[n + 1]) if bounds else (0, request.T)
        slot = slot if bounds else 0
        for first in range(start, end, C):
            yield Chunk(b, slice(first, min(first + C, end)), slot, n)
            slot += 1


def oracle_chunk_gate(request: Request, inputs: ChunkGateInputs) -> F64:
    """``gc`` ``[B, T, HV, K]``: log2 decay summed from each chunk's first row, at least
    ``-LARGEST``."""
    log2_decay = oracle_gate(request, inputs) * LOG2E
    gc = np.zeros_like(log2_decay)
    for c in chunks_of(request, inputs.cu_seqlens):
        gc[c.b, c.tokens] = np.maximum(np.cumsum(log2_decay[c.b, c.tokens], axis=0), -LARGEST)
    return gc


def _heads_first(array: F64, c: Chunk, group: int = 1) -> F64:
    """``[HV, C, ...]`` of one chunk; q and k heads are repeated over their group."""
    return np.repeat(np.swapaxes(array[c.b, c.tokens], 0, 1), group, axis=0)


def oracle_chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk``, each ``[B, T, HV, C]``, from explicit exponent differences and a float64
    inverse."""
    q, k, gc, beta = (to_float64(a) for a in inputs[:4])
    group = request.HV // request.H
    shape = (request.B, request.T, request.HV, request.chunk_size)
    Aqk, Akk = np.zeros(shape), np.zeros(shape)
    for c in chunks_of(request, inputs.cu_seqlens):
        qc, kc = _heads_first(q, c, group), _heads_first(k, c, group)
        gcc, bc = _heads_first(gc, c), _heads_first(beta, c)
        size = qc.shape[1]
        difference = gcc[:, :, None, :] - gcc[:, None, :, :]
        lower = np.tril(np.ones((size, size), dtype=bool))
        decay = np.exp2(np.where(lower[:, :, None], difference, -np.inf))
        qk = request.scale * (qc[:, :, None, :] * kc[:, None, :, :] * decay).sum(-1)
        kk = np.tril(bc[:, :, None] * (kc[:, :, None, :] * kc[:, None, :, :] * decay).sum(-1), -1)
        Aqk[c.b, c.tokens, :, :size] = np.swapaxes(qk, 0, 1)
        Akk[c.b, c.tokens, :, :size] = np.swapaxes(np.linalg.inv(np.eye(size) + kk), 0, 1)
    return IntraOutputs(Aqk, Akk)


def oracle_recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` and, when q is given, ``qg``, each ``[B, T, HV, K or V]``."""
    k, v, beta, gc, Akk = (to_float64(a) for a in inputs[:5])
    q = None if inputs.q is None else to_float64(inputs.q)
    group = request.HV // request.H
    keys = (request.B, request.T, request.HV, request.K)
    w, kg, qg = np.zeros(keys), np.zeros(keys), None if q is None else np.zeros(keys)
    u = np.zeros((*keys[:3], request.V))
    for c in chunks_of(request, inputs.cu_seqlens):
        kc, gcc, bc = _heads_first(k, c, group), _heads_first(gc, c), _heads_first(beta, c)[..., None]
        inverse = _heads_first(Akk, c)[..., : kc.shape[1]]
        w[c.b, c.tokens] = np.swapaxes(inverse @ (bc * kc * np.exp2(gcc)), 0, 1)
        u[c.b, c.tokens] = np.swapaxes(inverse @ (bc * _heads_first(v, c)), 0, 1)
        kg[c.b, c.tokens] = np.swapaxes(kc * np.exp2(gcc[:, -1:] - gcc), 0, 1)
        if q is not None and qg is not None:
            qg[c.b, c.tokens] = np.swapaxes(_heads_first(q, c, group) * np.exp2(gcc), 0, 1)
    return RecomputeOutputs(w, u, kg, qg)


def oracle_chunk_state(request: Request, inputs: ChunkStateInputs) -> ChunkStateOutputs:
    """``h`` ``[B, NT, HV, K, V]`` at each chunk's start, ``v_new`` ``[B, T, HV, V]`` and the last
    states."""
    kg, w, u, gc = (to_float64(a) for a in inputs[:4])
    h = np.zeros((request.B, request.num_chunks, request.HV, request.K, request.V))
    v_new = np.zeros_like(u)
    states = np.zeros((request.N, request.HV, request.K, request.V))
    if inputs.initial_state is not None:
        states += _swap_layout(to_float64(inputs.initial_state), request)
    for c in chunks_of(request, inputs.cu_seqlens):
        S = states[c.n]
        h[c.b, c.slot] = S
        fresh = _heads_first(u, c) - _heads_first(w, c) @ S
        v_new[c.b, c.tokens] = np.swapaxes(fresh, 0, 1)
        decay = np.exp2(_heads_first(gc, c)[:, -1])
        states[c.n] = decay[..., None] * S + np.swapaxes(_heads_first(kg, c), 1, 2) @ fresh
    return ChunkStateOutputs(h, v_new, np.ascontiguousarray(_swap_layout(states, request)))


def oracle_chunk_output(request: Request, inputs: ChunkOutputInputs) -> F64:
    """``o`` ``[B, T, HV, V]``."""
    q, v_new, gc, Aqk, h = (to_float64(a) for a in inputs[:5])
    group = request.HV // request.H
    o = np.zeros_like(v_new)
    for c in chunks_of(request, inputs.cu_seqlens):
        qg = request.scale * _heads_first(q, c, group) * np.exp2(_heads_first(gc, c))
        within = _heads_first(Aqk, c)[..., : qg.shape[1]]
        o[c.b, c.tokens] = np.swapaxes(qg @ h[c.b, c.slot] + within @ _heads_first(v_new, c), 0, 1)
    return o


def _swap_layout(state: F64, request: Request) -> F64:
    return np.swapaxes(state, -1, -2) if request.state_v_first else state
