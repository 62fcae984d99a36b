"""The three backward kernels as NumPy functions in float64: what each reads and what it must write to the workspace.

Workspace arrays here are plain matrices ``[slots, HV, ...]``; :func:`to_images` and :func:`from_images` convert to and
from the byte images of csrc/sm90/chunk_backward/workspace.cuh. Slots that no sequence fills are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.forms.chunk_numbers import UNBOUNDED_FLOOR
from kdacore_cuda.request_encoding import has_bounded_gate
from kdacore_reference.gate import beta_backward, beta_forward, gate_backward, gate_forward, gate_parameters
from kdacore_reference.oracle import to_float64

F64 = NDArray[np.float64]
C, HALF = 64, 32
LOG2E = float(np.log2(np.e))


class Chunk(NamedTuple):
    """Rows ``tokens`` of batch row ``batch``, their slot, and whether sequence ``n`` begins or ends with them."""

    n: int
    batch: int
    tokens: slice
    slot: int
    first: bool
    last: bool


def num_slots(request: Request) -> int:
    return request.T // C + request.N if request.packed else request.B * -(-request.T // C)


def chunks(request: Request, inputs: ChunkInputs) -> Iterator[Chunk]:
    """Every chunk, in the order of its sequence."""
    if inputs.cu_seqlens is None:
        NT = -(-request.T // C)
        spans = [(n, 0, request.T, n * NT) for n in range(request.B)]
    else:
        cu = [int(x) for x in inputs.cu_seqlens]
        spans = [(0, a, b, a // C + n) for n, (a, b) in enumerate(pairwise(cu))]
    for n, (batch, start, end, slot) in enumerate(spans):
        for i, t in enumerate(range(start, end, C)):
            yield Chunk(n, batch, slice(t, min(t + C, end)), slot + i, i == 0, t + C >= end)


class Tokens(NamedTuple):
    """Activated inputs ``[B, T, HV, ...]``: normalised q and k, beta, natural-log decays cut off at the floor."""

    q: F64
    k: F64
    v: F64
    beta: F64
    log: F64
    rq: F64
    rk: F64


def floor_of(request: Request) -> float:
    """Lowest log2 decay of a step: a hair below the bound, so that a step at the bound is not cut off by rounding."""
    if not has_bounded_gate(request):
        return UNBOUNDED_FLOOR
    assert request.lower_bound is not None
    return request.lower_bound * LOG2E * 1.0001


def activate(request: Request, inputs: ChunkInputs) -> Tokens:
    q, k, v, g, beta = (to_float64(x) for x in inputs[:5])
    a, bias = gate_parameters(
        request,
        None if inputs.A_log is None else to_float64(inputs.A_log),
        None if inputs.dt_bias is None else to_float64(inputs.dt_bias),
        np.float64,
    )
    log = np.maximum(gate_forward(request, g, a, bias), floor_of(request) / LOG2E)
    rq, rk = np.ones(q.shape[:-1]), np.ones(k.shape[:-1])
    if request.qk_l2norm:
        rq, rk = (1 / np.sqrt((x * x).sum(-1) + 1e-6) for x in (q, k))
    group = request.HV // request.H
    q, k = (np.repeat(x * r[..., None], group, axis=2) for x, r in ((q, rq), (k, rk)))
    return Tokens(
        q, k, v, beta_forward(beta, request), log, np.repeat(rq, group, axis=2), np.repeat(rk, group, axis=2)
    )


WIDTHS = {
    "kg": (C, 128), "kg_low": (C, 128), "qg": (C, 128), "w": (C, 128), "u": (128, C), "aqk": (C, C), "inv": (C, C),
    "last": (3, 128), "rows": (3, C), "h": (128, 128), "dh": (128, 128), "dr": (128, C),
}  # fmt: skip


def empty(request: Request, *names: str) -> dict[str, F64]:
    return {name: np.full((num_slots(request), request.HV, *WIDTHS[name]), np.nan) for name in names}


def prepare(request: Request, inputs: ChunkInputs) -> dict[str, F64]:
    """kg, kg_low, qg, w, u, aqk, inv, last and rows."""
    x = activate(request, inputs)
    work = empty(request, "kg", "kg_low", "qg", "w", "u", "aqk", "inv", "last", "rows")
    for c in chunks(request, inputs):
        for hv in range(request.HV):
            at = (c.slot, hv)
            q, k, v, beta, log = (rows(a[c.batch, c.tokens, hv]) for a in x[:5])
            gc = np.cumsum(log, 0)
            pairs = _decays(gc)
            aqk = request.scale * np.einsum("id,jd,ijd->ij", q, k, pairs)
            L = np.tril(beta[:, None] * np.einsum("id,jd,ijd->ij", k, k, pairs), -1)
            inv = np.linalg.inv(np.eye(C) + L)
            work["aqk"][at], work["inv"][at] = np.tril(aqk), inv
            work["kg"][at] = k * np.exp(gc[-1] - gc)
            work["kg_low"][at] = work["kg"][at] - _rounded(work["kg"][at])
            work["qg"][at] = request.scale * q * np.exp(gc)
            work["w"][at] = inv @ (beta[:, None] * k * np.exp(gc))
            work["u"][at] = (inv @ (beta[:, None] * v)).T
            work["last"][at] = np.exp([gc[-1], gc[HALF - 1], gc[-1] - gc[HALF - 1]])
            rq, rk = (rows(a[c.batch, c.tokens, hv], 1.0) for a in (x.rq, x.rk))
            work["rows"][at] = (beta, rq, rk)
    return work


def scan(
    request: Request, inputs: ChunkInputs, work: dict[str, F64], do: Any, d_final: Any
) -> tuple[dict[str, F64], F64 | None]:
    """h, u (v_new in its place), dh and dr; and the gradient of the initial state."""
    out = empty(request, "h", "u", "dh", "dr")
    todo = list(chunks(request, inputs))
    do = to_float64(do)
    h0, dht = (
        None if s is None else _value_rows(request, to_float64(s)) for s in (inputs.initial_state, d_final)
    )
    d_h0 = None if h0 is None else (np.zeros_like(h0) if dht is None else dht.copy())
    for hv in range(request.HV):
        S = np.zeros((128, 128))
        for c in todo:
            at = (c.slot, hv)
            if c.first:
                S = np.zeros((128, 128)) if h0 is None else h0[c.n, hv]
            out["h"][at] = S
            out["u"][at] = work["u"][at] - S @ work["w"][at].T
            S = S * work["last"][at][0] + out["u"][at] @ work["kg"][at]
        for c in reversed(todo):
            at = (c.slot, hv)
            if c.last:
                dS = np.zeros((128, 128)) if dht is None else dht[c.n, hv]
            out["dh"][at] = dS
            o = rows(do[c.batch, c.tokens, hv]).T
            dv = dS @ (_rounded(work["kg"][at]) + work["kg_low"][at]).T + o @ work["aqk"][at]
            dS = dS * work["last"][at][0] + o @ work["qg"][at] - dv @ work["w"][at]
            out["dr"][at] = dv @ work["inv"][at]
            if c.first and d_h0 is not None:
                d_h0[c.n, hv] = dS
    return out, None if d_h0 is None else _value_rows(request, d_h0)


def grads(request: Request, inputs: ChunkInputs, work: dict[str, F64], do: Any) -> dict[str, F64]:
    """dq, dk, dv, dg, dbeta, dA_part, dbias_part (without the kernel's scale, SUM_SCALE).

    dq and dk have a head for each value head and have gone through the norm unless heads are grouped. ``work``: u
    (v_new), dr, h and dh.
    """
    x = activate(request, inputs)
    do = to_float64(do)
    B, T, HV = request.B, request.T, request.HV
    dq, dk, dv, dlog = (np.zeros((B, T, HV, 128)) for _ in range(4))
    dbeta = np.zeros((B, T, HV))
    for c in chunks(request, inputs):
        n = c.tokens.stop - c.tokens.start
        for hv in range(HV):
            at = (c.slot, hv)
            q, k, v, beta, log = (rows(a[c.batch, c.tokens, hv]) for a in x[:5])
            o, new, dr = rows(do[c.batch, c.tokens, hv]), work["u"][at].T, work["dr"][at].T
            h, dh = work["h"][at], work["dh"][at]
            gc = np.cumsum(log, 0)
            D, to_end, pairs = np.exp(gc), np.exp(gc[-1] - gc), _decays(gc)
            dA, dL = request.scale * np.tril(o @ new.T), -np.tril(dr @ new.T, -1)
            dqn = request.scale * D * (o @ h) + np.einsum("ij,jd,ijd->id", dA, k, pairs)
            dx = -D * (dr @ h) + np.einsum("ij,jd,ijd->id", dL, k, pairs)
            kept = to_end * (new @ dh)
            given = kept + np.einsum("ij,id,ijd->jd", dA, q, pairs)
            given += np.einsum("ij,i,id,ijd->jd", dL, beta, k, pairs)
            dgc = q * dqn + beta[:, None] * k * dx - k * given
            step = np.cumsum(dgc[::-1], 0)[::-1] + (k * kept).sum(0) + D[-1] * (h * dh).sum(0)
            where = (c.batch, c.tokens, hv)
            dq[where], dk[where] = dqn[:n], (beta[:, None] * dx + given)[:n]
            dv[where], dlog[where] = (beta[:, None] * dr)[:n], step[:n]
            dbeta[where] = ((dr * v).sum(-1) + (k * dx).sum(-1))[:n]
    g, beta = to_float64(inputs.g), to_float64(inputs.beta)
    if request.qk_l2norm and request.H == HV:
        dq, dk = through_norm(x.q, x.rq, dq), through_norm(x.k, x.rk, dk)
    a, bias = gate_parameters(
        request,
        None if inputs.A_log is None else to_float64(inputs.A_log),
        None if inputs.dt_bias is None else to_float64(inputs.dt_bias),
        np.float64,
    )
    log = gate_forward(request, g, a, bias)
    dg, dA_each = gate_backward(request, g, a, bias, log, dlog * (log >= floor_of(request) / LOG2E))
    parts = {
        "dA_part": np.full((num_slots(request), HV), np.nan),
        "dbias_part": np.full((num_slots(request), HV, 128), np.nan),
    }
    for c in chunks(request, inputs):
        for hv in range(HV):
            if dA_each is not None:
                parts["dA_part"][c.slot, hv] = dA_each[c.batch, c.tokens, hv].sum()
            parts["dbias_part"][c.slot, hv] = dg[c.batch, c.tokens, hv].sum(0)
    dbeta = beta_backward(beta, dbeta, request)
    return {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, **parts}


def through_norm(y: F64, r: F64, d: F64) -> F64:
    """The gradient of ``y / r`` from that of the normalised ``y``."""
    return r[..., None] * (d - y * (y * d).sum(-1, keepdims=True))


def rows(x: F64, fill: float = 0.0) -> F64:
    """A chunk's rows, filled up to C."""
    out = np.full((C, *x.shape[1:]), fill)
    out[: len(x)] = x
    return out


def _rounded(x: F64) -> F64:
    """To bfloat16 and back."""
    return to_float64(torch.from_numpy(x).to(torch.bfloat16))


def _decays(gc: F64) -> F64:
    """``exp(gc_i - gc_j)`` for ``j <= i``, else 0: ``[C, C, K]``."""
    below = np.tril(np.ones((C, C), bool))[..., None]
    return np.exp(np.where(below, gc[:, None] - gc[None], -np.inf))


def _value_rows(request: Request, state: F64) -> F64:
    """States ``[N, HV, V, K]`` from the call's layout, and back."""
    return state if request.state_v_first else np.swapaxes(state, -1, -2)


def to_images(matrices: F64) -> torch.Tensor:
    """``[..., rows, columns]`` as bfloat16 byte images ``[..., columns / 64, rows, 64]``."""
    *outer, rows, columns = matrices.shape
    x = np.moveaxis(matrices.reshape(*outer, rows, columns // 64, 8, 8), -3, -4)
    return torch.from_numpy(np.ascontiguousarray(_swizzle(x))).to(torch.bfloat16).reshape(*outer, -1)


def from_images(images: torch.Tensor, rows: int, columns: int) -> F64:
    """The inverse of :func:`to_images`."""
    *outer, _ = images.shape
    x = _swizzle(to_float64(images).reshape(*outer, columns // 64, rows, 8, 8))
    return np.moveaxis(x, -4, -3).reshape(*outer, rows, columns)


def to_tiles(states: F64) -> F64:
    """States ``[..., 128, 128]`` as they lie between launches, in the same shape: row 16 a + c + 8 e and channel
    8 b + 2 d + f at ``[a, b, c, d, e, f]`` of ``[V / 16, K / 8, 8, 4, 2, 2]``."""
    *outer, V, K = states.shape
    x = np.moveaxis(states.reshape(*outer, V // 16, 2, 8, K // 8, 4, 2), (-5, -4, -3, -2), (-2, -4, -5, -3))
    return np.ascontiguousarray(x).reshape(states.shape)


def from_tiles(stored: F64) -> F64:
    """The inverse of :func:`to_tiles`."""
    *outer, V, K = stored.shape
    x = stored.reshape(*outer, V // 16, K // 8, 8, 4, 2, 2)
    return np.ascontiguousarray(np.moveaxis(x, (-2, -4, -5, -3), (-5, -4, -3, -2))).reshape(stored.shape)


def _swizzle(x: F64) -> F64:
    """16-byte pieces ``[..., rows, 8, 8]`` of each row exchanged as in shared memory; its own inverse."""
    rows, pieces = np.arange(x.shape[-3])[:, None], np.arange(8)[None]
    return x[..., rows, pieces ^ (rows & 7), :]
