"""What an op definition consists of: arrays, options, results and features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdacore.errors import ContractError

Family = Literal["chunk", "recurrent", "decode", "commit", "gate", "stage"]
OptionKind = Literal["flag", "number", "count", "choice", "ranks"]
"""``flag``: True or False. ``number``: a finite real number, or None. ``count``: an integer, or None. ``choice``: one
of some names. ``ranks``: the ranks that a call is spread over, or None; :mod:`kdacore.parallel` serves such calls, and
makes others of them without it."""

_DOC: Any = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ArrayArgument:
    """One array argument of an op."""

    name: str
    required: bool = False
    feature: str | None = None
    """What a backend lists in :attr:`kdacore.types.OpImpl.serves` to be given calls with this array.
    None for arrays that every implementation takes, and for hints that change no result."""
    host: bool = False
    """Lives on the host, whatever the device of the others."""
    index: bool = False
    """Holds int32 or int64 offsets, row numbers or counts."""
    mask: bool = False
    """Holds bools."""
    writable: bool = False
    """A call may ask for it to be written, so the fast path compares its strides."""
    differentiable: bool = False
    part_of: str = ""
    """The argument of the public function that this array is a part of: a tuple, in the order of the definition. Empty
    for an argument of its own."""
    doc: str = _DOC
    """What stands of it under ``Args:`` of the public function. Empty: described with the argument after it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword option of an op."""

    name: str
    kind: OptionKind
    default: Any = None
    feature: str | None = None
    """What a backend lists in :attr:`kdacore.types.OpImpl.serves` to be given calls with another
    value than the default. None for options that every implementation honours, and for hints that
    change no result."""
    field: str = ""
    """The field of :class:`kdacore.types.Request` that it sets. Without one, a value other than the
    default is found by :meth:`kdacore.types.Request.option`."""
    choices: tuple[str, ...] = ()
    """The names that a ``choice`` is one of."""
    doc: str = _DOC
    """What stands of it under ``Args:`` of the public function."""


@dataclass(frozen=True, slots=True)
class OpDef:
    """One op: argument order, option names, defaults and results, written once.

    Signatures, operator schemas, command-line switches and tables derive from it or are held to it
    by a test.
    """

    name: str
    family: Family
    inputs: type
    """The named tuple that a backend receives the arrays in, in the order of ``array_arguments``."""
    array_arguments: tuple[ArrayArgument, ...]
    option_arguments: tuple[Option, ...]
    outputs: type | None = None
    """The named tuple that ``forward`` returns; None for one array."""
    scalar_gate: bool = False
    """One decay per head: ``g`` is ``[B, T, HV]``."""

    arrays: tuple[str, ...] = field(init=False)
    """Names of the array arguments, in the order of ``inputs``."""
    required: tuple[str, ...] = field(init=False)
    """Names of the arrays that must be given."""
    options: tuple[str, ...] = field(init=False)
    """Names of the options, in the order in which option values travel."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", tuple([a.name for a in self.array_arguments]))
        object.__setattr__(self, "required", tuple([a.name for a in self.array_arguments if a.required]))
        object.__setattr__(self, "options", tuple([o.name for o in self.option_arguments]))

    @property
    def tuples(self) -> dict[str, tuple[str, ...]]:
        """Arguments of the public function that are tuples of arrays: the arrays' names by the argument's."""
        found: dict[str, tuple[str, ...]] = {}
        for a in self.array_arguments:
            if a.part_of:
                found[a.part_of] = (*found.get(a.part_of, ()), a.name)
        return found

    def keywords(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the public function that give it these arrays."""
        of_part = {part: name for name, parts in self.tuples.items() for part in parts}
        found: dict[str, Any] = {}
        for name, x in arrays.items():
            if name in of_part:
                parts = self.tuples[of_part[name]]
                found[of_part[name]] = tuple([arrays.get(part) for part in parts])
            else:
                found[name] = x
        return found

    @property
    def defaults(self) -> dict[str, Any]:
        """Default of each option."""
        return {o.name: o.default for o in self.option_arguments}

    @property
    def features(self) -> frozenset[str]:
        """Every feature that a call of this op can use."""
        named = {a.feature for a in self.array_arguments} | {o.feature for o in self.option_arguments}
        gates = FEATURE_OF_GATE.values() if "g" in self.arrays else ()
        return frozenset([name for name in (*named, *gates, GROUPED_VALUE_HEADS) if name is not None])

    def written(self, arrays: Iterable[Any], options: Iterable[Any]) -> tuple[str, ...]:
        """Names of the arrays that a call writes in place, where its library's arrays can be written.

        Args:
            arrays: what was given, None where nothing was, in the order of ``arrays``; not validated yet.
            options: the options' values, in the order of ``options``.
        """
        given = [
            a.name for a, x in zip(self.array_arguments, arrays, strict=True) if a.writable and x is not None
        ]
        asked = dict(zip(self.options, options, strict=True))
        return self.written_of(given, asked.get("inplace_state", True) is True)

    def written_of(self, given: Iterable[str], inplace: bool) -> tuple[str, ...]:
        """The same of the names of arrays that were given; ``inplace``: the call asks for its states to be written."""
        there = set(given)
        read_only = "initial_state" if "write_pool" in there else ""
        names = [
            a.name for a in self.array_arguments if a.writable and a.name in there and a.name != read_only
        ]
        states = [name for name in names if name != "out"] if inplace else []
        return (*[name for name in names if name == "out"], *states)

    def features_used(
        self, arrays: Iterable[str], options: Mapping[str, Any], gate: str, grouped: bool
    ) -> frozenset[str]:
        """The features that one call uses.

        Args:
            arrays: names of the arrays that were given.
            options: the options' values by name.
            gate: :attr:`kdacore.types.Request.gate`.
            grouped: whether there are more value heads than heads of q and k.
        """
        given = frozenset(arrays)
        used = {a.feature for a in self.array_arguments if a.name in given}
        used |= {o.feature for o in self.option_arguments if o.feature and options[o.name] != o.default}
        used.add(FEATURE_OF_GATE.get(gate) if "g" in given else None)
        if grouped:
            used.add(GROUPED_VALUE_HEADS)
        return frozenset([name for name in used if name is not None])


def arrays_of(op: str, argument: str, given: Any, count: int) -> Any:
    """The arrays of an argument that is a tuple of them; None for each where it is None.

    Raises:
        ContractError: it is no tuple of so many.
    """
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)) or len(given) != count:
        got = f"{len(given)} arrays" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
        raise ContractError(op, argument, got, f"a tuple of {count} arrays")
    return given


GROUPED_VALUE_HEADS = "grouped_value_heads"
FEATURE_OF_GATE = {"softplus": "gate.unbounded", "sigmoid": "gate.bounded"}
"""Feature of a call that computes its gate, by :attr:`kdacore.types.Request.gate`."""
