"""Launch configurations as data: block sizes and warps of each kernel, per architecture and shape class.

``configs/candidates.json`` says, per kernel, which shape-class keys it is chosen by and which values each parameter
may take; ``configs/<arch>.json`` holds the choices, made by measurement. Nothing is tuned in a user's call.

A choice is the first rule whose ``when`` matches. A condition is a value to equal, or ``[low, high]`` (inclusive,
null for open) for a number. The last rule of a kernel has an empty ``when``, so there is always an answer.

The parameters, besides the warps and pipeline stages of each launch:

| kernel | parameter | meaning |
|---|---|---|
| `recurrent` | `BV` | channels of v that a program takes |
| `chunk_forward` | `C` | rows of a chunk |
| | `prepare_BV`, `scan_BV` | channels of v taken at a time when chunks are prepared, and in the scan |
| | `segment` | tokens of a segment of a long row; 0: rows are not cut |
| `chunk_intra` | `form` | what computes a diagonal block: a program per `token`, or one for its `chunk` |
| | `heads` | value heads that a program of a token takes |
| | `diagonal_BK`, `merge_BK` | channels of k taken at a time in diagonal blocks, and in those below them |

A tuner uses :func:`candidates` and :func:`override`: run the op under each candidate, keep the fastest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product
from types import MappingProxyType
from typing import Any

Config = Mapping[str, Any]
"""Parameter -> value: block sizes as the kernel's constexprs, ``num_warps``, ``num_stages``."""

MANY = 1 << 20
"""Stands for a number of heads, rows or tokens where a choice must not depend on them: more than a device computes at
once."""
DEFAULT_ARCH = "sm_90"
"""Where the choices for an architecture of another vendor come from."""


class InvalidConfigError(ValueError):
    """A shipped configuration file is malformed. The message names file, kernel and rule."""


@dataclass(frozen=True)
class Space:
    """What may be chosen for one kernel, and by what."""

    kernel: str
    keys: frozenset[str]
    """Shape-class keys its rules may ask for."""
    params: Mapping[str, tuple[Any, ...]]
    """Every parameter with its legal values."""
    exclude: tuple[Config, ...] = ()
    """Partial configurations that are not legal together."""

    def allows(self, config: Config) -> bool:
        """Is this a complete, legal configuration?"""
        return (
            set(config) == set(self.params)
            and all(config[p] in values for p, values in self.params.items())
            and not any(all(config[p] == x for p, x in e.items()) for e in self.exclude)
        )


@dataclass(frozen=True)
class Choice:
    """One shipped rule."""

    arch: str
    kernel: str
    when: Mapping[str, Any]
    config: Config

    def matches(self, shape: Mapping[str, Any]) -> bool:
        """Does a shape class fall under this rule? KeyError when the caller left a needed key out."""
        return all(_holds(condition, shape[key]) for key, condition in self.when.items())


def get(kernel: str, arch: str, **shape: Any) -> Config:
    """The configuration for a kernel on an architecture (``sm_90``, ``gfx942``, ``""``) and shape class.

    An architecture that nothing was measured on uses the nearest older one that was, else the nearest newer one.
    KeyError for an unknown kernel or a shape key that the kernel's rules need.
    """
    forced = _overrides.get(kernel)
    if forced is not None:
        return forced
    return _get(kernel, arch, tuple(shape.items()))


@cache
def _get(kernel: str, arch: str, shape: tuple[tuple[str, Any], ...]) -> Config:
    given = dict(shape)
    spaces()[kernel]
    for source in _by_distance(arch):
        for choice in _choices(source):
            if choice.kernel == kernel and choice.matches(given):
                return choice.config
    raise KeyError(f"no configuration is shipped for kernel {kernel!r}")


def candidates(kernel: str) -> list[Config]:
    """Every legal configuration of a kernel: what a tuner may try and tests must check."""
    space = spaces()[kernel]
    names = list(space.params)
    every = (dict(zip(names, values, strict=True)) for values in product(*space.params.values()))
    return [MappingProxyType(c) for c in every if space.allows(c)]


def shipped() -> list[Choice]:
    """Every rule of every architecture's file."""
    return [choice for arch in archs() for choice in _choices(arch)]


def shipped_for(arch: str) -> list[Choice]:
    """The rules that an architecture is served from: for each kernel those of the nearest file that has it."""
    found: dict[str, list[Choice]] = {}
    for source in _by_distance(arch):
        new = [c for c in _choices(source) if c.kernel not in found]
        for choice in new:
            found.setdefault(choice.kernel, []).append(choice)
    return [choice for choices in found.values() for choice in choices]


def kernels() -> list[str]:
    """The kernels that have configurations."""
    return sorted(spaces())


@contextmanager
def override(kernel: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Force one configuration of a kernel for every shape, for tuning and tests. Not thread-safe.

    ValueError when the configuration is not among the candidates.
    """
    if not spaces()[kernel].allows(config):
        raise ValueError(f"{kernel}: {dict(config)} is not among its candidates")
    before = _overrides.get(kernel)
    _overrides[kernel] = MappingProxyType(dict(config))
    _changed()
    try:
        yield
    finally:
        if before is None:
            del _overrides[kernel]
        else:
            _overrides[kernel] = before
        _changed()


def on_change(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever :func:`get` may start to answer differently: for callers that keep its answers."""
    _listeners.append(forget)


_overrides: dict[str, Config] = {}
_listeners: list[Callable[[], None]] = []


def _changed() -> None:
    for forget in _listeners:
        forget()


# --- the files -------------------------------------------------------------------------------------------------


@cache
def spaces() -> Mapping[str, Space]:
    """Kernel -> what may be chosen for it, from ``candidates.json``."""
    found = {}
    for kernel, entry in _read("candidates.json").items():
        unknown = set(entry) - {"class", "params", "exclude"}
        if unknown or not entry.get("params"):
            raise InvalidConfigError(
                f"candidates.json: {kernel}: unknown or missing keys ({sorted(unknown)})"
            )
        found[kernel] = Space(
            kernel,
            frozenset(entry.get("class", ())),
            {p: tuple(values) for p, values in entry["params"].items()},
            tuple(entry.get("exclude", ())),
        )
    return found


@cache
def archs() -> tuple[str, ...]:
    """The architectures that have a file of choices."""
    names = (f.name for f in _folder().iterdir())
    return tuple(sorted(n[: -len(".json")] for n in names if n.endswith(".json") and n != "candidates.json"))


@cache
def _choices(arch: str) -> tuple[Choice, ...]:
    name = f"{arch}.json"
    return check(name, arch, _read(name))


def check(name: str, arch: str, data: Mapping[str, list[dict[str, Any]]]) -> tuple[Choice, ...]:
    """The choices that a data file's content makes. InvalidConfigError, with ``name``, when it is malformed."""
    return tuple(c for kernel, rules in data.items() for c in _rules(name, arch, kernel, rules))


def _rules(name: str, arch: str, kernel: str, rules: list[dict[str, Any]]) -> list[Choice]:
    space = spaces().get(kernel)
    if space is None:
        raise InvalidConfigError(f"{name}: {kernel} is not in candidates.json")
    if not rules or rules[-1].get("when"):
        raise InvalidConfigError(f"{name}: {kernel}: the last rule must have an empty 'when'")
    found = []
    for i, rule in enumerate(rules):
        if set(rule) != {"when", "config"} or not set(rule["when"]) <= space.keys:
            raise InvalidConfigError(
                f"{name}: {kernel} rule {i}: wants 'when' over {sorted(space.keys)} and 'config'"
            )
        if not space.allows(rule["config"]):
            raise InvalidConfigError(
                f"{name}: {kernel} rule {i}: {rule['config']} is not among its candidates"
            )
        found.append(Choice(arch, kernel, rule["when"], MappingProxyType(rule["config"])))
    return found


def _folder() -> Any:
    return resources.files("kdacore_triton") / "configs"


def _read(name: str) -> dict[str, Any]:
    try:
        data = json.loads((_folder() / name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidConfigError(f"{name}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidConfigError(f"{name}: wants an object, kernel -> rules")
    return data


def _holds(condition: Any, value: Any) -> bool:
    if isinstance(condition, list):
        low, high = condition
        return (low is None or value >= low) and (high is None or value <= high)
    return bool(value == condition)


def _by_distance(arch: str) -> list[str]:
    """The architectures with a file, nearest first: older before newer of the same vendor, then the default."""
    vendor, number = _parse(arch)
    same = [(a, _parse(a)[1]) for a in archs() if _parse(a)[0] == vendor]
    older = sorted((a for a in same if a[1] <= number), key=lambda a: number - a[1])
    newer = sorted((a for a in same if a[1] > number), key=lambda a: a[1] - number)
    return [*(a for a, _ in older + newer), DEFAULT_ARCH]


def _parse(arch: str) -> tuple[str, int]:
    found = re.fullmatch(r"(sm_|gfx)([0-9a-f]+?)[af]?", arch)
    return (found[1], int(found[2], 16)) if found else ("", 0)
