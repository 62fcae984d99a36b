"""The arguments of SGLang's Triton kernel class for Kimi Delta Attention, translated to kdacore's.

Each function here has the signature of the method of the same name of ``TritonKDAKernel`` in SGLang 0.5.23, without
``self``, and returns the call of kdacore that does the same. States lie in a pool ``[slots, HV, V, K]``
whose rows may be far apart; an index below zero names no slot. What belongs to other features of SGLang (a replayed
state, trees of drafted tokens) must be absent: such calls stay with SGLang.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.gates import bounded_gate
from kdacore.integrations.packed_arguments import packed_heads
from kdacore.integrations.sglang_parts import (
    CHUNK,
    WRITTEN,
    checkpoints,
    output,
    refuse_replay,
    verified,
)


def _options(lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None) -> dict[str, Any]:
    return {
        "A_log": None if A_log is None else A_log.reshape(-1),
        "dt_bias": None if dt_bias is None or A_log is None else dt_bias.reshape(-1),
        "use_gate_in_kernel": A_log is not None,
        **bounded_gate(lower_bound),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }


def _by_channel(x: Tensor, HV: int) -> Tensor:
    """A gate ``[..., HV * K]`` or ``[..., HV, K]`` as the latter."""
    return x if x.dim() == 4 else x.unflatten(-1, (HV, -1))


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
    lower_bound: float | None = None,
    replayssm_d: None = None,
    replayssm_k: None = None,
    replayssm_g: None = None,
    replayssm_write_pos: None = None,
    replayssm_force_flush: None = None,
) -> Call:
    """One token for each sequence, q, k and v as columns of ``mixed_qkv`` ``[B, 2*H*K + HV*V]``.

    ``a`` holds ``B * HV * K`` and ``b`` ``B * HV`` elements. Returns ``o`` ``[1, B, HV, V]``.
    """
    if lower_bound is None:
        refuse_replay(replayssm_d, replayssm_write_pos)
    B, HV, K = mixed_qkv.shape[0], num_v_heads, ssm_states.shape[-1]
    q, k, v = packed_heads(mixed_qkv, HV, head_v_dim, K)
    arguments = {
        **_options(lower_bound, A_log, dt_bias),
        "q": q,
        "k": k,
        "v": v,
        "g": a.reshape(B, 1, HV, K),
        "beta": b.reshape(B, 1, HV),
        "scale": scale,
        "initial_state": ssm_states,
        "state_indices": cache_indices,
        "inplace_state": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    return Call("fused_recurrent_kda", arguments, lambda result: result[0].transpose(0, 1))


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
    lower_bound: float | None = None,
) -> Call:
    """Decoding in place, ``q`` ``[1, T, H, K]``. Returns ``o`` ``[1, T, HV, V]``."""
    return Call(
        "fused_recurrent_kda",
        {
            **_recurrent(q, k, v, a, b, A_log, dt_bias, lower_bound, query_start_loc),
            "initial_state": ssm_states,
            "state_indices": cache_indices,
            "inplace_state": True,
        },
        output,
    )


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
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: None = None,
    replayssm_rawk: None = None,
    replayssm_g: None = None,
    replayssm_beta: None = None,
) -> Call:
    """Verification of drafted tokens: the pool is read, the state after token t of sequence n goes to
    ``intermediate_states_buffer[intermediate_state_indices[n], t]``. Returns ``o`` ``[1, T, HV, V]``."""
    if cache_ring:
        raise ContractError("target_verify", "cache_ring", "True", "False: states are not replayed")
    return verified(
        "fused_recurrent_kda",
        _recurrent(q, k, v, a, b, A_log, dt_bias, lower_bound, query_start_loc),
        ssm_states,
        cache_indices,
        intermediate_states_buffer,
        intermediate_state_indices,
        cache_steps,
        retrieve_parent_token,
    )


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    query_start_loc: Tensor,
) -> dict[str, Any]:
    HV, T = v.shape[2], v.shape[1]
    return {
        **_options(lower_bound, A_log, dt_bias),
        "q": q,
        "k": k,
        "v": v,
        "g": a.reshape(1, T, HV, -1),
        "beta": b.reshape(1, T, HV),
        "cu_seqlens": query_start_loc,
        "use_beta_sigmoid_in_kernel": True,
    }


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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    return_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    chunk_states: bool = True,
    track_offsets: Tensor | None = None,
    track_rows: Tensor | None = None,
) -> Call:
    """Prefill, from and into rows of the pool.

    Returns ``o`` ``[1, T, HV, V]``; with ``return_intermediate_states`` also the states at the start of every 64
    tokens, ``[1, chunks, HV, V, K]``. ``track_state`` ``[N, HV, V, K]`` float32 receives the state at the start of
    chunk ``track_chunk_idx[n]`` of sequence n, where there is such a chunk.

    Not SGLang's are ``chunk_states``, ``track_offsets`` and ``track_rows``: see
    :func:`kdacore.integrations.sglang_gdn_arguments.extend`. Without ``chunk_states`` nothing goes to ``track_state``.
    """
    arguments = {
        **_options(lower_bound, A_log, dt_bias),
        "q": q,
        "k": k,
        "v": v,
        "g": _by_channel(g, v.shape[2]),
        "beta": beta,
        "use_beta_sigmoid_in_kernel": beta_is_raw,
        "initial_state": ssm_states,
        "state_indices": cache_indices,
        "inplace_state": True,
        "cu_seqlens": query_start_loc,
        **checkpoints(track_offsets, track_rows),
    }
    if not chunk_states:
        kept = None if track_rows is None else WRITTEN
        return Call("chunk_kda", arguments, lambda result: (result[0], kept))
    if not return_intermediate_states and track_state is None:
        return Call("chunk_kda", arguments, output)
    arguments["checkpoint_every"] = CHUNK

    def finish(result: Any) -> Any:
        o, _, states = result
        if track_state is not None and track_chunk_idx is not None:
            _keep_tracked(states, query_start_loc, track_state, track_chunk_idx)
        return (o, states.unsqueeze(0)) if return_intermediate_states else o

    return Call("chunk_kda", arguments, finish)


def _keep_tracked(states: Tensor, offsets: Tensor, track_state: Tensor, track_chunk_idx: Tensor) -> None:
    """Copy the tracked chunk-start states, without reading anything on the host."""
    chunks = (offsets.diff() + CHUNK - 1) // CHUNK
    N = chunks.shape[0]
    wanted = track_chunk_idx[:N]
    there = (wanted >= 0) & (wanted < chunks)
    rows = torch.where(there, chunks.cumsum(0) - chunks + wanted, 0)
    kept = track_state[:N]
    kept.copy_(torch.where(there[:, None, None, None], states.index_select(0, rows).to(kept.dtype), kept))
