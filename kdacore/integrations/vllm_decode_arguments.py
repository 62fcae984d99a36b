"""The arguments of vLLM's fused decode steps, translated to kdacore's.

:data:`kdacore.integrations.vllm.REPLACED` says which functions are replaced; where arrays are taken of a layer rather
than of the call, :mod:`kdacore.integrations.vllm_layers` does that. States are ``[rows, HV, V, K]``, windows of the
convolution ``[rows, D, L]``, in pools whose row 0 belongs to padding.
"""

from __future__ import annotations

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.integrations.fused_steps import gated_delta_step
from kdacore.integrations.gates import bounded_gate
from kdacore.integrations.vllm_pools import RAW_IN_POOL


def kda_decode_step(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    state_indices: Tensor,
    out: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
    norm_activation: str,
) -> Call:
    """The step of Kimi's layers for one token of each sequence, convolution and gated norm included.

    ``x`` ``[B, 3*H*K]`` and ``conv_state`` ``[rows, 3*H*K, L]`` before the convolution; ``raw_g`` ``[1, B, H, K]``,
    ``raw_beta`` ``[1, B, H]``, ``output_gate`` ``[B, H, V]``, ``out`` ``[1, B, H, V]``. Returns None, as the layer's
    method does.
    """
    arguments = {
        **RAW_IN_POOL,
        **bounded_gate(lower_bound),
        "x": x.unsqueeze(1),
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "conv_state": conv_state,
        "g": raw_g.transpose(0, 1),
        "beta": raw_beta.transpose(0, 1),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "state_indices": state_indices,
        "initial_state": state,
        "z": output_gate.unsqueeze(1),
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "norm_activation": norm_activation,
        "out": out.transpose(0, 1),
    }
    return Call("fused_decode_kda", arguments, lambda result: None)


def gdn_decode_step(
    x: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    activation: str,
) -> Call:
    """Qwen's decode step of one token for each sequence up to the gated norm, which its layer computes.

    ``x`` ``[B, D]`` and ``conv_state`` ``[rows, D, L]`` before the convolution, ``a`` and ``b`` ``[B, HV]`` raw,
    ``out`` ``[B, HV, V]``. Returns None, as the layer's method does.
    """
    convolution = (conv_weight, conv_bias, conv_state)
    step = gated_delta_step(x, a, b, *convolution, A_log, dt_bias, state, state_indices, activation)
    arguments = {**RAW_IN_POOL, **step, "out": out.unsqueeze(1)}
    return Call("fused_decode_gated_delta_rule", arguments, lambda result: None)


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float = 128**-0.5,
    norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
) -> Call:
    """Verification of drafted tokens behind the convolution, gated norm included.

    ``mixed_qkv`` ``[T, D]`` convolved, ``a`` and ``b`` ``[T, HV]`` raw, ``state_indices`` ``[N, 1 + drafts]``,
    ``output_gate`` ``[T, HV, V]``. Returns ``o`` ``[T, HV, V]``.
    """
    arguments = {
        **RAW_IN_POOL,
        "x": mixed_qkv.unsqueeze(0),
        "g": a.unsqueeze(0),
        "beta": b.unsqueeze(0),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "cu_seqlens": cu_seqlens,
        "state_indices": state_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "initial_state": state,
        "z": output_gate.unsqueeze(0),
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "norm_activation": output_gate_activation,
        "out": None if out is None else out.unsqueeze(0),
    }
    return Call("fused_decode_gated_delta_rule", arguments, lambda result: result[0].squeeze(0))
