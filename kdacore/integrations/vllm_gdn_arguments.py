"""The arguments of vLLM's functions for the gated delta rule, translated to kdacore's.

Qwen3-Next, Qwen3.5 and OLMo-Hybrid call them. Each function here has the signature of a function of vLLM 0.33
(:data:`kdacore.integrations.vllm.REPLACED` says which), and returns the call of kdacore that does the same. States are
``[rows, HV, V, K]``; in a pool, row 0 belongs to padding.
"""

from __future__ import annotations

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.handover import Unread
from kdacore.integrations.packed_arguments import packed_heads
from kdacore.integrations.vllm_pools import NULL_BLOCK, RAW_IN_POOL, in_pool, required

_SOFTPLUS = {"beta": 1.0, "threshold": 20.0}
"""The softplus of kdacore's gate, in the arguments that vLLM has for it."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Unread = None,
    chunk_offsets: Unread = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: None = None,
) -> Call:
    """Prefill from states gathered for it, ``[N, HV, V, K]``; ``g`` the log decay, ``beta`` after its sigmoid.

    ``chunk_indices`` and ``chunk_offsets`` list the chunks of vLLM's own kernels. Returns ``(o, final_state)``; the
    states have the dtype of ``initial_state``, to which vLLM casts its float32 ones.
    """
    if core_attn_out is not None:
        raise ContractError("chunk_gated_delta_rule", "core_attn_out", "an array", "None")
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": True,
    }
    return Call("chunk_gated_delta_rule", arguments)


def gdn_prefill(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
) -> Call:
    """The prefills of a step of Qwen's layers, behind the convolution, in place in the pool.

    ``x`` ``[T, 2*H*K + HV*V]`` convolved; ``a`` and ``b`` ``[T, HV]`` raw; ``out`` ``[T, HV, V]``. Sequences whose
    ``has_initial_state`` is False start from zeros, whatever their row holds. Returns None.
    """
    q, k, v = (part.transpose(0, 1) for part in packed_heads(x, *state.shape[1:]))
    arguments = {
        **RAW_IN_POOL,
        "q": q,
        "k": k,
        "v": v,
        "g": a.unsqueeze(0),
        "beta": b.unsqueeze(0),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": state,
        "state_indices": state_indices,
        "has_initial_state": has_initial_state,
        "cu_seqlens": cu_seqlens,
        "out": out.unsqueeze(0),
    }
    return Call("chunk_gated_delta_rule", arguments, lambda result: None)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Call:
    """Decoding, and the verification of drafted tokens, in place in the pool; ``g`` the log decay, ``beta`` after its
    sigmoid. Returns ``(o, pool)``."""
    op = "fused_recurrent_gated_delta_rule"
    arguments = {
        **in_pool(op, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens),
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": required(op, "beta", beta),
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    return Call(op, arguments)


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> Call:
    """As :func:`fused_recurrent_gated_delta_rule`, of the raw gate ``a`` and the logits ``b``, ``[T, HV]`` each.

    ``beta`` and ``threshold`` are those of the gate's softplus.
    """
    op = "fused_sigmoid_gating_delta_rule_update"
    if is_kda:
        raise ContractError(op, "is_kda", "True", "False: one decay for each head")
    for name, got in (("beta", beta), ("threshold", threshold)):
        if got != _SOFTPLUS[name]:
            raise ContractError(op, name, str(got), str(_SOFTPLUS[name]))
    arguments = {
        **in_pool(op, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens),
        "q": q,
        "k": k,
        "v": v,
        "g": a.unsqueeze(0),
        "beta": b.unsqueeze(0),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    return Call("fused_recurrent_gated_delta_rule", arguments)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> Call:
    """One token for each sequence, q, k and v as columns of ``mixed_qkv`` ``[B, 2*H*K + HV*V]``.

    ``a`` and ``b`` are ``[B, HV]``, the raw gate and the logits. Returns ``(out, pool)``, ``out`` ``[B, 1, HV, V]``.
    """
    q, k, v = packed_heads(mixed_qkv, *initial_state.shape[1:])
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": a.unsqueeze(1),
        "beta": b.unsqueeze(1),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": initial_state,
        "state_indices": ssm_state_indices,
        "null_index": NULL_BLOCK,
        "inplace_state": True,
        "output_final_state": True,
        "out": out,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": True,
    }
    return Call("fused_recurrent_gated_delta_rule", arguments)
