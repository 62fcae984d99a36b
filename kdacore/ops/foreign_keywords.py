"""What callers of other libraries call an argument, and what it is called here: for the message of a TypeError."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.errors import did_you_mean
from kdacore.ops import OPS, OpDef

_OURS = {
    # flash-linear-attention
    "cp_context": "cp",
    "inplace_final_state": "inplace_state",
    "return_intermediate_states": "checkpoint_every",
    "ssm_state_indices": "state_indices",
    "transpose_state_layout": "state_v_first",
    # SGLang and vLLM
    "cache_indices": "state_indices",
    "conv_state_indices": "conv_indices",
    "intermediate_conv_window": "conv_windows",
    "initial_state_indices": "state_indices",
    "initial_state_source": "initial_state",
    "null_block_id": "null_index",
    "pad_slot_id": "null_index",
}
_TREES = "candidates are a chain: trees of drafts, with parent pointers, are not served"
_WITHOUT_COUNTERPART = {
    "parent_indices": _TREES,
    "retrieve_next_sibling": _TREES,
    "retrieve_next_token": _TREES,
    "retrieve_parent_token": _TREES,
    "chunk_indices": "it is derived from cu_seqlens",
    "chunk_size": "a backend chooses its own",
    "cp": "a step of decoding is one rank's; rows are spread over ranks by the chunk ops",
    "gk": "the g of the kda ops has one decay for each channel",
    "head_first": "arrays are [B, T, H, ...]",
    "max_num_seqs": "cu_seqlens is never read on the host, so any call can be captured",
    "output_dtype": "the result is float32",
    "use_graph": "cu_seqlens is never read on the host, so any call can be captured",
}


def unknown_arguments(op: str, extra: tuple[object, ...], names: Iterable[str]) -> TypeError:
    """The TypeError for a call of ``op`` with positional arguments or keywords that it does not have."""
    opdef = OPS[op]
    arrays = dict.fromkeys([a.part_of or a.name for a in opdef.array_arguments])
    has = (*arrays, *opdef.options, "backend")
    messages = [_message(op, name, has) for name in names]
    if extra:
        messages.insert(0, _too_many(opdef, len(extra)))
    return TypeError("; ".join(messages))


def _too_many(opdef: OpDef, extra: int) -> str:
    """The message where options were given by position, as functions of flash-linear-attention allow."""
    taken = dict.fromkeys([a.part_of or a.name for a in opdef.array_arguments if a.required])
    message = f"{opdef.name}() takes {len(taken)} positional arguments, {', '.join(taken)}"
    message += f"; {len(taken) + extra} were given: name the others"
    if opdef.family in ("chunk", "recurrent", "gate"):
        message += (
            ", or call the function in kdacore.compat.fla, which takes them in flash-linear-attention's order"
        )
    return message


def _message(op: str, name: str, has: tuple[str, ...]) -> str:
    message = f"{op}() got an unexpected keyword argument {name!r}"
    if _OURS.get(name) in has:
        return f"{message}: kdacore's name is {_OURS[name]!r}"
    if name in _WITHOUT_COUNTERPART:
        return f"{message}: {_WITHOUT_COUNTERPART[name]}"
    return message + did_you_mean(name, has)
