"""The tokens of a slab in the layout the chunk code computes in, and results back in the caller's."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import is_numpy_array

from kdacore.types import Array, Request
from kdacore_reference.arrays import (
    beside,
    cast,
    compute_dtype,
    is_jax,
    namespace,
    plain,
    put,
    store,
    unit_stride,
)
from kdacore_reference.gates import beta_forward, gate_forward, gate_parameters, l2_scale
from kdacore_reference.plan import CHUNK, Slab, Unit


class Flat(NamedTuple):
    """The caller's arrays with batch and tokens as one axis of rows, and the gate's parameters per head."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    """After its sigmoid, in the compute dtype."""
    a: Array | None
    """``exp(A_log)`` as ``[HV, 1, 1]``."""
    bias: Array | None
    """``dt_bias`` as ``[HV, 1, K or 1]``."""
    dtype: Any
    """What is computed in."""


def flatten(request: Request, inputs: Any) -> Flat:
    xp = namespace(inputs.q)
    dtype = compute_dtype(xp, request)
    a, bias = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    tail = (request.HV, 1, -1)
    return Flat(
        q=flat_rows(inputs.q),
        k=flat_rows(inputs.k),
        v=flat_rows(inputs.v),
        g=flat_rows(inputs.g),
        beta=beta_forward(cast(flat_rows(inputs.beta), dtype), request),
        a=None if a is None else xp.reshape(a, tail),
        bias=None if bias is None else xp.reshape(bias, tail),
        dtype=dtype,
    )


def flat_rows(array: Array) -> Array:
    """``[B, T, ...]`` as ``[B*T, ...]``, the last axis dense."""
    array = unit_stride(plain(array))
    return namespace(array).reshape(array, (-1, *array.shape[2:]))


KEYS = (..., 0, slice(None))
QUERIES = (..., 1, slice(None))


class Tokens(NamedTuple):
    """One slab: ``n`` blocks of ``C`` tokens, ``H`` query/key heads of the unit, ``G`` value heads for each."""

    kq: Array
    """``[n, H, 1, C, 2, K]``: negated keys (0) and queries times the scale (1), normalised when asked.

    What the keys read from a state is subtracted from ``v``, what the queries read is the output.
    """
    v: Array
    """``[n, H, G, C, V]``; perhaps the caller's memory."""
    beta: Array
    """``[n, H, G, C, 1]``; 0 at padding."""
    decay: Array
    """``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate; 1 at padding."""
    kq_scale: Array
    """What keys and queries were multiplied by: -1 and the scale, over their norms with l2norm; ``[n, H, C, 2, 1]`` or
    ``[2, 1]``."""
    log_decay: Array
    """``[n, HV, C, K or 1]``; 0 at padding."""
    raw_g: Array
    """As given, for the backward; perhaps the caller's memory."""


def slab_tokens(request: Request, flat: Flat, unit: Unit, slab: Slab) -> Tokens:
    """Gathers, widens, normalises and gates one slab.

    Heads stay inside tokens in memory, as the caller has them: a factor that is the same for several tokens then meets
    runs of ``heads * K`` elements.
    """
    xp = namespace(flat.q)
    H, G = unit.heads.stop - unit.heads.start, request.HV // request.H
    mask = mask_of(slab, flat.q)
    # The caller's dtype is widened once the rows are gathered; half precision never enters arithmetic.
    kq = xp.empty((slab.blocks, CHUNK, 2, H, request.K), dtype=flat.dtype, device=beside(flat.q))
    kq = xp.permute_dims(kq, (0, 3, 1, 2, 4))
    k, q = (gather(x, slab, unit.heads, flat.dtype) for x in (flat.k, flat.q))
    kq_scale = key_and_query(-1.0, request.scale, kq)
    if request.qk_l2norm:
        kq_scale = xp.stack([l2_scale(k), l2_scale(q)], axis=-2) * kq_scale
    kq = store(kq, KEYS, xp.multiply, k, kq_scale[KEYS])
    kq = store(kq, QUERIES, xp.multiply, q, kq_scale[QUERIES])

    def grouped(array: Array) -> Array:
        return xp.reshape(array, (slab.blocks, H, G, CHUNK, -1))

    g = flat.g[..., None] if request.scalar_gate else flat.g
    raw_g = gather(g, slab, unit.value_heads, flat.dtype)
    log_decay = masked(gate_forward(request, raw_g, *gate_slices(flat, unit)), mask)
    return Tokens(
        kq=kq[:, :, None, ...],
        v=grouped(gather(flat.v, slab, unit.value_heads, flat.dtype)),
        beta=grouped(gather(flat.beta[..., None], slab, unit.value_heads, flat.dtype, mask)),
        decay=grouped(xp.exp(log_decay)),
        kq_scale=kq_scale,
        log_decay=log_decay,
        raw_g=raw_g,
    )


def key_and_query(key: float, query: float, like: Array) -> Array:
    """A factor for keys and one for queries, ``[2, 1]``."""
    return namespace(like).asarray([[key], [query]], dtype=like.dtype, device=beside(like))


def gate_slices(flat: Flat, unit: Unit) -> tuple[Array | None, Array | None]:
    """``exp(A_log)`` and ``dt_bias`` of the unit's value heads, to broadcast over ``[n, HV, C, K]``."""
    a = None if flat.a is None else flat.a[unit.value_heads, ...]
    return a, None if flat.bias is None else flat.bias[unit.value_heads, ...]


def gather(flat: Array, slab: Slab, heads: slice, dtype: Any, mask: Array | None = None) -> Array:
    """``[rows, heads, X]`` to ``[n, heads, C, X]``, perhaps a view; with ``mask``, padding becomes 0."""
    xp = namespace(flat)
    part = flat[:, heads, ...][index(slab.rows, flat), ...]
    part = xp.reshape(part, (slab.blocks, CHUNK, *part.shape[1:]))
    return masked(xp.permute_dims(cast(part, dtype), (0, 2, 1, 3)), mask)


def scatter_sum(target: Array, slab: Slab, heads: slice, x: Array, y: Array) -> Array:
    """:func:`scatter` of ``x + y``; overwrites ``x``."""
    rows = slab.rows
    if isinstance(rows, slice) and not is_jax(target) and target.dtype == x.dtype:
        xp = namespace(x)
        n, _, C, _ = x.shape
        view = xp.reshape(target[rows, ...], (n, C, *target.shape[1:]))[:, :, heads, ...]
        store(xp.permute_dims(view, (0, 2, 1, 3)), ..., xp.add, x, y)
        return target
    x += y
    return scatter(target, slab, heads, x)


def scatter(target: Array, slab: Slab, heads: slice, values: Array) -> Array:
    """Writes ``values`` ``[n, heads, C, X]`` to the rows and heads of ``target`` ``[rows, heads, X]``."""
    xp = namespace(values)
    by_block = cast(xp.permute_dims(values, (0, 2, 1, 3)), target.dtype)
    rows = slab.rows
    if isinstance(rows, slice) and not is_jax(target):
        view = xp.reshape(target[rows, ...], (*by_block.shape[:2], *target.shape[1:]))
        view[:, :, heads, ...] = by_block
        return target
    by_row = xp.reshape(by_block, (-1, *by_block.shape[2:]))
    if slab.real is not None and not isinstance(rows, slice):
        rows, by_row = rows[slab.real], by_row[index(slab.real, values), ...]
    return put(target, (index(rows, values), heads), by_row)


def index(numbers: Any, like: Array) -> Any:
    """Rows as something ``like`` can be indexed with: a slice stays one."""
    if isinstance(numbers, slice) or is_numpy_array(like):
        return numbers
    return namespace(like).asarray(numbers, device=beside(like))


def empty_rows(request: Request, like: Array, heads: int, width: int) -> Array:
    """Room for ``[B*T, heads, width]`` beside ``like`` and of its dtype; every row is some sequence's."""
    shape = (request.B * request.T, heads, width)
    return namespace(like).empty(shape, dtype=like.dtype, device=beside(like))


def mask_of(slab: Slab, like: Array) -> Array | None:
    """True at real tokens, ``[n, 1, C, 1]``; None when there is no padding."""
    if slab.real is None:
        return None
    xp = namespace(like)
    flags = [False] * (slab.blocks * CHUNK)
    for i in slab.real.tolist():
        flags[i] = True
    return xp.reshape(xp.asarray(flags, device=beside(like)), (slab.blocks, 1, CHUNK, 1))


def masked(array: Array, mask: Array | None) -> Array:
    if mask is None:
        return array
    xp = namespace(array)
    return xp.where(mask, array, xp.zeros_like(array))
