"""The launches of the gated delta rule as NumPy functions in float64: what each reads and what it must leave.

Arrays between launches are plain matrices ``[slots, HV, ...]`` here; :func:`pack_records` and :func:`unpack_records`
convert to and from the bytes of csrc/sm90/gated_delta/record.cuh, ``to_images`` and ``from_images`` of
:mod:`chunk_backward_model` those of the other arrays. Slots that no sequence fills are NaN. record.cuh and
backward_workspace.cuh have the formulas and the names.
"""

from __future__ import annotations

from typing import Any

import chunk_backward_model as chunk_model
import numpy as np
import torch
from chunk_backward_model import F64, LOG2E, C, chunks, num_slots, rows

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.forms.gated_delta.workspace import RECORD_BYTES
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_reference.gate import beta_forward, gate_forward, gate_parameters
from kdacore_reference.oracle import to_float64

Work = dict[str, F64]
"""Arrays between launches, by name."""

MATRICES, FACTORS, SCALARS = (
    ("t", "a"),
    ("state", "output", "to_end"),
    ("sum", "beta", "k_norm", "q_factor"),
)
"""Of a record ``[slots, HV]``, in the order of its bytes: ``[64, 64]``, ``[64]`` and, behind ``last``, ``[64]``."""
LOWEST_STEP, LEAST_BETA = -126.0, 2.0**-64
"""The lowest log2 decay of a token; the smallest beta with the flag ``NONZERO_BETA``."""

_RECORD = np.dtype(
    [(name, "u2", (10, 16, 2, 8)) for name in MATRICES]
    + [(name, "f4", (4, 20)) for name in FACTORS]
    + [("last", "f4", (4,)), ("unused", "f4", (12,))]
    + [(name, "f4", (C,)) for name in SCALARS]
)
assert _RECORD.itemsize == RECORD_BYTES


# --- the launches ----------------------------------------------------------------------------------------------------


def records(request: Request, inputs: ChunkInputs, flags: int = 0) -> Work:
    """t, a, the factors, ``last [slots, HV]`` and the scalars of every chunk. ``flags``: of ``NONZERO_BETA``."""
    log, beta, r, c = _scalars(request, inputs, flags)
    q, k = (to_float64(x) for x in (inputs.q, inputs.k))
    lead, below = (num_slots(request), request.HV), np.tril(np.ones((C, C), bool))
    work = {name: np.full((*lead, C, C), np.nan) for name in MATRICES}
    work |= {name: np.full((*lead, C), np.nan) for name in (*FACTORS, *SCALARS)}
    work["last"] = np.full(lead, np.nan)
    for chunk in chunks(request, inputs):
        n = chunk.tokens.stop - chunk.tokens.start
        for hv in range(request.HV):
            at, h = (chunk.slot, hv), hv // (request.HV // request.H)
            Q, Kc = (rows(x[chunk.batch, chunk.tokens, h]) for x in (q, k))
            norm, factor = (rows(x[chunk.batch, chunk.tokens, h], np.nan) for x in (r, c))
            own = rows(beta[chunk.batch, chunk.tokens, hv])
            G = np.cumsum(rows(log[chunk.batch, chunk.tokens, hv]))
            norm[n:], factor[n:] = _norm_of_zeros(request), request.scale * _norm_of_zeros(request)
            decays = np.exp2(np.where(below, G[:, None] - G[None], -np.inf))
            L = np.tril(decays * norm[:, None] * (Kc @ Kc.T) * (norm * own)[None], -1)
            work["t"][at] = np.tril(np.linalg.inv(np.eye(C) + L), -1)
            work["a"][at] = decays * factor[:, None] * (Q @ Kc.T) * (norm * own)[None]
            work["state"][at], work["output"][at] = np.exp2(G) * norm, factor * np.exp2(G)
            work["to_end"][at], work["last"][at] = np.exp2(G[-1] - G) * norm * own, np.exp2(G[-1])
            work["sum"][at], work["beta"][at] = G, own
            work["k_norm"][at], work["q_factor"][at] = norm, factor
    return work


def walk(request: Request, inputs: ChunkInputs, work: Work) -> tuple[Work, F64, F64]:
    """From every sequence's start.

    Returns:
        ``u [slots, HV, 64, V]`` and ``states [slots, HV, V, K]``; o ``[B, T, HV, V]``, NaN behind a pack; the final
        states, in the call's layout.
    """
    lead = num_slots(request), request.HV
    out = {"u": np.full((*lead, C, 128), np.nan), "states": np.full((*lead, 128, 128), np.nan)}
    o = np.full((request.B, request.T, request.HV, 128), np.nan)
    S = _value_rows(request, inputs.initial_state, request.N)
    for chunk in chunks(request, inputs):
        n = chunk.tokens.stop - chunk.tokens.start
        for hv in range(request.HV):
            at = (chunk.slot, hv)
            Q, Kc, v = _tokens(request, inputs, chunk, hv)
            w = {name: x[at] for name, x in work.items()}
            y = v - w["state"][:, None] * (Kc @ S[chunk.n, hv].T)
            u = y + w["t"] @ y
            out["u"][at], out["states"][at] = u, S[chunk.n, hv]
            o[chunk.batch, chunk.tokens, hv] = (w["output"][:, None] * (Q @ S[chunk.n, hv].T) + w["a"] @ u)[
                :n
            ]
            S[chunk.n, hv] = w["last"] * S[chunk.n, hv] + (w["to_end"][:, None] * u).T @ Kc
    return out, o, _in_layout(request, S)


def reverse(
    request: Request, inputs: ChunkInputs, work: Work, d_o: Any, d_final: Any
) -> tuple[Work, F64, F64]:
    """From every sequence's end. ``d_final``: the gradient of the final states, or None.

    Returns:
        ``state_grads [slots, HV, V, K]``; dv ``[B, T, HV, V]``, NaN behind a pack; the gradient of the initial states,
        in the call's layout.
    """
    state_grads = np.full((num_slots(request), request.HV, 128, 128), np.nan)
    dv, d_o = np.full((request.B, request.T, request.HV, 128), np.nan), to_float64(d_o)
    R = _value_rows(request, d_final, request.N)
    for chunk in reversed(list(chunks(request, inputs))):
        n = chunk.tokens.stop - chunk.tokens.start
        for hv in range(request.HV):
            at = (chunk.slot, hv)
            Q, Kc, _ = _tokens(request, inputs, chunk, hv)
            w, out = {name: x[at] for name, x in work.items()}, rows(d_o[chunk.batch, chunk.tokens, hv])
            state_grads[at] = R[chunk.n, hv]
            du = w["to_end"][:, None] * (Kc @ R[chunk.n, hv].T) + w["a"].T @ out
            own = du + w["t"].T @ du
            R[chunk.n, hv] *= w["last"]
            R[chunk.n, hv] += (w["output"][:, None] * out).T @ Q - (w["state"][:, None] * own).T @ Kc
            dv[chunk.batch, chunk.tokens, hv] = own[:n]
    return {"state_grads": state_grads}, dv, _in_layout(request, R)


# --- bytes -----------------------------------------------------------------------------------------------------------


def pack_records(work: Work) -> torch.Tensor:
    """uint8 ``[slots, HV, RECORD_BYTES]``; what no number fills is NaN."""
    found = np.zeros(work["last"].shape, _RECORD)
    for name in MATRICES:
        found[name] = _lower_blocks(work[name])
    for name in FACTORS:
        found[name] = np.nan
        found[name][..., :16] = _in_factor_order(work[name])
    found["last"] = work["last"][..., None]
    for name in SCALARS:
        found[name] = work[name]
    return torch.from_numpy(found.view("u1").reshape(*found.shape, RECORD_BYTES))


def unpack_records(data: torch.Tensor) -> Work:
    """The inverse of :func:`pack_records`."""
    found = np.ascontiguousarray(data.numpy()).view(_RECORD)[..., 0]
    work = {}
    for name in MATRICES:
        work[name] = _from_lower_blocks(np.ascontiguousarray(found[name]))
    for name in FACTORS:
        x = found[name][..., :16].astype(np.float64)
        work[name] = np.swapaxes(x.reshape(*x.shape[:-1], 8, 2), -3, -2).reshape(*x.shape[:-2], C)
    work["last"] = found["last"][..., 0].astype(np.float64)
    return work | {name: found[name].astype(np.float64) for name in SCALARS}


# Blocks of 16 by 16 on and below the diagonal, column by column. In rows 4 to 7 and 12 to 15 of a block both halves are
# exchanged.
_PLACES = [(row, column) for column in range(4) for row in range(column, 4)]
_EXCHANGED = (np.arange(16) >> 2 & 1).astype(bool)


def _lower_blocks(x: F64) -> Any:
    blocks = np.stack(
        [x[..., 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] for row, column in _PLACES], -3
    )
    blocks = blocks.reshape(*blocks.shape[:-1], 2, 8)
    blocks[..., _EXCHANGED, :, :] = blocks[..., _EXCHANGED, ::-1, :]
    return torch.from_numpy(blocks).to(torch.bfloat16).view(torch.uint16).numpy()


def _from_lower_blocks(data: Any) -> F64:
    blocks = torch.from_numpy(data).view(torch.bfloat16).double().numpy()
    blocks[..., _EXCHANGED, :, :] = blocks[..., _EXCHANGED, ::-1, :]
    x = np.zeros((*blocks.shape[:-4], C, C))
    x[np.isnan(blocks).any((-4, -3, -2, -1))] = np.nan
    for i, (row, column) in enumerate(_PLACES):
        block = blocks[..., i, :, :, :].reshape(*x.shape[:-2], 16, 16)
        x[..., 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = block
    return x


def _in_factor_order(x: F64) -> F64:
    """``[..., 64]`` as ``[..., 4, 16]``: tokens ``8 j + 2 t`` and the next at ``[t, 2 j]``."""
    return np.swapaxes(x.reshape(*x.shape[:-1], 8, 4, 2), -3, -2).reshape(*x.shape[:-1], 4, 16)


# --- inputs ----------------------------------------------------------------------------------------------------------


def _scalars(request: Request, inputs: ChunkInputs, flags: int) -> tuple[F64, F64, F64, F64]:
    """log2 decays and betas ``[B, T, HV]``; r and c ``[B, T, H]``."""
    a, bias = gate_parameters(
        request,
        None if inputs.A_log is None else to_float64(inputs.A_log),
        None if inputs.dt_bias is None else to_float64(inputs.dt_bias),
        np.float64,
    )
    log = np.maximum(LOG2E * gate_forward(request, to_float64(inputs.g), a, bias), LOWEST_STEP)
    beta = beta_forward(to_float64(inputs.beta), request)
    if flags & FLAGS["NONZERO_BETA"]:
        beta = np.where(np.abs(beta) < LEAST_BETA, np.where(beta < 0, -LEAST_BETA, LEAST_BETA), beta)
    r, c = (_norms(request, x) for x in (inputs.k, inputs.q))
    return log, beta, r, request.scale * c


def _norms(request: Request, x: torch.Tensor) -> F64:
    y = to_float64(x)
    return 1 / np.sqrt((y * y).sum(-1) + 1e-6) if request.qk_l2norm else np.ones(y.shape[:-1])


def _norm_of_zeros(request: Request) -> float:
    return 1e3 if request.qk_l2norm else 1.0


def _tokens(request: Request, inputs: ChunkInputs, chunk: chunk_model.Chunk, hv: int) -> tuple[F64, F64, F64]:
    """A chunk's q, k and v, zeros past the end."""
    h = hv // (request.HV // request.H)
    heads = ((inputs.q, h), (inputs.k, h), (inputs.v, hv))
    q, k, v = (rows(to_float64(x[chunk.batch, chunk.tokens, i])) for x, i in heads)
    return q, k, v


def _value_rows(request: Request, states: Any, N: int) -> F64:
    """A copy ``[N, HV, V, K]`` of states in the call's layout; zeros without any."""
    if states is None:
        return np.zeros((N, request.HV, 128, 128))
    return _in_layout(request, to_float64(states)).copy()


def _in_layout(request: Request, states: F64) -> F64:
    """States ``[..., V, K]`` in the call's layout, and back."""
    return states if request.state_v_first else np.swapaxes(states, -1, -2)
