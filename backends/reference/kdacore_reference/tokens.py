"""The tokens of a slab in the layout the chunk code computes in, and results back in the caller's."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array, Request
from kdacore_reference.arrays import beside, cast, compute_dtype, dense, plain, put
from kdacore_reference.gates import beta_forward, gate_forward, gate_parameters, l2_scale
from kdacore_reference.plan import CHUNK, Slab, Unit


class Flat(NamedTuple):
    """The caller's arrays with batch and tokens as one axis of rows, and the gate's parameters per head."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    a: Array | None
    """``exp(A_log)`` as ``[HV, 1, 1]``."""
    bias: Array | None
    """``dt_bias`` as ``[HV, 1, K or 1]``."""
    dtype: Any
    """What is computed in."""


def flatten(request: Request, inputs: Any) -> Flat:
    xp = array_namespace(inputs.q)
    dtype = compute_dtype(xp, request)
    a, bias = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    tail = (request.HV, 1, -1)
    return Flat(
        q=flat_rows(inputs.q),
        k=flat_rows(inputs.k),
        v=flat_rows(inputs.v),
        g=flat_rows(inputs.g),
        beta=flat_rows(inputs.beta),
        a=None if a is None else xp.reshape(a, tail),
        bias=None if bias is None else xp.reshape(bias, tail),
        dtype=dtype,
    )


def flat_rows(array: Array) -> Array:
    """``[B, T, ...]`` as ``[B*T, ...]``."""
    array = plain(array)
    return array_namespace(array).reshape(array, (-1, *array.shape[2:]))


class Tokens(NamedTuple):
    """One slab: ``n`` blocks of ``C`` tokens, ``H`` query/key heads of the unit, ``G`` value heads for each."""

    kq: Array
    """``[n, H, 1, C, 2, K]``: keys (0) and queries (1), normalised when asked."""
    v: Array
    """``[n, H, G, C, V]``."""
    beta: Array
    """``[n, H, G, C, 1]``, after its sigmoid."""
    decay: Array
    """``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate."""
    k_scale: Array | None
    """``1 / |k|``, ``[n, H, C, 1]``, with l2norm."""
    q_scale: Array | None
    raw_beta: Array
    raw_g: Array
    """As given, for the backward."""


def slab_tokens(request: Request, flat: Flat, unit: Unit, slab: Slab) -> Tokens:
    xp = array_namespace(flat.q)
    H, G = unit.heads.stop - unit.heads.start, request.HV // request.H
    mask = mask_of(slab, flat.q)
    # The caller's dtype is widened once the rows are gathered; half precision never enters arithmetic.
    q = gather(flat.q, slab, unit.heads, flat.dtype, mask, order=False)
    k = gather(flat.k, slab, unit.heads, flat.dtype, mask, order=False)
    q_scale = k_scale = None
    if request.qk_l2norm:
        q_scale, k_scale = l2_scale(q), l2_scale(k)
        q, k = q * q_scale, k * k_scale
    kq = xp.empty((slab.blocks, H, 1, CHUNK, 2, q.shape[-1]), dtype=flat.dtype, device=beside(q))
    kq = put(kq, (slice(None), slice(None), 0, slice(None), 0), k)
    kq = put(kq, (slice(None), slice(None), 0, slice(None), 1), q)

    def grouped(array: Array) -> Array:
        return xp.reshape(array, (slab.blocks, H, G, CHUNK, -1))

    v = gather(flat.v, slab, unit.value_heads, flat.dtype, mask)
    raw_beta = gather(flat.beta[..., None], slab, unit.value_heads, flat.dtype)
    beta = masked(beta_forward(raw_beta, request), mask)
    g = flat.g[..., None] if request.scalar_gate else flat.g
    raw_g = gather(g, slab, unit.value_heads, flat.dtype)
    log_decay = masked(gate_forward(request, raw_g, *gate_slices(flat, unit)), mask)
    return Tokens(
        kq=kq,
        v=grouped(v),
        beta=grouped(beta),
        decay=grouped(xp.exp(log_decay)),
        k_scale=k_scale,
        q_scale=q_scale,
        raw_beta=raw_beta,
        raw_g=raw_g,
    )


def gate_slices(flat: Flat, unit: Unit) -> tuple[Array | None, Array | None]:
    """``exp(A_log)`` and ``dt_bias`` of the unit's value heads, to broadcast over ``[n, HV, C, K]``."""
    a = None if flat.a is None else flat.a[unit.value_heads, ...]
    return a, None if flat.bias is None else flat.bias[unit.value_heads, ...]


def gather(
    flat: Array, slab: Slab, heads: slice, dtype: Any, mask: Array | None = None, order: bool = True
) -> Array:
    """``[rows, heads, X]`` to ``[n, heads, C, X]``; with ``mask``, padding becomes 0.

    In row-major order, or with ``order=False`` as it comes, perhaps a view of the caller's memory.
    """
    xp = array_namespace(flat)
    rows = slab.rows if isinstance(slab.rows, slice) else _indices(slab.rows, flat)
    part = flat[:, heads, ...][rows, ...]
    part = xp.reshape(part, (slab.blocks, CHUNK, *part.shape[1:]))
    part = masked(cast(xp.permute_dims(part, (0, 2, 1, 3)), dtype), mask)
    return dense(part) if order else part


def scatter(target: Array, slab: Slab, heads: slice, values: Array) -> Array:
    """Writes ``values`` ``[n, heads, C, X]`` to the rows and heads of ``target`` ``[rows, heads, X]``."""
    xp = array_namespace(values)
    by_row = xp.permute_dims(values, (0, 2, 1, 3))
    by_row = xp.reshape(by_row, (-1, *by_row.shape[2:]))
    if isinstance(slab.rows, slice):
        return put(target, (slab.rows, heads), cast(by_row, target.dtype))
    rows = slab.rows
    if slab.real is not None:
        rows, by_row = rows[slab.real], by_row[_indices(slab.real, values), ...]
    return put(target, (_indices(rows, values), heads), cast(by_row, target.dtype))


def empty_rows(request: Request, like: Array, heads: int, *tail: int, dtype: Any = None) -> Array:
    """Zeros ``[B*T, heads, *tail]`` beside ``like`` and, unless given, of its dtype."""
    xp = array_namespace(like)
    shape = (request.B * request.T, heads, *tail)
    return xp.zeros(shape, dtype=like.dtype if dtype is None else dtype, device=beside(like))


def _indices(rows: Any, like: Array) -> Array:
    xp = array_namespace(like)
    return (
        rows
        if xp.__name__.endswith("numpy") and hasattr(like, "ctypes")
        else xp.asarray(rows, device=beside(like))
    )


def mask_of(slab: Slab, like: Array) -> Array | None:
    """True at real tokens, ``[n, 1, C, 1]``; None when there is no padding."""
    if slab.real is None:
        return None
    xp = array_namespace(like)
    flags = [False] * (slab.blocks * CHUNK)
    for i in slab.real.tolist():
        flags[i] = True
    return xp.reshape(xp.asarray(flags, device=beside(like)), (slab.blocks, 1, CHUNK, 1))


def masked(array: Array, mask: Array | None) -> Array:
    if mask is None:
        return array
    xp = array_namespace(array)
    return xp.where(mask, array, xp.zeros_like(array))
