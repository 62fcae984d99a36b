"""The chunk pipeline as five ops, each dispatched on its own (contract, section 6). Not differentiable.

``C`` is ``chunk_size`` (16, 32 or 64). Chunks start anew at each sequence of a pack; rows past a sequence's end
inside its last chunk are neither read nor written. Intermediates carry the inputs' dtype, or float32 where a
backend keeps more; every stage accepts both. ``NT`` is ``ceil(T / C)``, or the bound ``T // C + N`` when packed,
the sequences' chunks one after another and the unused ones zero.
"""

from __future__ import annotations

from typing import Any

from kdacore.dispatch import call as dispatch
from kdacore.ops import OPS
from kdacore.types import Array


def kda_chunk_gate(
    g: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Decay summed from each chunk's first row, inclusive, in log2, float32.

    Args:
        g: ``[B, T, HV, K]``: the raw gate input when ``A_log`` or ``lower_bound`` is given, else the log decay
            (natural log).
        A_log, dt_bias, lower_bound: as :func:`kdacore.kda_gate`.

    Returns:
        ``gc [B, T, HV, K]`` float32.
    """
    arrays = (g, A_log, dt_bias, cu_seqlens, cu_seqlens_cpu)
    return dispatch.call(OPS["kda_chunk_gate"], arrays, (lower_bound, chunk_size), backend)


def kda_chunk_intra(
    q: Array,
    k: Array,
    gc: Array,
    beta: Array,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    backend: str | None = None,
) -> Any:
    """The interactions inside each chunk and the inverse of its triangular system.

    Args:
        q, k: ``[B, T, H, K]``, as the recurrence uses them (already normalised).
        gc: ``[B, T, HV, K]`` from :func:`kda_chunk_gate`.
        beta: ``[B, T, HV]``, as the recurrence uses it.

    Returns:
        ``Aqk [B, T, HV, C]``: ``scale * q_i . (k_j 2^(gc_i - gc_j))`` for j <= i; ``Akk [B, T, HV, C]``: the
        inverse of ``I + tril(beta_i k_i . (k_j 2^(gc_i - gc_j)), -1)``. Unused columns are 0.
    """
    arrays = (q, k, gc, beta, cu_seqlens, cu_seqlens_cpu)
    return dispatch.call(OPS["kda_chunk_intra"], arrays, (scale, chunk_size), backend)


def kda_recompute_w_u(
    k: Array,
    v: Array,
    beta: Array,
    gc: Array,
    Akk: Array,
    *,
    q: Array | None = None,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    backend: str | None = None,
) -> Any:
    """Effective keys and values of each chunk.

    Returns:
        ``w = Akk (beta k 2^gc)`` ``[B, T, HV, K]``, ``u = Akk (beta v)`` ``[B, T, HV, V]``,
        ``kg = k 2^(gc_last - gc)``, and ``qg = q 2^gc`` if q was given, else None.
    """
    arrays = (k, v, beta, gc, Akk, q, cu_seqlens, cu_seqlens_cpu)
    return dispatch.call(OPS["kda_recompute_w_u"], arrays, (chunk_size,), backend)


def delta_rule_chunk_state(
    kg: Array,
    w: Array,
    u: Array,
    gc: Array,
    *,
    initial_state: Array | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    backend: str | None = None,
) -> Any:
    """The recurrence from chunk to chunk.

    Returns:
        ``h [B, NT, HV, K, V]``: the state at each chunk's start; ``v_new = u - w h`` ``[B, T, HV, V]``;
        ``final_state`` (laid out by ``state_v_first``, as ``initial_state``).
    """
    arrays = (kg, w, u, gc, initial_state, cu_seqlens, cu_seqlens_cpu)
    return dispatch.call(OPS["delta_rule_chunk_state"], arrays, (chunk_size, state_v_first), backend)


def kda_chunk_output(
    q: Array,
    v_new: Array,
    gc: Array,
    Aqk: Array,
    h: Array,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    backend: str | None = None,
) -> Array:
    """``o = scale * (q 2^gc) h + Aqk v_new``, ``[B, T, HV, V]`` in v_new's dtype."""
    arrays = (q, v_new, gc, Aqk, h, cu_seqlens, cu_seqlens_cpu)
    return dispatch.call(OPS["kda_chunk_output"], arrays, (scale, chunk_size), backend)
