"""The arguments of SGLang's Triton kernel class for the gated delta rule, translated to kdacore's.

Each function here has the signature of the method of the same name of ``TritonGDNKernel`` in SGLang 0.5.23, without
``self``, and returns the call of kdacore that does the same. Pools, rows and what must be absent are as in
:mod:`kdacore.integrations.sglang_arguments`. Every key head may have several value heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.packed_arguments import packed_heads
from kdacore.integrations.sglang_parts import (
    CHUNK,
    WRITTEN,
    checkpoints,
    output,
    refuse_replay,
    verified,
)

_RECURRENT = "fused_recurrent_gated_delta_rule"
_OPTIONS = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    replayssm_d: None = None,
    replayssm_k: None = None,
    replayssm_g: None = None,
    replayssm_write_pos: None = None,
    replayssm_force_flush: None = None,
) -> Call:
    """One token for each sequence, q, k and v as columns of ``mixed_qkv`` ``[B, 2*H*K + HV*V]``; ``a`` and ``b``
    ``[B, HV]``. Returns ``o`` ``[1, B, HV, V]``."""
    refuse_replay(replayssm_d, replayssm_write_pos)
    q, k, v = packed_heads(mixed_qkv, num_v_heads, head_v_dim, ssm_states.shape[-1])
    arguments = {
        **_gated(a.unsqueeze(1), b.unsqueeze(1), A_log, dt_bias),
        "q": q,
        "k": k,
        "v": v,
        "scale": scale,
        "initial_state": ssm_states,
        "state_indices": cache_indices,
        "inplace_state": True,
    }
    return Call(_RECURRENT, arguments, lambda result: result[0].transpose(0, 1))


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
) -> Call:
    """Decoding in place, ``q`` ``[1, T, H, K]``, ``a`` and ``b`` ``[T, HV]``. Returns ``o`` ``[1, T, HV, V]``."""
    arguments = {
        **_recurrent(q, k, v, a, b, A_log, dt_bias, query_start_loc),
        "initial_state": ssm_states,
        "state_indices": cache_indices,
        "inplace_state": True,
    }
    return Call(_RECURRENT, arguments, output)


def target_verify(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None,
    cache_steps: int,
    retrieve_parent_token: None,
) -> Call:
    """Verification of drafted tokens, as :func:`kdacore.integrations.sglang_arguments.target_verify`."""
    return verified(
        _RECURRENT,
        _recurrent(q, k, v, a, b, A_log, dt_bias, query_start_loc),
        ssm_states,
        cache_indices,
        intermediate_states_buffer,
        intermediate_state_indices,
        cache_steps,
        retrieve_parent_token,
    )


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    track_state: None = None,
    track_chunk_idx: None = None,
    chunk_states: bool = True,
    track_offsets: Tensor | None = None,
    track_rows: Tensor | None = None,
) -> Call:
    """Prefill from rows of the pool, and into them with ``inplace_update``. ``g`` is the log decay and ``beta`` comes
    after its sigmoid, ``[1, T, HV]`` each.

    Not SGLang's are ``chunk_states``, whether the states at the start of every 64 tokens are returned, and
    ``track_offsets`` ``[C]`` with ``track_rows`` ``[C]``: states before these tokens go to these rows of the pool.

    Returns ``(o, None, states)``, ``o`` ``[1, T, HV, V]``, the states ``[1, chunks, HV, V, K]`` or in their place None,
    or ``WRITTEN`` with ``track_rows``.
    """
    if track_state is not None or track_chunk_idx is not None:
        raise ContractError("extend", "track_state", "an array", "None: SGLang's kernel does not write it")
    arguments = {
        **_OPTIONS,
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "initial_state": ssm_states,
        "state_indices": cache_indices,
        "inplace_state": inplace_update,
        "cu_seqlens": query_start_loc,
        **checkpoints(track_offsets, track_rows),
    }
    if not chunk_states:
        states = None if track_rows is None else WRITTEN
        return Call("chunk_gated_delta_rule", arguments, lambda result: (result[0], None, states))
    arguments["checkpoint_every"] = CHUNK
    return Call("chunk_gated_delta_rule", arguments, lambda result: (result[0], None, result[2].unsqueeze(0)))


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
) -> dict[str, Any]:
    T, HV = v.shape[1:3]
    arguments = _gated(a.view(1, T, HV), b.view(1, T, HV), A_log, dt_bias)
    return {**arguments, "q": q, "k": k, "v": v, "cu_seqlens": query_start_loc}


def _gated(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> dict[str, Any]:
    """The gate's input, its parameters, and the logits of beta."""
    return {
        **_OPTIONS,
        "g": a,
        "beta": b,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
