"""The public functions: they bind a call's arguments and hand them to dispatch.

Written by ``python -m codegen.public_api`` from kdacore/ops and codegen/api.py.in; do not edit.

Source of the operation: Kimi Linear, arXiv 2510.26692 (KDA); Gated Delta Networks, arXiv 2412.06464 (GDN).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kdacore.dispatch import call as dispatch
from kdacore.ops import OPS
from kdacore.ops.definition import arrays_of as _arrays_of
from kdacore.types import Array, Selection

_CHUNK_KDA = OPS["chunk_kda"]
_CHUNK_GDN = OPS["chunk_gated_delta_rule"]
_RECURRENT_KDA = OPS["fused_recurrent_kda"]
_RECURRENT_GDN = OPS["fused_recurrent_gated_delta_rule"]
_DECODE_KDA = OPS["fused_decode_kda"]
_DECODE_GDN = OPS["fused_decode_gated_delta_rule"]
_COMMIT = OPS["commit_records"]
_GATE = OPS["kda_gate"]


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *extra: object,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    checkpoint_offsets: Array | None = None,
    checkpoint_indices: Array | None = None,
    out: Array | None = None,
    disable_recompute: bool = False,
    checkpoint_every: int | None = None,
    cp: Any = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """Kimi Delta Attention over whole sequences, chunk by chunk: training and prefill.

    For each sequence and value head, with a state ``S[K, V]`` kept in at least float32:

        S   = exp(g_t)[:, None] * S                      # per-channel decay, natural log, g_t <= 0
        S   = S + beta_t * outer(k_t, v_t - k_t @ S)     # delta rule
        o_t = scale * (q_t @ S)

    Args:
        q, k: ``[B, T, H, K]``, float32, bfloat16 or float16, one dtype; float64 on the reference backend.
        v: ``[B, T, HV, V]``, dtype of q. ``HV`` is a multiple of ``H``; value head i reads head
            ``i // (HV // H)`` of q and k.
        g: ``[B, T, HV, K]``, float32, bfloat16 or float16; float64 in calls of float64. The log decay
            (natural log, <= 0), or the raw gate input with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64. In (0, 1), or logits
            with ``use_beta_sigmoid_in_kernel``.
        A_log: ``[HV]`` float32 (float64 is taken too). Needed by the unbounded gate, optional (zeros) with
            ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV*K]``, any float dtype, added to the raw gate input.
        scale: factor on the output; ``K ** -0.5`` when None. 0, or 1e-30 to 1e30 in size.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), float32, bfloat16 or
            float16; float64 in calls of float64. Zeros when None.
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by ``x / sqrt(sum(x*x) + 1e-6)`` over K.
        use_gate_in_kernel: compute the log decay from ``x = g + dt_bias``: ``-exp(A_log) * softplus(x)``, or
            ``lower_bound * sigmoid(exp(A_log) * x)`` when ``lower_bound`` is given.
        use_beta_sigmoid_in_kernel: apply ``sigmoid`` to beta, in float32.
        allow_neg_eigval: ``2 * sigmoid(beta)`` instead.
        safe_gate: promise that every log decay lies in ``[lower_bound, 0]``; needs ``lower_bound``. A
            property of the model, not a speed switch.
        lower_bound: the bound, in ``[-5, 0)`` with ``safe_gate``, else any negative number of 1e-30 to 1e30
            in size.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N+1]`` int32 or int64 offsets of packed sequences, from 0 to at most T; then
            ``B == 1``. Sequences may be empty. Tokens from ``cu_seqlens[-1]`` on are padding and belong to no
            sequence: they are not read, their rows of a new ``o`` and their gradients are zero, and ``out``
            is not written there.
        cu_seqlens_cpu: ``[N+1]`` int32 or int64: the same values on the host (NumPy, or the kind of the
            others), for backends that plan with them.
        state_indices: ``[N]`` int32 or int64: ``initial_state`` is a pool ``[P, HV, K, V]`` whose rows may
            have any stride, and sequence n starts from this row. A negative index, or ``null_index``, is no
            slot: the sequence is padding; its ``o`` and final state are zero and nothing is written for it.
        has_initial_state: ``[N]`` bool; sequences where it is False start from zeros, whatever their row
            holds.
        inplace_state: write final states into the pool: into row ``write_indices[n]`` of ``write_pool``. Rows
            not named stay bitwise as they were. JAX arrays cannot be written: there the updated pool is
            returned as the final state.
        null_index: a row number, besides the negative ones, that names no slot.
        write_indices: ``[N]`` int32 or int64 rows that are written, ``state_indices`` by default. Entries
            that name no slot write nothing. A row that one sequence writes must not be read or written by
            another.
        write_pool: ``[P', HV, K, V]``, the dtypes of ``initial_state``, the same where both are given: the
            pool that is written, ``initial_state`` by default.
        checkpoint_offsets: ``[C]`` int32 or int64 positions of tokens in the pack (``B == 1``), each a
            multiple of 16 from the start of the sequence that holds it: the state before that token is
            written to the pool, with ``inplace_state``.
        checkpoint_indices: ``[C]`` int32 or int64 rows for these states; an entry that names no slot writes
            nothing.
        out: ``[B, T, HV, V]`` in v's dtype, written and returned as ``o``. Neither it nor a pool that is
            written may overlap itself or another argument.
        disable_recompute: a backend may keep what its backward would otherwise recompute, in more memory: the
            same results within the same bounds, and faster where that pays. Of kdacore's own backends
            ``pallas`` does, and ``cuda`` in eager torch calls with 13 or more sequences times value heads
            (2084 bytes a token and value head; for when that pays see docs/guide/calling.md). For the others
            it changes nothing.
        checkpoint_every: also return the state at the start of every block of this many tokens, a multiple of
            64.
        cp: the ranks that a row is split over, each of which makes this call with its own T tokens: rank r
            has tokens ``[r*T, (r+1)*T)`` of the whole row. A ``torch.distributed`` process group or a
            ``DeviceMesh`` of one dimension; with JAX, inside ``shard_map``, the name of a mesh axis. Then
            ``cu_seqlens`` are offsets over the whole row, the same on every rank; ``initial_state`` and
            ``final_state`` are those of all N sequences on every rank; and gradients of what every rank holds
            (``initial_state``, ``A_log``, ``dt_bias``) are each rank's share of a sum. See
            docs/guide/long-context.md.
        backend: force one backend; see :func:`kdacore.explain` for what each can serve.

    Returns:
        ``(o, final_state)``, or ``(o, final_state, checkpoints)`` with ``checkpoint_every``. ``o`` is
        ``[B, T, HV, V]`` in v's dtype. ``final_state`` has the shape and dtype of ``initial_state`` (float32
        without one), or is None unless asked for; with ``inplace_state`` it is the pool that was written.
        Checkpoints are ``[B, ceil(T / every), HV, K, V]``; packed,
        ``[T // every + N, HV, K, V]``, the sequences' blocks one after another, unused rows zero. They carry no
        gradient. Gradients flow when no pool, in-place or ``out`` argument is used.

    Raises:
        ContractError: an argument breaks the contract; the message names it.
        UnsupportedError: the forced backend cannot serve this call; the message lists every reason.
        BackendBuildError: a kernel failed to build; the message carries the compiler's output.

    Source: arXiv 2510.26692, section 3.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = (rng.standard_normal((1, 100, 2, 16), dtype=np.float32) for _ in range(3))
        >>> g = -rng.random((1, 100, 2, 16), dtype=np.float32)
        >>> beta = rng.random((1, 100, 2), dtype=np.float32)
        >>> o, state = kdacore.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 100, 2, 16), (1, 2, 16, 16))
    """
    if extra or unknown:
        raise _unknown_arguments("chunk_kda", extra, unknown)
    return _chunk(
        _CHUNK_KDA,
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            has_initial_state,
            write_indices,
            write_pool,
            checkpoint_offsets,
            checkpoint_indices,
            out,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            disable_recompute,
            checkpoint_every,
            cp,
            inplace_state,
            null_index,
        ),
        backend,
        cp,
    )


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *extra: object,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    checkpoint_offsets: Array | None = None,
    checkpoint_indices: Array | None = None,
    out: Array | None = None,
    disable_recompute: bool = False,
    checkpoint_every: int | None = None,
    cp: Any = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """The gated delta rule over whole sequences: :func:`chunk_kda` with one decay for each head.

    Args:
        g: ``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64: one log decay (natural
            log, <= 0) for each token and head, or its raw gate input.
        dt_bias: ``[HV]``, any float dtype.

    Everything else, the results and the errors are those of :func:`chunk_kda`.

    Source: arXiv 2412.06464.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = (rng.standard_normal((1, 70, 2, 16), dtype=np.float32) for _ in range(3))
        >>> g, beta = -rng.random((1, 70, 2), dtype=np.float32), rng.random((1, 70, 2), dtype=np.float32)
        >>> o, _ = kdacore.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        (1, 70, 2, 16)
    """
    if extra or unknown:
        raise _unknown_arguments("chunk_gated_delta_rule", extra, unknown)
    return _chunk(
        _CHUNK_GDN,
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            has_initial_state,
            write_indices,
            write_pool,
            checkpoint_offsets,
            checkpoint_indices,
            out,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            disable_recompute,
            checkpoint_every,
            cp,
            inplace_state,
            null_index,
        ),
        backend,
        cp,
    )


def fused_recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *extra: object,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    read_only_state: bool = False,
    records: tuple[Array, Array, Array] | None = None,
    record_indices: Array | None = None,
    num_replayed: Array | None = None,
    out: Array | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """Kimi Delta Attention token by token, for decoding: a few tokens, one launch, states in a pool.

    The recurrence and the arguments shared with :func:`chunk_kda` mean the same here.

    Args:
        initial_state: the states ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or with
            ``state_indices`` a pool ``[P, HV, K, V]`` whose rows may have any stride; float32, bfloat16 or
            float16; float64 in calls of float64.
        state_indices: int32 or int64. ``[N]``: the pool row of each sequence. ``[N, W]`` with
            ``num_accepted_tokens``: a row for each candidate token. A sequence that would start from a
            negative index, or from ``null_index``, has no slot and is padding: its ``o`` and final state are
            zero and nothing is written for it.
        num_accepted_tokens: ``[N]`` int32 or int64, for speculative decoding: sequence n starts from the
            state in row ``state_indices[n, num_accepted_tokens[n] - 1]`` (from zeros for 0).
        has_initial_state: ``[N]`` bool; sequences where it is False start from zeros, whatever their row
            holds.
        inplace_state: write final states into the pool; rows not named stay bitwise as they were. JAX arrays
            cannot be written: there the updated pool is returned as the final state.
        null_index: a row number, besides the negative ones, that names no slot.
        write_indices: int32 or int64 rows that ``inplace_state`` writes, ``state_indices`` by default.
            ``[N]``: the final state of each sequence. ``[N, W]``: the state after token t goes to row
            ``write_indices[n, t]``. Entries that name no slot write nothing. A row that one sequence writes
            must not be read or written by another.
        write_pool: ``[P', HV, K, V]``, the dtypes of ``initial_state``, the same where both are given: the
            pool that is written, ``initial_state`` by default.
        read_only_state: compute outputs for 1 to 16 candidate tokens and write no state anywhere.
        records: ``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV, K])``, float32 (float64 in calls
            of float64), any strides; messages name them ``record_update``, ``record_key`` and
            ``record_decay``. What each token of a call does to the state is written here, ``n`` tokens at
            most, and the state stays as it was before them. Needs ``state_indices [N]``, ``record_indices``
            and ``inplace_state``.
        record_indices: ``[N]`` int32 or int64: the row of the records of each sequence. Where it is negative,
            or ``null_index``, the sequence has none: it decodes and writes its state as without records.
        num_replayed: ``[N]`` int32 or int64, 0 to n: how many records of its row, the first ones, precede
            this call (candidates that were accepted); all 0 when None. They are applied to the state first,
            which is rounded to the pool's dtype and written. 0 after a prefill, a plain decode or a
            :func:`commit_records`.
        out: ``[B, T, HV, V]`` in v's dtype, written and returned as ``o``. Neither it nor a pool written in
            place may overlap itself or another argument.

    Returns:
        ``(o, final_state)``. ``final_state`` is None unless ``output_final_state``; with ``inplace_state`` it is
        the pool that was written. With ``records`` of JAX arrays, which cannot be written, the new records follow.

    Gradients flow when no pool, in-place or ``out`` option is used.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.

    Source: arXiv 2510.26692, section 3.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> pool = np.zeros((4, 2, 16, 16), np.float32)
        >>> q, k, v = (rng.standard_normal((2, 1, 2, 16), dtype=np.float32) for _ in range(3))
        >>> g, beta = -rng.random((2, 1, 2, 16), dtype=np.float32), rng.random((2, 1, 2), dtype=np.float32)
        >>> o, _ = kdacore.fused_recurrent_kda(q, k, v, g, beta, initial_state=pool, inplace_state=True,
        ...                                    state_indices=np.array([3, 1]))
        >>> [bool(pool[i].any()) for i in range(4)]
        [False, True, False, True]
    """
    if extra or unknown:
        raise _unknown_arguments("fused_recurrent_kda", extra, unknown)
    record_update, record_key, record_decay = _arrays_of("fused_recurrent_kda", "records", records, 3)
    return _recurrent(
        _RECURRENT_KDA,
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            num_accepted_tokens,
            out,
            has_initial_state,
            write_indices,
            write_pool,
            record_update,
            record_key,
            record_decay,
            record_indices,
            num_replayed,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            inplace_state,
            null_index,
            read_only_state,
        ),
        backend,
    )


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *extra: object,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    read_only_state: bool = False,
    records: tuple[Array, Array, Array] | None = None,
    record_indices: Array | None = None,
    num_replayed: Array | None = None,
    out: Array | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """The gated delta rule token by token: :func:`fused_recurrent_kda` with one decay for each head.

    Args:
        g: ``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64: one log decay (natural
            log, <= 0) for each token and head, or its raw gate input.
        dt_bias: ``[HV]``, any float dtype.
        records: ``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV])``, float32 (float64 in calls of
            float64), any strides: as the records of :func:`fused_recurrent_kda`, with one decay a head.

    Everything else, the results and the errors are those of :func:`fused_recurrent_kda`.

    Source: arXiv 2412.06464.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = (rng.standard_normal((2, 1, 2, 16), dtype=np.float32) for _ in range(3))
        >>> g, beta = -rng.random((2, 1, 2), dtype=np.float32), rng.random((2, 1, 2), dtype=np.float32)
        >>> o, state = kdacore.fused_recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        ((2, 1, 2, 16), (2, 2, 16, 16))
    """
    if extra or unknown:
        raise _unknown_arguments("fused_recurrent_gated_delta_rule", extra, unknown)
    record_update, record_key, record_decay = _arrays_of(
        "fused_recurrent_gated_delta_rule", "records", records, 3
    )
    return _recurrent(
        _RECURRENT_GDN,
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            num_accepted_tokens,
            out,
            has_initial_state,
            write_indices,
            write_pool,
            record_update,
            record_key,
            record_decay,
            record_indices,
            num_replayed,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            inplace_state,
            null_index,
            read_only_state,
        ),
        backend,
    )


def fused_decode_kda(
    x: Array,
    g: Array,
    beta: Array,
    initial_state: Array,
    *extra: object,
    conv_weight: Array | None = None,
    conv_bias: Array | None = None,
    conv_state: Array | None = None,
    conv_indices: Array | None = None,
    conv_windows: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    read_only_state: bool = False,
    records: tuple[Array, Array, Array] | None = None,
    record_indices: Array | None = None,
    num_replayed: Array | None = None,
    z: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float | None = 1e-05,
    norm_activation: str = "sigmoid",
    out: Array | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """The step that servers decode with: short causal convolution, SiLU, Kimi Delta Attention, gated norm.

    Equal, within the bounds of numerics, to the chain of its parts in float32 without rounding between them:

        y = silu(conv(x) + conv_bias)                    # each channel over its last w tokens
        q, k, v = y                                      # H*K, H*K and HV*V channels
        o = fused_recurrent_kda(q, k, v, g, beta)        # l2norm, gate and sigmoid by the flags
        o = o / sqrt(mean(o*o) + norm_eps) * norm_weight * act(z)

    The convolution's last tokens are kept in ``conv_state`` as states are in their pool. Not differentiable.

    Args:
        x: ``[B, T, D]``, float32, bfloat16 or float16; float64 on the reference backend: the channels of q, k
            and v in that order, ``D = 2*H*K + HV*V``, before the convolution. 1 to 16 tokens a sequence. HV,
            K and V are those of ``initial_state``, and H follows.
        g: ``[B, T, HV, K]``, float32, bfloat16 or float16; float64 in calls of float64. The log decay
            (natural log, <= 0), or the raw gate input with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64. In (0, 1), or logits
            with ``use_beta_sigmoid_in_kernel``.
        initial_state: the states ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or with
            ``state_indices`` a pool ``[P, HV, K, V]`` whose rows may have any stride; float32, bfloat16 or
            float16; float64 in calls of float64.
        conv_weight: ``[D, w]``, w of 2 to 4, float32, bfloat16 or float16; float64 in calls of float64: a
            causal convolution of each channel, then SiLU. None: x comes convolved, and there is no
            ``conv_state``.
        conv_bias: ``[D]``, float32, bfloat16 or float16; float64 in calls of float64, added before the SiLU.
        conv_state: the pool ``[P, D, L]`` of x before the convolution, dtype of x, any strides,
            ``L >= w - 1``: columns 0 to w - 2 hold the last tokens of each sequence, oldest first. Written
            with ``inplace_state``. Candidates that write their states, or records, need ``L >= w + T - 2``,
            unless ``conv_windows`` is given: their tokens stay in the row, and the next call reads from
            column ``num_accepted_tokens - 1``, or ``num_replayed - 1``.
        conv_indices: ``[N]`` int32 or int64 rows of ``conv_state``; ``state_indices``, or its first column,
            by default. An entry that names no slot reads zeros and writes nothing.
        conv_windows: ``[R, T, w - 1, D]``, dtype of x: receives the window after each candidate, and
            ``conv_state`` stays but for what is replayed. Row ``record_indices[n]`` for sequence n, row n
            without. A next call that gives ``num_accepted_tokens`` or ``num_replayed`` reads its window here.
        A_log: ``[HV]`` float32 (float64 is taken too). Needed by the unbounded gate, optional (zeros) with
            ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV*K]``, any float dtype, added to the raw gate input.
        scale: factor on the output; ``K ** -0.5`` when None. 0, or 1e-30 to 1e30 in size.
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by ``x / sqrt(sum(x*x) + 1e-6)`` over K.
        use_gate_in_kernel: compute the log decay from ``x = g + dt_bias``: ``-exp(A_log) * softplus(x)``, or
            ``lower_bound * sigmoid(exp(A_log) * x)`` when ``lower_bound`` is given.
        use_beta_sigmoid_in_kernel: apply ``sigmoid`` to beta, in float32.
        allow_neg_eigval: ``2 * sigmoid(beta)`` instead.
        safe_gate: promise that every log decay lies in ``[lower_bound, 0]``; needs ``lower_bound``. A
            property of the model, not a speed switch.
        lower_bound: the bound, in ``[-5, 0)`` with ``safe_gate``, else any negative number of 1e-30 to 1e30
            in size.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N+1]`` int32 or int64 offsets of packed sequences, from 0 to at most T; then
            ``B == 1``. Sequences may be empty. Tokens from ``cu_seqlens[-1]`` on are padding and belong to no
            sequence: they are not read, their rows of a new ``o`` and their gradients are zero, and ``out``
            is not written there.
        cu_seqlens_cpu: ``[N+1]`` int32 or int64: the same values on the host (NumPy, or the kind of the
            others), for backends that plan with them.
        state_indices: int32 or int64. ``[N]``: the pool row of each sequence. ``[N, W]`` with
            ``num_accepted_tokens``: a row for each candidate token. A sequence that would start from a
            negative index, or from ``null_index``, has no slot and is padding: its ``o`` and final state are
            zero and nothing is written for it.
        num_accepted_tokens: ``[N]`` int32 or int64, for speculative decoding: sequence n starts from the
            state in row ``state_indices[n, num_accepted_tokens[n] - 1]`` (from zeros for 0).
        has_initial_state: ``[N]`` bool; sequences where it is False start from zeros, whatever their row
            holds.
        inplace_state: write final states into the pool; rows not named stay bitwise as they were. JAX arrays
            cannot be written: there the updated pool is returned as the final state.
        null_index: a row number, besides the negative ones, that names no slot.
        write_indices: int32 or int64 rows that ``inplace_state`` writes, ``state_indices`` by default.
            ``[N]``: the final state of each sequence. ``[N, W]``: the state after token t goes to row
            ``write_indices[n, t]``. Entries that name no slot write nothing. A row that one sequence writes
            must not be read or written by another.
        write_pool: ``[P', HV, K, V]``, the dtypes of ``initial_state``, the same where both are given: the
            pool that is written, ``initial_state`` by default.
        read_only_state: compute outputs for 1 to 16 candidate tokens and write no state anywhere.
        records: ``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV, K])``, float32 (float64 in calls
            of float64), any strides; messages name them ``record_update``, ``record_key`` and
            ``record_decay``. What each token of a call does to the state is written here, ``n`` tokens at
            most, and the state stays as it was before them. Needs ``state_indices [N]``, ``record_indices``
            and ``inplace_state``.
        record_indices: ``[N]`` int32 or int64: the row of the records of each sequence. Where it is negative,
            or ``null_index``, the sequence has none: it decodes and writes its state as without records.
        num_replayed: ``[N]`` int32 or int64, 0 to n: how many records of its row, the first ones, precede
            this call (candidates that were accepted); all 0 when None. They are applied to the state first,
            which is rounded to the pool's dtype and written. 0 after a prefill, a plain decode or a
            :func:`commit_records`.
        z: ``[B, T, HV, V]``, float32, bfloat16 or float16; float64 in calls of float64: the normalised output
            is multiplied by its activation. Needs ``norm_weight``.
        norm_weight: ``[V]`` or ``[HV, V]``, float32, bfloat16 or float16; float64 in calls of float64: o
            becomes ``o / sqrt(mean(o*o) + norm_eps) * norm_weight``, the mean over V. None: o as it is.
        norm_eps: added to the mean square in the norm; 1e-30 to 1e30. Only with ``norm_weight``.
        norm_activation: ``sigmoid`` or ``silu`` of z. Only with ``z``.
        out: ``[B, T, HV, V]`` in x's dtype, written and returned as ``o``. Neither it nor what else the call
            writes may overlap itself or another argument.
        backend: force one backend; see :func:`kdacore.explain` for what each can serve.

    Returns:
        ``(o, final_state)``. ``o`` is ``[B, T, HV, V]`` in x's dtype. ``final_state`` is None unless
        ``output_final_state``; with ``inplace_state`` it is the pool that was written. JAX arrays cannot be written:
        with ``inplace_state`` the new ones follow, of those that were given ``conv_state``, ``conv_windows`` and
        ``records``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.

    Source: arXiv 2510.26692, section 4.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((2, 1, 3 * 2 * 16), dtype=np.float32)
        >>> g, beta = -rng.random((2, 1, 2, 16), dtype=np.float32), rng.random((2, 1, 2), dtype=np.float32)
        >>> pool, conv = np.zeros((5, 2, 16, 16), np.float32), np.zeros((5, 96, 3), np.float32)
        >>> o, _ = kdacore.fused_decode_kda(
        ...     x, g, beta, pool, conv_weight=rng.standard_normal((96, 4), dtype=np.float32), conv_state=conv,
        ...     state_indices=np.array([3, 1]), inplace_state=True, use_qk_l2norm_in_kernel=True,
        ...     norm_weight=np.ones(16, np.float32), z=rng.standard_normal((2, 1, 2, 16), dtype=np.float32))
        >>> o.shape, [bool(pool[i].any() and conv[i, :, 2].any()) for i in range(5)]
        ((2, 1, 2, 16), [False, True, False, True, False])
    """
    if extra or unknown:
        raise _unknown_arguments("fused_decode_kda", extra, unknown)
    record_update, record_key, record_decay = _arrays_of("fused_decode_kda", "records", records, 3)
    return _recurrent(
        _DECODE_KDA,
        (
            x,
            g,
            beta,
            initial_state,
            A_log,
            dt_bias,
            conv_weight,
            conv_bias,
            conv_state,
            conv_indices,
            conv_windows,
            z,
            norm_weight,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            num_accepted_tokens,
            out,
            has_initial_state,
            write_indices,
            write_pool,
            record_update,
            record_key,
            record_decay,
            record_indices,
            num_replayed,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            inplace_state,
            null_index,
            read_only_state,
            norm_eps,
            norm_activation,
        ),
        backend,
    )


def fused_decode_gated_delta_rule(
    x: Array,
    g: Array,
    beta: Array,
    initial_state: Array,
    *extra: object,
    conv_weight: Array | None = None,
    conv_bias: Array | None = None,
    conv_state: Array | None = None,
    conv_indices: Array | None = None,
    conv_windows: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    state_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    has_initial_state: Array | None = None,
    inplace_state: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    write_pool: Array | None = None,
    read_only_state: bool = False,
    records: tuple[Array, Array, Array] | None = None,
    record_indices: Array | None = None,
    num_replayed: Array | None = None,
    z: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float | None = 1e-05,
    norm_activation: str = "silu",
    out: Array | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """The step that servers decode with, of the gated delta rule: :func:`fused_decode_kda` with one decay for each
    head.

    Args:
        g: ``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64: one log decay (natural
            log, <= 0) for each token and head, or its raw gate input.
        dt_bias: ``[HV]``, any float dtype.
        records: ``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV])``, float32 (float64 in calls of
            float64), any strides: as the records of :func:`fused_recurrent_kda`, with one decay a head.

    Everything else, the results and the errors are those of :func:`fused_decode_kda`.

    Source: arXiv 2412.06464.

    Examples:
        >>> import numpy as np, kdacore
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((2, 1, 2 * 1 * 16 + 2 * 16), dtype=np.float32)
        >>> g, beta = -rng.random((2, 1, 2), dtype=np.float32), rng.random((2, 1, 2), dtype=np.float32)
        >>> states = np.zeros((2, 2, 16, 16), np.float32)
        >>> o, final = kdacore.fused_decode_gated_delta_rule(x, g, beta, states, output_final_state=True)
        >>> o.shape, final.shape
        ((2, 1, 2, 16), (2, 2, 16, 16))
    """
    if extra or unknown:
        raise _unknown_arguments("fused_decode_gated_delta_rule", extra, unknown)
    record_update, record_key, record_decay = _arrays_of(
        "fused_decode_gated_delta_rule", "records", records, 3
    )
    return _recurrent(
        _DECODE_GDN,
        (
            x,
            g,
            beta,
            initial_state,
            A_log,
            dt_bias,
            conv_weight,
            conv_bias,
            conv_state,
            conv_indices,
            conv_windows,
            z,
            norm_weight,
            cu_seqlens,
            cu_seqlens_cpu,
            state_indices,
            num_accepted_tokens,
            out,
            has_initial_state,
            write_indices,
            write_pool,
            record_update,
            record_key,
            record_decay,
            record_indices,
            num_replayed,
        ),
        (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            state_v_first,
            inplace_state,
            null_index,
            read_only_state,
            norm_eps,
            norm_activation,
        ),
        backend,
    )


def commit_records(
    initial_state: Array,
    state_indices: Array,
    records: tuple[Array, Array, Array],
    record_indices: Array,
    num_replayed: Array,
    *extra: object,
    conv_state: Array | None = None,
    conv_indices: Array | None = None,
    conv_windows: Array | None = None,
    state_v_first: bool = False,
    null_index: int | None = None,
    write_indices: Array | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Any:
    """Apply records of candidates to the states of a pool, without tokens.

    The records are what calls of :func:`fused_recurrent_kda` and its relatives left with ``records=``. For a state
    ``S[K, V]``, one record after the other:

        S = decay[:, None] * S + outer(key, update)

    To commit and then make a call with ``num_replayed`` 0 gives the bits of the one call with ``num_replayed``.

    Args:
        initial_state: the pool ``[P, HV, K, V]`` (``[P, HV, V, K]`` with ``state_v_first``), rows of any
            stride, any float dtype.
        state_indices: ``[N]`` int32 or int64: the row of each state. A negative index, or ``null_index``, is
            no slot: nothing is written for it.
        records: ``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV, K])``, the last ``[R, n, HV]``
            for one decay a head, all float32 or all float64: as calls with ``records`` wrote them.
        record_indices: ``[N]`` int32 or int64: the row of the records of each state. Nothing is written where
            it is negative, or ``null_index``.
        num_replayed: ``[N]`` int32 or int64, 0 to n: how many records of its row are applied, from the first
            on.
        conv_state: ``[P, D, L]``, any float dtype: the pool of convolution states, where the records are
            those of a fused decode op. Without ``conv_windows`` each row is moved by ``num_replayed - 1``
            columns to the left.
        conv_indices: ``[N]`` int32 or int64 rows of ``conv_state``; ``state_indices`` by default.
        conv_windows: ``[R, T, w - 1, D]``, dtype of ``conv_state``: the windows that the calls have left; the
            one after the last record that is applied goes to columns 0 to w - 2 of ``conv_state``.
        state_v_first: states are ``[N, HV, V, K]``.
        null_index: a row number, besides the negative ones, that names no slot.
        write_indices: ``[N]`` int32 or int64 rows that are written, ``state_indices`` by default; with 0
            records too. Entries that name no slot write nothing.
        backend: force one backend; see :func:`kdacore.explain` for what each can serve.

    Returns:
        The pool that was written, in the dtype it has, or with ``conv_state`` ``(pool, conv_state)``; of JAX
        arrays, which cannot be written, new ones.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.

    Source: arXiv 2510.26692, section 3.

    Examples:
        >>> import numpy as np, kdacore
        >>> pool = np.zeros((4, 2, 16, 16), np.float32)
        >>> update, key, decay = (np.ones((3, 5, 2, 16), np.float32) for _ in range(3))
        >>> slots, rows, accepted = np.array([2, 1]), np.array([0, 2]), np.array([3, 0])
        >>> pool = kdacore.commit_records(pool, slots, (update, key, decay), rows, accepted)
        >>> [float(pool[i, 0, 0, 0]) for i in range(4)]
        [0.0, 0.0, 3.0, 0.0]
    """
    if extra or unknown:
        raise _unknown_arguments("commit_records", extra, unknown)
    record_update, record_key, record_decay = _arrays_of("commit_records", "records", records, 3)
    return _commit(
        _COMMIT,
        (
            initial_state,
            state_indices,
            record_update,
            record_key,
            record_decay,
            record_indices,
            num_replayed,
            write_indices,
            conv_state,
            conv_indices,
            conv_windows,
        ),
        (
            state_v_first,
            null_index,
        ),
        backend,
    )


def kda_gate(
    g: Array,
    *extra: object,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    backend: str | None = None,
    **unknown: object,
) -> Array:
    """The gate alone: the log decay (natural log, <= 0) of a raw gate input, in float32.

    With ``x = g + dt_bias``: ``-exp(A_log) * softplus(x)``, or ``lower_bound * sigmoid(exp(A_log) * x)`` when
    ``lower_bound`` is given.

    Args:
        g: ``[B, T, HV, K]``, or ``[B, T, HV]`` for one gate per head; any float dtype.
        A_log: ``[HV]`` float32 (float64 is taken too); needed without ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV*K]`` (``[HV]`` for one gate per head), any float dtype.
        lower_bound: a negative number of 1e-30 to 1e30 in size, or None for the unbounded gate.
        backend: force one backend; see :func:`kdacore.explain` for what each can serve.

    Returns:
        The log decay, shaped as ``g``, float32 (float64 for float64 input).

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.

    Source: arXiv 2510.26692, section 3.

    Examples:
        >>> import numpy as np, kdacore
        >>> decay = kdacore.kda_gate(np.zeros((1, 3, 2, 16), np.float32), lower_bound=-5.0)
        >>> float(decay[0, 0, 0, 0])
        -2.5
    """
    if extra or unknown:
        raise _unknown_arguments("kda_gate", extra, unknown)
    return dispatch.call(_GATE, (g, A_log, dt_bias), (lower_bound,), backend)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Selection:
    """What dispatch would do with a call, and why: every backend, its reasons or its cost, and the choice.

    Nothing runs. Arrays may be given as :class:`kdacore.ShapeDtype`.

    Args:
        op: an op's name, or the public function.
        *args, **kwargs: the call's own arguments. ``cp`` may be a number of ranks here.

    Returns:
        A :class:`~kdacore.types.Selection`; ``print`` it. ``backend`` is empty when nothing can serve the call. With
        ``cp``, that of one rank's slice, with what the ranks exchange and the predicted time with and without.

    Raises:
        ContractError: the call breaks the contract, or there is no such op.
        TypeError: an unknown keyword, or too many positional arguments.

    Examples:
        >>> import kdacore
        >>> x = kdacore.ShapeDtype((1, 64, 2, 16))
        >>> beta = kdacore.ShapeDtype((1, 64, 2))
        >>> kdacore.explain("chunk_kda", x, x, x, x, beta).backend
        'reference'
    """
    opdef = dispatch.opdef_of(op)
    bound = inspect.signature(public_function(opdef.name)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    for name, parts in opdef.tuples.items():
        given.update(zip(parts, _arrays_of(opdef.name, name, given[name], len(parts)), strict=True))
    if (extra := given.get("extra")) or given.get("unknown"):
        raise _unknown_arguments(opdef.name, extra, given["unknown"])
    inputs = opdef.inputs(*(given.get(name) for name in opdef.arrays))
    options = tuple(given[name] for name in opdef.options)
    if given.get("cp") is not None:
        from kdacore.parallel import explain as on_ranks  # here: as in _chunk

        return on_ranks.explain(opdef, inputs, options, given["backend"])
    return dispatch.explain(opdef, inputs, options, given["backend"])


def public_function(op: str) -> Callable[..., Any]:
    """The public function of an op, by the op's name."""
    from kdacore import stages

    function: Callable[..., Any] = globals()[op] if op in globals() else getattr(stages, op)
    return function


def _unknown_arguments(op: str, extra: tuple[object, ...], names: Iterable[str]) -> TypeError:
    from kdacore.ops.foreign_keywords import unknown_arguments  # here: few calls have any

    return unknown_arguments(op, extra, names)


def _chunk(
    opdef: Any, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None, cp: Any
) -> Any:
    if cp is None:
        result = dispatch.call(opdef, arrays, options, backend)
    else:
        from kdacore.parallel import call  # here: most processes have no other ranks

        result = call.call(opdef, arrays, options, backend)
    if result[2] is None:
        return result[0], result[1]
    return result[0], result[1], result[2]


def _recurrent(opdef: Any, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    result = dispatch.call(opdef, arrays, options, backend)
    if len(result) > 4 and result[4]:  # new arrays in place of those that cannot be written
        names = [n for n in opdef.written(arrays, options) if n not in ("initial_state", "write_pool")]
        return (*result[:2], *opdef.keywords(dict(zip(names, result[4], strict=True))).values())
    return result[0], result[1]


def _commit(opdef: Any, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    result = dispatch.call(opdef, arrays, options, backend)
    return result[0] if result[1] is None else (result[0], result[1])
