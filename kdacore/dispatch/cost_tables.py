"""Cost tables: how long each backend took for calls of many sizes, on one device. Which table counts where.

A table ships for each measured architecture (``kdacore/dispatch/profiles/<arch>.json``), with the times of benchmark
records beside it (``profiles/recorded``). Where both have a size, the table with the newer date counts; that of records
has the date of the newest one, so that single times in it may be older. ``kdacore tune`` measures one for the device
that is here, and writes it to ``costs`` in the cache folder, where it counts instead. A table there that cannot be used
is ignored with a warning that says why; ``kdacore doctor`` lists them all.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kdacore import config, files
from kdacore.device import torch_device
from kdacore.errors import PerformanceWarning
from kdacore.registry import REGISTRY
from kdacore.types import Device

SCHEMA = 2
_LIMIT = 1 << 22
"""Bytes; a table has some forty thousand."""

Variant = tuple[tuple[str, Any], ...]
"""What tells calls of one op apart beside their sizes, names and values (:func:`kdacore.dispatch.cost.variant_of`)."""
Columns = Mapping[int, tuple[tuple[float, float], ...]]
"""Items (sequences times value heads) -> tokens of a sequence and seconds, ascending."""


class Group(NamedTuple):
    """Calls whose times are compared with one another: all that does not change with their sizes."""

    op: str
    kind: str
    dtype: str
    grad: bool
    K: int
    V: int


class TableError(ValueError):
    """A file that is no cost table, or one that cannot be used here. The message says why."""


class StaleTableError(TableError):
    """A whole table, measured with other versions of the backends than those that are here."""


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times, and where they were measured."""

    arch: str
    device: str
    """The device's own name for itself, as ``NVIDIA H200``."""
    when: str
    """Date of the measurement."""
    backends: Mapping[str, str]
    """Version of each backend measured."""
    times: Mapping[tuple[str, Group], Mapping[Variant, Columns]]
    """By backend and group, then by variant."""
    source: str = ""
    """Where the table was read from, for people."""
    sources: Mapping[tuple[str, Group, Variant], str] = field(default_factory=dict)
    """The same of variants whose times come from elsewhere."""

    def source_of(self, backend: str, group: Group, variant: Variant) -> str:
        """Where the times of a variant come from, for people."""
        return self.sources.get((backend, group, variant), self.source)


def parse(text: str, source: str = "") -> Table:
    """A table's contents. TableError when it is not one that this version understands."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TableError(f"it is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise TableError(f"its schema is {found!r}; this version reads {SCHEMA}")
    try:
        times: dict[tuple[str, Group], dict[Variant, Columns]] = {}
        sources = {}
        for entry in data["times"]:
            key, variant = (
                (entry["backend"], Group(**entry["group"])),
                tuple(sorted(entry["variant"].items())),
            )
            times.setdefault(key, {})[variant] = _columns(entry["points"])
            if "source" in entry:
                sources[(*key, variant)] = str(entry["source"])
        head = {name: data[name] for name in ("arch", "device", "when")}
        if not all(isinstance(x, str) for x in head.values()):
            raise TypeError("arch, device and when are texts")
        return Table(
            **head,
            backends=dict(data["backends"]),
            times=MappingProxyType(times),
            source=source,
            sources=MappingProxyType(sources),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"it is damaged: {error!r}") from None


def _columns(points: Iterable[tuple[float, int, float]]) -> Columns:
    columns: dict[int, list[tuple[float, float]]] = {}
    for tokens, items, seconds in points:
        if not (tokens > 0 and items > 0 and 0 < seconds < float("inf")):
            raise ValueError(f"tokens, items and seconds are positive; got {[tokens, items, seconds]}")
        columns.setdefault(items, []).append((tokens, seconds))
    if not columns:
        raise ValueError("a variant without points")
    return {items: tuple(sorted(column)) for items, column in sorted(columns.items())}


def dump(table: Table) -> str:
    """The table as text, one variant a line."""
    head = {"schema": SCHEMA, "arch": table.arch, "device": table.device, "when": table.when}
    lines = []
    for (backend, group), variants in sorted(table.times.items()):
        for variant, columns in sorted(variants.items(), key=repr):
            points = [[t, items, s] for items, column in columns.items() for t, s in column]
            entry = {"backend": backend, "group": group._asdict(), "variant": dict(variant), "points": points}
            if origin := table.sources.get((backend, group, variant)):
                entry["source"] = origin
            lines.append("  " + json.dumps(entry))
    body = ",\n".join(lines)
    first = json.dumps({**head, "backends": dict(table.backends)})[:-1]
    return f'{first}, "times": [\n{body}\n]}}\n'


# --- which table counts -------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where ``kdacore tune`` writes tables."""
    return config.get().cache_dir / "costs"


CPU = "cpu"
"""Stands for the architecture of CPUs, which have none, in the names of tables."""


def path_of(arch: str, device: str) -> Path:
    """The file of a device's own table."""
    return folder() / f"{arch or CPU}-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"


@functools.cache
def shipped(arch: str) -> Table | None:
    """The table that ships for an architecture, if there is one."""
    table, recorded = _packaged(f"{arch or CPU}.json"), _packaged(f"recorded/{arch or CPU}.json")
    return table if table is None or recorded is None else _with_records(table, recorded)


def _packaged(name: str) -> Table | None:
    file = resources.files("kdacore.dispatch").joinpath("profiles", *name.split("/"))
    if not file.is_file():
        return None
    return parse(file.read_text(encoding="utf-8"), f"shipped, dispatch/profiles/{name}")


def _with_records(table: Table, recorded: Table) -> Table:
    """The table with the recorded times. Where both have a size, the table with the newer date counts."""
    times = {key: dict(variants) for key, variants in table.times.items()}
    sources = dict(table.sources)
    for key, variants in recorded.times.items():
        for variant, columns in variants.items():
            known, source = times.setdefault(key, {}).get(variant), recorded.source_of(*key, variant)
            times[key][variant] = (
                columns if known is None else _with_points(known, columns, recorded.when > table.when)
            )
            sources[(*key, variant)] = source if known is None else f"{table.source}, and {source}"
    return replace(table, times=MappingProxyType(times), sources=MappingProxyType(sources))


def _with_points(known: Columns, more: Columns, newer: bool) -> Columns:
    columns = {items: dict(column) for items, column in sorted(known.items())}
    for items, column in more.items():
        for tokens, seconds in column:
            own = columns.setdefault(items, {})
            if newer or tokens not in own:
                own[tokens] = seconds
    return {items: tuple(sorted(column.items())) for items, column in sorted(columns.items())}


def shipped_archs() -> tuple[str, ...]:
    """The architectures that a table ships for, that of CPUs as :data:`CPU`."""
    names = (f.name for f in resources.files("kdacore.dispatch").joinpath("profiles").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def read(path: Path) -> Table:
    """A device's own table. TableError, or OSError, when it cannot be used."""
    try:
        text = files.read_ours(path, _LIMIT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError(f"it is not text: {error}") from None
    table = parse(text, str(path))
    if path_of(table.arch, table.device).name != path.name:
        raise TableError(f"it was measured on {table.device} ({table.arch}), which its name does not say")
    registered = REGISTRY.backends()
    for name, version in table.backends.items():
        now = registered[name].backend.version if name in registered else "not installed"
        if now != version:
            raise StaleTableError(f"it was measured with {name} {version}; here it is {now}")
    return table


@dataclass(frozen=True, slots=True)
class Found:
    """A file in the folder of tables."""

    path: Path
    table: Table | None
    problem: str
    """Why it is not used anywhere; empty where nothing is wrong with it."""
    damaged: bool = False
    """It cannot be read; otherwise it is merely out of date."""


def own_tables(arch: str = "") -> Iterator[Found]:
    """The files that ``kdacore tune`` left, of one architecture or of all."""
    try:
        paths = sorted(folder().glob(f"{arch}-*.json" if arch else "*.json"))
    except OSError:  # the doctor says of the cache folder what is wrong with it
        return
    for path in paths:
        if path.name.endswith(PARTIAL):
            continue
        try:
            yield Found(path, read(path), "")
        except (TableError, OSError) as error:
            yield Found(path, None, str(error), not isinstance(error, StaleTableError))


PARTIAL = ".partial.json"
"""End of the name of a table that is being measured."""


@functools.lru_cache(maxsize=64)
def table_for(arch: str, device: str) -> Table | None:
    """The table that counts on a device of this name; where it is not known, of an architecture.

    Warns of a table of the device's own that cannot be used. Where the device is not known, the only table of its
    architecture that ``kdacore tune`` left counts.
    """
    found = list(own_tables(arch or CPU))
    for one in found:
        if one.problem and device and one.path == path_of(arch, device):
            warnings.warn(
                f"cost table {one.path} is ignored: {one.problem}. `kdacore tune` measures it again",
                PerformanceWarning,
                stacklevel=2,
            )
    usable = [one.table for one in found if one.table is not None]
    own = [table for table in usable if table.device == device] if device else usable
    return own[0] if len(own) == 1 else shipped(arch)


def in_use(device: Device) -> Table | None:
    """The table for calls on a device, if there is one."""
    if not device.arch and device.type != "cpu":
        return None
    return table_for(device.arch, _name(device))


def _name(device: Device) -> str:
    """The device's name for itself; empty where torch is not loaded or sees another device, as for assumed hardware,
    and for a CPU that has no table of its own."""
    if device.type == "cpu":
        return _cpu_name()
    torch = sys.modules.get("torch")
    if torch is None or device.type not in ("cuda", "rocm"):
        return ""
    return _torch_name(device)


@functools.cache
def _cpu_name() -> str:
    if not any(True for _ in own_tables(CPU)):
        return ""
    from kdacore.machine import cpu_name  # here: few machines have such a table

    return cpu_name()


@functools.cache
def _torch_name(device: Device) -> str:
    cuda = sys.modules["torch"].cuda
    if not cuda.is_available() or device.index >= cuda.device_count():
        return ""
    if torch_device("cuda", device.index) != device:
        return ""
    return str(cuda.get_device_name(device.index))


generation = object()
"""Another one whenever tables are read anew."""


def forget() -> None:
    """Read tables anew: one was written, or the configuration changed."""
    global generation
    generation = object()
    table_for.cache_clear()
    _cpu_name.cache_clear()
    _torch_name.cache_clear()


config.on_refresh(forget)
REGISTRY.on_change(forget)
