"""What all random calls of a run have in common, for kernels that serve calls of certain sizes only."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from kdacore.argument_types import at_least
from kdacore.testing.cases import Case
from kdacore.testing.random_parts import pick

Check = Literal["accuracy", "gradients"]
SIZES = ("B", "T", "HV", "K", "V")
"""Sizes of a call that can be limited, named as in :class:`kdacore.calls.values.Shape`."""


class Size(NamedTuple):
    """A size that is drawn between two numbers, both included."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Limits:
    """What is fixed for every random call of a run instead of drawn from its seed. The default fixes nothing."""

    op: str = ""
    """Every call is of this op."""
    check: Check | Literal[""] = ""
    """Every call is measured this way."""
    sizes: tuple[Size, ...] = ()
    """Sizes, each drawn within its bounds. Calls with any are dense (no ``cu_seqlens``), and ``H`` is a random divisor
    of ``HV``."""
    together: int = 1
    """So many seeds in a row, from a multiple of it on, stand for calls of the same sizes, dtypes and options, so that
    their program is compiled once. Values, lengths, rows of pools, views, modes and faults differ."""
    many: bool = False
    """Every call is dense, of many sequences and heads, on a pool with null slots."""

    def resize(self, case: Case, rng: Any) -> Case:
        """The call with sizes within the limits."""
        if not self.sizes:
            return case
        drawn = {name: int(rng.integers(low, high + 1)) for name, low, high in self.sizes}
        shape = replace(case.shape, lengths=(), padding=0, **drawn)
        shape = replace(shape, H=pick(rng, *(n for n in range(1, shape.HV + 1) if shape.HV % n == 0)))
        return replace(case, shape=shape, host_offsets=False)

    def described(self) -> dict[str, Any]:
        """What is fixed, for a record: sizes as ``[low, high]``."""
        found: dict[str, Any] = {name: value for name in ("op", "check") if (value := getattr(self, name))}
        if self.together > 1:
            found["together"] = self.together
        if self.many:
            found["many"] = True
        return found | {name: [low, high] for name, low, high in self.sizes}

    def words(self) -> list[str]:
        """The arguments of a command that :func:`limits_of` reads."""
        sizes = [f"{name}={low}..{high}" for name, low, high in self.sizes]
        return [
            *(["--op", self.op] if self.op else []),
            *(["--check", self.check] if self.check else []),
            *(["--size", *sizes] if sizes else []),
            *(["--together", str(self.together)] if self.together > 1 else []),
            *(["--many"] if self.many else []),
        ]


NO_LIMITS = Limits()


def add_limits(parser: argparse.ArgumentParser) -> None:
    """The arguments ``--op``, ``--check``, ``--size``, ``--together`` and ``--many``."""
    parser.add_argument("--op", default="", metavar="OP", help="call this op alone")
    parser.add_argument(
        "--check", choices=get_args(Check), default="", help="measure every call this way; none on pools"
    )
    parser.add_argument(
        "--size", type=_size, nargs="+", action="extend", default=[], metavar="NAME=LOW..HIGH",
        help=f"dense calls of these sizes: {', '.join(SIZES)}",
    )  # fmt: skip
    parser.add_argument(
        "--together",
        type=at_least(1),
        default=1,
        metavar="N",
        help="N seeds in a row share sizes, dtypes and options, hence one compiled program (1)",
    )
    parser.add_argument(
        "--many", action="store_true", help="dense calls of many sequences and heads, on pools with null slots"
    )  # fmt: skip


def limits_of(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> Limits:
    """What the arguments of :func:`add_limits` say; where they contradict each other, the parser's error."""
    if asked.size and not asked.check:
        parser.error("argument --size: needs --check, as calls on pools have sizes of their own")
    names = [name for name, _, _ in asked.size]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"argument --size: more than one of {', '.join(repeated)}")
    if asked.many and asked.check:
        parser.error(
            "argument --many: not with --check, as calls on pools are measured in a way of their own"
        )
    return Limits(asked.op, asked.check, tuple(asked.size), asked.together, asked.many)


def _size(text: str) -> Size:
    """``HV=24`` or ``T=1024..2100``. argparse turns the error into exit status 2."""
    name, _, numbers = text.partition("=")
    low, _, high = numbers.partition("..")
    high = high or low
    if name not in SIZES or not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as HV=24 or T=1024..2100, of {', '.join(SIZES)}"
        )
    return Size(name, int(low), int(high))
