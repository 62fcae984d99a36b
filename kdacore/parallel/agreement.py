"""Whether all ranks make the same call, found out before any of them computes anything.

Every rank describes its call, shapes and dtypes and options without values, and the descriptions are compared on each.
A difference is a ContractError on every rank that names the argument and what each rank has. This waits for all ranks
on the host, so it is done for the first call of a kind alone, or for every call under ``KDACORE_CP_CHECK=always``.
Every call besides carries a mark of its description with what it exchanges; where marks differ, results are NaN.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from kdacore import config
from kdacore.errors import ContractError
from kdacore.ops import OpDef
from kdacore.types import Request


class Description(NamedTuple):
    """A call without its values."""

    op: str
    arguments: tuple[tuple[str, str], ...]
    """What each argument is, in words, by name."""
    error: ContractError | None = None
    """In place of arguments, from a rank whose own call breaks the contract."""


def description(opdef: OpDef, request: Request, options: tuple[Any, ...]) -> Description:
    """The description of a valid call.

    Args:
        opdef: the op.
        request: of the call, as the caller made it.
        options: in the order of the definition.
    """
    specs = dict(request.tensors)
    arrays = [(name, str(specs.get(name))) for name in opdef.arrays]
    given = [(name, repr(x)) for name, x in zip(opdef.options, options, strict=True) if name != "cp"]
    return Description(opdef.name, (*arrays, *given, ("requires_grad", str(request.needs_grad))))


def mark_of(own: Description) -> float:
    """A number for a description, whole and below 2**24, so that float32 holds it."""
    return float(1 + zlib.crc32(repr(own).encode()) % (2**24 - 1))


def agree(ranks: Any, own: Description) -> None:
    """Compare the call with those of the other ranks, if that has not been done for its like.

    Raises:
        ContractError: they are not the same; on every rank.
    """
    if own in ranks.agreed and not config.get().cp_check_always:
        return
    compare(own, ranks.exchange(own), ranks.rank)
    ranks.agreed.add(own)


def report(ranks: Any, op: str, error: ContractError) -> None:
    """Tell the other ranks of an error of this one, where they are about to compare calls: at the first of all, or
    where every call is compared. Elsewhere they may be waiting for something else."""
    if not ranks.agreed or config.get().cp_check_always:
        ranks.exchange(Description(op, (), error))


def compare(own: Description, all_ranks: list[Description], rank: int) -> None:
    """Raise ContractError where the calls of the ranks differ."""
    for other, found in enumerate(all_ranks):
        if found.error is not None:
            error = found.error
            raise ContractError(own.op, error.argument, f"{error.got}, on rank {other}", error.want)
    names = [found.op for found in all_ranks]
    if len(set(names)) > 1:
        raise ContractError(own.op, "cp", _by_rank(names), "the same op on every rank")
    for i, (name, _) in enumerate(own.arguments):
        values = [found.arguments[i][1] for found in all_ranks]
        if len(set(values)) > 1:
            raise ContractError(own.op, name, _by_rank(values), "the same on every rank of cp")


def _by_rank(values: list[str]) -> str:
    """``4 on ranks 0, 1; 5 on rank 2``."""
    parts = []
    for value in dict.fromkeys(values):
        having = [str(rank) for rank, x in enumerate(values) if x == value]
        parts.append(f"{value} on rank{'s' * (len(having) > 1)} {', '.join(having)}")
    return "; ".join(parts)
