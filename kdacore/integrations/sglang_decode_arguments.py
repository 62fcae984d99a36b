"""The decode steps of SGLang's linear attention backends, translated to kdacore's fused decode steps.

States are ``[slots, HV, V, K]`` and windows of the convolution ``[slots, D, L]``, in pools whose rows may be far apart;
an index below zero names no slot.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.fused_steps import gated_delta_step
from kdacore.integrations.gates import RAW, bounded_gate

_RAW_IN_POOL = {**RAW, "inplace_state": True}


def kda_decode_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    ssm_states: Tensor,
    cache_indices: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> Call:
    """One token of each sequence, convolution included, and the gated norm where a gate is given.

    ``mixed_qkv`` ``[B, D]`` before the convolution; ``a`` holds ``B * HV * K`` elements, ``b`` ``B * HV`` and
    ``output_gate`` ``B * HV * V``. Returns ``o`` ``[1, B, HV, V]``.
    """
    op, B = "fused_decode_kda", mixed_qkv.shape[0]
    if ssm_states.dim() != 4:
        raise ContractError(op, "ssm_states", f"shape {tuple(ssm_states.shape)}", "[slots, HV, V, K]")
    HV, V, K = ssm_states.shape[1:]
    arguments = {
        **_RAW_IN_POOL,
        **bounded_gate(lower_bound),
        "x": mixed_qkv.unsqueeze(1),
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "conv_state": conv_state,
        "g": _split(op, "a", a, (B, 1, HV, K)),
        "beta": _split(op, "b", b, (B, 1, HV)),
        "A_log": A_log.reshape(-1),
        "dt_bias": dt_bias.reshape(-1),
        "initial_state": ssm_states,
        "state_indices": cache_indices,
    }
    if output_gate is not None:
        arguments |= {
            "z": _split(op, "output_gate", output_gate, (B, 1, HV, V)),
            "norm_weight": norm_weight,
            "norm_eps": norm_eps,
            "norm_activation": "sigmoid",
        }
    return Call(op, arguments, _of_one_row)


def gdn_decode_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    activation: str,
) -> Call:
    """One token of each sequence up to the gated norm, which the model computes.

    ``mixed_qkv`` ``[B, D]`` before the convolution, ``a`` and ``b`` ``[B, HV]`` raw. Returns ``o`` ``[1, B, HV, V]``.
    """
    convolution = (conv_weight, conv_bias, conv_state)
    step = gated_delta_step(
        mixed_qkv, a, b, *convolution, A_log, dt_bias, ssm_states, cache_indices, activation
    )
    return Call("fused_decode_gated_delta_rule", {**_RAW_IN_POOL, **step}, _of_one_row)


def _split(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An array whose heads may be one axis with others.

    Raises:
        ContractError: it has another number of elements.
    """
    if x.numel() != math.prod(shape):
        raise ContractError(op, name, f"{x.numel()} elements", f"{math.prod(shape)}, those of {list(shape)}")
    return x.reshape(shape)


def _of_one_row(result: Any) -> Tensor:
    """``o`` ``[B, 1, HV, V]`` as SGLang has it, ``[1, B, HV, V]``."""
    o: Tensor = result[0].transpose(0, 1)
    return o
