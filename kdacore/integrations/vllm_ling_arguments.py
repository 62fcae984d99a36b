"""The arguments of vLLM's functions for Ling-3.0's Kimi Delta Attention, translated to kdacore's.

Each function here has the signature of a function of ``vllm.third_party.flash_linear_attention.ops.kda`` of vLLM 0.33,
and names what that takes as further keywords. ``g`` is the log decay ``[1, T, H, K]`` float32 and ``beta`` comes after
its sigmoid: the model computes both before the call. States are ``[rows, H, V, K]``; row 0 belongs to padding.
"""

from __future__ import annotations

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.integrations.gates import bounded_gate
from kdacore.integrations.handover import Unread
from kdacore.integrations.vllm_pools import in_pool, required


def ling_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> Call:
    """Prefill from states gathered for it, ``[N, H, V, K]``. Returns ``(o, final_state)``.

    With ``safe_gate`` the model has bounded the decay by ``lower_bound``, which kdacore is told.
    """
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
    promised = bounded_gate(lower_bound if safe_gate else None)
    return Call("chunk_kda", arguments | promised if promised["safe_gate"] else arguments)


def ling_fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    safe_gate: Unread = False,
    lower_bound: Unread = None,
) -> Call:
    """Decoding in place in the pool. Returns ``(o, pool)``."""
    return ling_fused_recurrent_kda_fwd(
        q,
        k,
        v,
        g,
        required("fused_recurrent_kda", "beta", beta),
        scale,
        required("fused_recurrent_kda", "initial_state", initial_state),
        inplace_final_state,
        cu_seqlens,
        ssm_state_indices,
        None,
        use_qk_l2norm_in_kernel,
    )


def ling_fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Call:
    """Decoding, and the verification of drafted tokens, in place in the pool. Returns ``(o, pool)``."""
    op = "fused_recurrent_kda"
    arguments = {
        **in_pool(op, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens),
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    return Call(op, arguments)
