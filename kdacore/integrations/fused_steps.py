"""Fused decode steps of serving engines: which ones kdacore takes over, and arguments that engines have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kdacore.errors import ContractError
from kdacore.integrations.handover import was_asked_for
from kdacore.types import Selection


def why_left(selection: Selection, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a fused step stays with the engine; empty where it does not.

    There are records of fused steps with the CUDA backend alone (in vLLM), so another one computes them only where it
    was asked for.
    """
    if selection.request.device.type == "cpu" or selection.backend == "cuda" or was_asked_for(selection):
        return ""
    reasons = [str(r) for c in selection.candidates if c.backend == "cuda" for r in c.reasons]
    return "; ".join(["fused decode steps are taken over by the cuda backend alone", *reasons])


def gated_delta_step(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    activation: str,
) -> dict[str, Any]:
    """Arguments of ``fused_decode_gated_delta_rule`` for one token of each sequence, options apart.

    ``x`` ``[B, D]`` and ``conv_state`` ``[rows, D, L]`` before the convolution, ``a`` and ``b`` ``[B, HV]`` raw.

    Raises:
        ContractError: the convolution's activation is another one than SiLU.
    """
    if activation not in ("silu", "swish"):
        op, want = "fused_decode_gated_delta_rule", "'silu': the convolution's"
        raise ContractError(op, "activation", repr(activation), want)
    return {
        "x": x.unsqueeze(1),
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "conv_state": conv_state,
        "g": a.unsqueeze(1),
        "beta": b.unsqueeze(1),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": state,
        "state_indices": state_indices,
    }
