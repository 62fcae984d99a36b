"""Whether all ranks are at the same step: the forward, or the backward, of the same call.

Every rank describes its call (shapes, dtypes and options, no values) and counts its calls. Descriptions are compared on
every rank when a rank makes a call of a kind for the first time, and for every step under ``KDACORE_CP_CHECK=always``.
A difference is a ContractError on every rank that names the argument and what each rank has.

Where the ranks meet on the host (CPU tensors, ranks that are threads) each step begins with an exchange of a few
numbers, the *head* of the step. Where heads differ, or a rank makes a new call or has an error to tell, all ranks
compare, so a difference is an error on every rank, whatever each of them was about to do.

With NCCL nothing may wait on the host. There a step that all ranks know begins with its own exchange. The mark of the
call travels with it, and where marks differ the results are NaN on every rank (:mod:`kdacore.parallel.exchange`).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from kdacore import config
from kdacore.errors import ContractError
from kdacore.ops import OpDef
from kdacore.parallel.call_marks import code_of
from kdacore.types import Request

FORWARD, BACKWARD = "forward", "backward"


class Description(NamedTuple):
    """A call without its values."""

    op: str
    arguments: tuple[tuple[str, str], ...]
    """What each argument is, in words, by name."""


class Step(NamedTuple):
    """What a rank is about to do together with the others."""

    phase: str
    """``FORWARD`` or ``BACKWARD``."""
    number: int
    """Number of the call, counted by this rank."""
    call: Description
    offsets: tuple[int, ...] | None = None
    """Values of ``cu_seqlens``, where they are in host memory."""
    error: ContractError | None = None
    """The error of a rank that cannot do the step."""


class Head(NamedTuple):
    """A step in a few numbers: what the ranks exchange before each on the host."""

    backward: int
    number: int
    code: int
    """A code of the call and its offsets, the same on every rank that makes the same call."""
    new: int
    """1 where the rank wants to compare descriptions, or to tell of an error."""


HEAD_BYTES = 8 * len(Head._fields)


def description(opdef: OpDef, request: Request, options: tuple[Any, ...], validate: str) -> Description:
    """The description of a valid call.

    Args:
        opdef: the op.
        request: of the call, as the caller made it.
        options: in the order of the definition.
        validate: what ``KDACORE_VALIDATE`` says: ranks that check values exchange what they found.
    """
    specs = dict(request.tensors)
    arrays = [(name, str(specs.get(name))) for name in opdef.arrays]
    given = [(name, repr(x)) for name, x in zip(opdef.options, options, strict=True) if name != "cp"]
    around = [("requires_grad", str(request.needs_grad)), ("KDACORE_VALIDATE", validate)]
    return Description(opdef.name, (*arrays, *given, *around))


def agree(ranks: Any, step: Step, code: int, *, known: bool, on_host: bool) -> None:
    """Compare the step with those of the other ranks, as far as the module says.

    Args:
        ranks: as one of them.
        step: of this rank.
        code: of its call and offsets.
        known: the ranks have agreed on a call of the kind before.
        on_host: the ranks meet on the host before every step.

    Raises:
        ContractError: the steps are not the same, or another rank cannot do its own; on every rank.
    """
    new = not known or config.get().cp_check_always
    if on_host:
        heads = set(ranks.heads(Head(int(step.phase == BACKWARD), step.number, code, int(new))))
        if len(heads) == 1 and not new:
            return
    elif not new:
        return
    compare(step, ranks.exchange(step))
    ranks.progress.agreed.add(step.call)


def report(ranks: Any, step: Step, *, on_host: bool) -> None:
    """Tell the other ranks of an error of this one, where they are about to compare steps.

    Not on the host, that is at the first call of all, or where every call is compared: elsewhere they may be waiting
    for something else. They will see that this rank's next call has another number.
    """
    # What the exchange itself ends with (its timeout, say) matters less than the error that is being told.
    with contextlib.suppress(RuntimeError):
        if on_host:
            ranks.heads(Head(int(step.phase == BACKWARD), step.number, code_of(step), 1))
        elif ranks.progress.agreed and not config.get().cp_check_always:
            return
        ranks.exchange(step)


def told(op: str, error: Exception) -> ContractError:
    """An error of this rank as other ranks raise it."""
    if isinstance(error, ContractError):
        return error
    return ContractError(op, "cp", f"{type(error).__name__}: {error}", "a call that every rank can make")


def compare(own: Step, all_ranks: list[Step]) -> None:
    """Raise ContractError where the steps of the ranks differ."""
    op, wanted = own.call.op, "the same on every rank of cp"
    for rank, found in enumerate(all_ranks):
        if (error := found.error) is not None:
            raise ContractError(op, error.argument, f"{error.got}, on rank {rank}", error.want)
    steps = [f"the {x.phase} of call {x.number}" for x in all_ranks]
    if len(set(steps)) > 1:
        want = (
            "the same step on every rank: ranks make the same calls, forward and backward, in one order. "
            "A group that is out of step stays so: make a new one"
        )
        raise ContractError(op, "cp", f"{_by_rank(steps)}, counted by each rank from its first", want)
    names = [found.call.op for found in all_ranks]
    if len(set(names)) > 1:
        raise ContractError(op, "cp", _by_rank(names), "the same op on every rank")
    for i, (name, _) in enumerate(own.call.arguments):
        values = [found.call.arguments[i][1] for found in all_ranks]
        if len(set(values)) > 1:
            raise ContractError(op, name, _by_rank(values), wanted)
    offsets = [str(None if x.offsets is None else list(x.offsets)) for x in all_ranks]
    if len(set(offsets)) > 1:
        raise ContractError(op, "cu_seqlens", _by_rank(offsets), wanted)


def _by_rank(values: list[str]) -> str:
    """``4 on ranks 0, 1; 5 on rank 2``."""
    parts = []
    for value in dict.fromkeys(values):
        having = [str(rank) for rank, x in enumerate(values) if x == value]
        parts.append(f"{value} on rank{'s' * (len(having) > 1)} {', '.join(having)}")
    return "; ".join(parts)
