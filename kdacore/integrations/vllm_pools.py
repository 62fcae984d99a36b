"""Rows of vLLM's pools of states.

vLLM keeps states as ``[rows, HV, V, K]`` in a pool whose row 0 belongs to padding: an index of 0 or less names no slot.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kdacore.errors import ContractError
from kdacore.integrations.gates import RAW
from kdacore.integrations.packed_arguments import of_each_sequence

NULL_BLOCK = 0
"""The row of the pool that vLLM gives to padding."""

RAW_IN_POOL: dict[str, Any] = {**RAW, "inplace_state": True, "null_index": NULL_BLOCK}
"""Options of a call on projections as they come, whose states are read and written in vLLM's pool."""


def in_pool(
    op: str,
    initial_state: Tensor | None,
    inplace_final_state: bool,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
) -> dict[str, Any]:
    """Arguments of a call whose sequences have rows of a pool. The index arrays may be longer than their number."""
    if not inplace_final_state:
        raise ContractError(op, "inplace_final_state", "False", "True: states are written in place")
    offsets = required(op, "cu_seqlens", cu_seqlens)
    N = offsets.shape[0] - 1
    return {
        "initial_state": required(op, "initial_state", initial_state),
        "cu_seqlens": offsets,
        "state_indices": of_each_sequence(required(op, "ssm_state_indices", ssm_state_indices), N),
        "num_accepted_tokens": None
        if num_accepted_tokens is None
        else of_each_sequence(num_accepted_tokens, N),
        "null_index": NULL_BLOCK,
        "inplace_state": True,
        "output_final_state": True,
        "state_v_first": True,
    }


def required(op: str, name: str, x: Tensor | None) -> Tensor:
    """An array that vLLM declares optional and cannot do without.

    Raises:
        ContractError: it is None.
    """
    if x is None:
        raise ContractError(op, name, "None", "an array")
    return x
