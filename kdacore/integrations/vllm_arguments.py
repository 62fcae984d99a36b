"""The arguments of vLLM's functions for Kimi Delta Attention, translated to kdacore's.

Each function here has the signature of a function of vLLM 0.33 (:data:`kdacore.integrations.vllm.REPLACED` says
which), and returns the call of kdacore that does the same. vLLM keeps states as ``[rows, H, V, K]`` in a pool whose row
0 belongs to padding: an index of 0 or less names no slot. Raw gates and logits of beta go in; the gate is bounded where
``lower_bound`` is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.gates import RAW, bounded_gate
from kdacore.integrations.packed_arguments import of_each_sequence, packed_heads
from kdacore.integrations.vllm_pools import NULL_BLOCK, RAW_IN_POOL, required


def _options(lower_bound: float | None) -> dict[str, Any]:
    return {**RAW, **bounded_gate(lower_bound), "output_final_state": True}


def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> Call:
    """Prefill from states gathered for it, ``[N, H, V, K]``. Returns ``(o, final_state)``."""
    arguments = {
        **_options(lower_bound),
        "q": q,
        "k": k,
        "v": v,
        "g": raw_g,
        "beta": raw_beta,
        "A_log": A_log,
        "dt_bias": g_bias,
        "scale": scale,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "out": out,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "output_final_state": output_final_state,
    }
    return Call("chunk_kda", arguments)


def flashkda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    final_state: Tensor,
    workspace: Tensor,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> Call:
    """Prefill into the buffers that vLLM keeps for FlashKDA.

    ``checkpoint_offsets`` ``[N]`` count from each sequence's first token; 0 asks for no checkpoint, and the row of
    ``checkpoint_state`` ``[N, H, V, K]`` is then left as it is. Returns ``(out, final_state)``.
    """
    N = initial_state.shape[0]
    rows = torch.arange(N, device=q.device)
    arguments = {
        **_options(lower_bound),
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias.reshape(-1),
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "out": out,
        "inplace_state": True,
        "write_indices": rows,
        "write_pool": final_state,
    }
    if checkpoint_offsets is None or checkpoint_state is None:
        return Call("chunk_kda", arguments, lambda result: (out, final_state))
    # Both kinds of state go to one pool of kdacore's; vLLM has a buffer for each.
    pool = torch.cat([torch.empty_like(final_state), checkpoint_state])
    wanted = checkpoint_offsets > 0
    arguments |= {
        "write_pool": pool,
        "checkpoint_offsets": cu_seqlens[:-1] + checkpoint_offsets.to(cu_seqlens.dtype),
        "checkpoint_indices": torch.where(wanted, rows + N, -1),
    }

    def finish(result: Any) -> tuple[Tensor, Tensor]:
        final_state.copy_(pool[:N])
        checkpoint_state.copy_(pool[N:])
        return out, final_state

    return Call("chunk_kda", arguments, finish)


def kda_prefill(
    x: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
) -> Call:
    """A step of Kimi's layers with prefills, behind the convolution and before the gated norm, in place in the pool.

    ``x`` ``[T, 3*H*K]`` convolved; ``raw_g`` ``[1, T, H, K]``, ``raw_beta`` ``[1, T, H]``, ``out`` ``[1, T, H, V]``.
    Sequences whose ``has_initial_state`` is False start from zeros, whatever their row holds. Returns None.
    """
    q, k, v = (part.transpose(0, 1) for part in packed_heads(x, *state.shape[1:]))
    arguments = {
        **RAW_IN_POOL,
        **bounded_gate(lower_bound),
        "q": q,
        "k": k,
        "v": v,
        "g": raw_g,
        "beta": raw_beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": state,
        "state_indices": state_indices,
        "has_initial_state": has_initial_state,
        "cu_seqlens": cu_seqlens,
        "out": out,
    }
    return Call("chunk_kda", arguments, lambda result: None)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> Call:
    """Decoding, and the verification of drafted tokens, in place in the pool. Returns ``(o, pool)``.

    The index arrays may be longer than the number of sequences, which ``cu_seqlens`` has. ``fuse_gate`` chooses between
    two ways to the same result.
    """
    N = cu_seqlens.shape[0] - 1
    arguments = {
        **_options(lower_bound),
        "q": q,
        "k": k,
        "v": v,
        "g": raw_g,
        "beta": raw_beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "state_indices": of_each_sequence(ssm_state_indices, N),
        "num_accepted_tokens": None
        if num_accepted_tokens is None
        else of_each_sequence(num_accepted_tokens, N),
        "null_index": NULL_BLOCK,
        "inplace_state": True,
        "out": out,
    }
    return Call("fused_recurrent_kda", arguments)


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Call:
    """One token for each sequence, q, k and v as columns of ``mixed_qkv`` ``[B, 2*H*K + H*V]``.

    ``raw_g`` ``[1, B, H, K]``, ``raw_beta`` ``[1, B, H]``. Returns ``(o, pool)``, ``o`` ``[1, B, H, V]``.
    """
    q, k, v = packed_heads(mixed_qkv, *initial_state.shape[1:])
    arguments = {
        **_options(lower_bound),
        "q": q,
        "k": k,
        "v": v,
        "g": raw_g.transpose(0, 1),
        "beta": raw_beta.transpose(0, 1),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": initial_state,
        "state_indices": state_indices,
        "null_index": NULL_BLOCK,
        "inplace_state": True,
        "out": None if out is None else out.transpose(0, 1),
    }
    return Call("fused_recurrent_kda", arguments, lambda result: (result[0].transpose(0, 1), result[1]))


# --- GLM-5: other signatures for the same -------------------------------------------------------------------------


def glm_chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
) -> Call:
    """Prefill from states gathered for it; ``beta`` after its sigmoid. Returns ``(o, final_state)``."""
    call = chunk_kda_with_fused_gate(
        q,
        k,
        v,
        raw_g,
        beta,
        A_log.reshape(-1),
        None if g_bias is None else g_bias.reshape(-1),
        scale,
        initial_state,
        output_final_state,
        lower_bound if safe_gate else None,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
    )
    call.arguments["use_beta_sigmoid_in_kernel"] = False
    return call


def glm_fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
) -> Call:
    """Decoding and verification in place in the pool; ``g`` a raw gate with ``compute_gate``, else the log decay.

    Returns ``(o, pool)``.
    """
    op = "fused_recurrent_kda"
    if not inplace_final_state:
        raise ContractError(op, "inplace_final_state", "False", "True: states are written in place")
    if compute_gate and a_log is None:
        raise ContractError(op, "a_log", "None", "an array with compute_gate")
    call = fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        a_log if a_log is None else a_log.reshape(-1),
        g_bias if g_bias is None else g_bias.reshape(-1),
        lower_bound,
        required(op, "initial_state", initial_state),
        required(op, "cu_seqlens", cu_seqlens),
        required(op, "ssm_state_indices", ssm_state_indices),
        num_accepted_tokens,
        out,
    )
    arguments = call.arguments
    arguments |= {
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": sigmoid_beta,
        "use_gate_in_kernel": compute_gate,
    }
    if not compute_gate:
        arguments |= {"A_log": None, "dt_bias": None, "lower_bound": None, "safe_gate": False}
    return call
