"""flash-linear-attention's ``cp_context`` as kdacore's ``cp``.

Its context holds the process group and, of the offsets, those within the rank alone. kdacore wants the offsets of the
whole row. They are noted on the context when it is made, which ``kdacore.integrations.fla`` sees to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kdacore.errors import ContractError

_ATTRIBUTE = "kdacore_whole_row"
_CONTIGUOUS = "contiguous"
"""The layout in which rank r holds tokens r * T to (r + 1) * T, as with kdacore."""


class WholeRow(NamedTuple):
    """What a context does not hold of the row that it cuts."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor | None
    local: Tensor
    """The context's own offsets, and their version: another buffer or another version says that they were refilled."""
    local_version: int | None
    tokens: int
    """Tokens of a rank."""


def note_whole_row(context: Any, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
    """Note the offsets that a context was made from. Those of a context that has some are left."""
    if hasattr(context, _ATTRIBUTE) or context.cu_seqlens is None or context.cu_seqlens_cpu is None:
        return
    host = None if cu_seqlens_cpu is None else cu_seqlens_cpu.clone()
    local = context.cu_seqlens
    tokens = int(context.cu_seqlens_cpu[-1])
    setattr(context, _ATTRIBUTE, WholeRow(cu_seqlens.clone(), host, local, _version(local), tokens))


def over_ranks(
    op: str,
    context: Any,
    tokens: int,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_graph: bool = False,
) -> dict[str, Any]:
    """The arguments ``cp``, ``cu_seqlens`` and ``cu_seqlens_cpu`` of a call with a context.

    Args:
        op: for errors.
        context: ``FLACPContext``.
        tokens: that this rank was given.
        initial_state, output_final_state, use_graph: of the call, which must not be given with a context.

    Raises:
        ContractError: the call cannot be served.
    """
    layout = getattr(context, "layout", _CONTIGUOUS)  # releases before 0.6 have no other
    if layout != _CONTIGUOUS:
        raise ContractError(op, "cp_context", f"the layout {layout!r}", f"the layout {_CONTIGUOUS!r}")
    for name, given in (
        ("initial_state", initial_state is not None),
        ("output_final_state", bool(output_final_state)),
        ("use_graph", bool(use_graph)),
    ):
        if given:
            raise ContractError(op, name, "given with cp_context", "left out with cp_context")
    if getattr(context, "group", None) is None:
        raise ContractError(op, "cp_context", "a context without a group", "a context of a process group")
    row: WholeRow | None = getattr(context, _ATTRIBUTE, None)
    if row is None:
        raise ContractError(
            op,
            "cp_context",
            f"{type(context).__name__} without the offsets of the whole row",
            "one from fla.ops.cp.build_cp_context, called with kdacore.integrations.fla active",
        )
    if context.cu_seqlens is not row.local or _version(row.local) != row.local_version:
        raise ContractError(op, "cp_context", "offsets that were refilled", "a new context for new offsets")
    if tokens != row.tokens:
        raise ContractError(op, "q", f"{tokens} tokens", f"{row.tokens} tokens, as cp_context has them")
    return {"cp": context.group, "cu_seqlens": row.cu_seqlens, "cu_seqlens_cpu": row.cu_seqlens_cpu}


def _version(x: Tensor) -> int | None:
    """How often a tensor was written; None for those of inference mode, which do not count."""
    return None if x.is_inference() else x._version
