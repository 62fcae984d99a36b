"""Parts that the translations for SGLang's two kernel classes share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kdacore.compat.call import Call
from kdacore.errors import ContractError
from kdacore.integrations.packed_arguments import of_each_sequence

CHUNK = 64
"""Tokens of SGLang's chunks, at whose starts it keeps states for its prefix cache."""


class _Written:
    def __repr__(self) -> str:
        return "the states at chunk starts are in their slots"


WRITTEN = _Written()
"""In place of the states at chunk starts: those that are tracked are in their slots already."""


def output(result: Any) -> Tensor:
    o: Tensor = result[0]
    return o


def checkpoints(offsets: Tensor | None, rows: Tensor | None) -> dict[str, Any]:
    """The arguments for states at tokens to rows of the pool; none where there are no rows."""
    return {} if rows is None else {"checkpoint_offsets": offsets, "checkpoint_indices": rows}


def refuse_replay(replayssm_d: object, replayssm_write_pos: object) -> None:
    """Decoding must not go by SGLang's ring of inputs.

    Raises:
        ContractError: it does.
    """
    if replayssm_d is not None and replayssm_write_pos is not None:
        raise ContractError("packed_decode", "replayssm_d", "an array", "None: states are not replayed")


def verified(
    op: str,
    arguments: dict[str, Any],
    ssm_states: Tensor,
    cache_indices: Tensor,
    buffer: Tensor | None,
    buffer_indices: Tensor | None,
    steps: int,
    parents: None,
) -> Call:
    """Verification of drafted tokens by the recurrent ``op``: the pool is read, the state after token t of sequence n
    goes to ``buffer[buffer_indices[n], t]``.

    Args:
        arguments: the tokens, the gate and the offsets.
        ssm_states: ``[slots, HV, V, K]``.
        cache_indices: rows of it, at least N.
        buffer: ``[rows, most drafts, HV, V, K]``; None to write no states.
        buffer_indices: rows of it, at least N; below zero none.
        steps: drafts of a sequence in this call.
        parents: must be None.
    """
    if parents is not None:
        raise ContractError(
            "target_verify", "retrieve_parent_token", "an array", "None: drafted tokens form a chain"
        )
    N = arguments["cu_seqlens"].shape[0] - 1
    arguments |= {"initial_state": ssm_states, "state_indices": of_each_sequence(cache_indices, N)}
    if buffer is None or buffer_indices is None:
        return Call(op, {**arguments, "read_only_state": True}, output)
    if not buffer.is_contiguous():
        raise ContractError("target_verify", "intermediate_states_buffer", "strides", "a contiguous array")
    most = buffer.shape[1]  # with adaptive speculation a step may have fewer drafts than the buffer holds
    if steps > most:
        raise ContractError("target_verify", "cache_steps", str(steps), f"at most the buffer's {most}")
    indices = of_each_sequence(buffer_indices, N)
    arguments |= {
        "write_pool": buffer.flatten(0, 1),
        # A row below zero stays below zero at every step: kdacore writes nothing there.
        "write_indices": torch.add(
            _counting(steps, indices.dtype, indices.device), indices.unsqueeze(1), alpha=most
        ),
        "inplace_state": True,
    }
    return Call(op, arguments, output)


def _counting(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 to ``n - 1``, made once. Not kept where a CUDA graph is captured: its memory is the graph's, and filled only
    when the graph runs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(n, dtype=dtype, device=device)
    return _kept_counting(n, dtype, device)


@functools.lru_cache(maxsize=64)
def _kept_counting(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=dtype, device=device)
