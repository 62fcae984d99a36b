"""Predicts how long a backend takes for a call, from the cost table in use (:mod:`kdacore.dispatch.cost_tables`).

Between measured sizes times are interpolated: linearly in the tokens of a sequence, and in items, the sequences times
value heads, whose chains of chunks a device computes side by side. How the tokens are shared out among the sequences
of a pack is not known, so each counts as long as their mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kdacore.dispatch import cost_tables
from kdacore.dispatch.cost_tables import Columns, Group, Table, Variant
from kdacore.ops import OPS
from kdacore.types import Request

REACH = 4.0
"""Sizes more than this many times beyond what was measured are not predicted."""
CPU_REACH = 256.0
"""The same on CPUs, where time grows in proportion to work from the smallest sizes on."""

_LIKE = {"fused_recurrent_gated_delta_rule": "fused_recurrent_kda"}
"""Op -> another whose times tell of it too: both read and write the same states, which is what takes the time."""

_WEIGHTS = {"gate": 8, "v_first": 8, "state": 4, "packed": 4, "g": 2, "initial_state": 1, "pool": 1}
"""What a difference between variants counts, where a call's own was not measured."""


class Prediction(NamedTuple):
    """Seconds, and where they come from."""

    seconds: float
    source: str


def is_cost(seconds: object) -> bool:
    """Can a plugin's answer be used as a cost: a finite number of 0 or more that a float holds, or None?"""
    if seconds is None:
        return True
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    try:
        return 0 <= float(seconds) < math.inf
    except OverflowError:  # an integer beyond all floats
        return False


def group_of(request: Request) -> Group:
    """The measured calls that a request may be compared with."""
    r = request
    return Group(r.op, r.kind, r.dtype, r.needs_grad, r.K, r.V)


def variant_of(request: Request) -> Variant:
    """What beside its sizes the time of a call depends on."""
    r = request
    family = OPS[r.op].family
    if family == "decode":
        by_records = r.has("record_update")
        by_states = r.state_indices_ndim > 1 or r.write_indices_ndim > 1
        found: dict[str, Any] = {
            "state": r.state_dtype,
            "v_first": r.state_v_first,
            "candidates": "records" if by_records else "states" if by_states else "",
        }
    elif family == "recurrent":
        found = {
            "state": r.state_dtype,
            "v_first": r.state_v_first,
            "g": r.spec("g").dtype if r.has("g") else r.dtype,
            "packed": r.packed,
            "pool": r.state_indices_ndim > 0,
        }
    else:
        found = {
            "gate": "bounded" if _is_bounded(r) else "unbounded",
            "packed": r.packed,
            "initial_state": r.has("initial_state"),
        }
    return tuple(sorted(found.items()))


_MEASURED_BOUND = -5.0
"""``lower_bound`` of the measured calls. Below it kernels compute as for gates without a bound."""


def _is_bounded(r: Request) -> bool:
    """Whether the kernels for bounded gates compute a call: its decays are given and promised, or computed so."""
    if r.gate == "sigmoid":
        return r.lower_bound is None or r.lower_bound >= _MEASURED_BOUND
    return r.gate == "log" and r.safe_gate


def tokens_of(request: Request) -> float:
    """Tokens of a sequence, the mean of a pack."""
    return request.B * request.T / request.N


def predict(backend: str, request: Request) -> Prediction | None:
    """None where nothing similar was measured."""
    return Predictor(backend).predict(request)


class Predictor:
    """Predicts times of a backend for calls that differ in lengths alone.

    Args:
        backend: its name.
    """

    __slots__ = ("_backend", "_cell", "_generation", "_measured", "_table")

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._generation: object = None
        self._table: Table | None = None
        self._measured: tuple[_Measured, ...] = ()
        """What was measured of calls like these, by group, the nearest variants first."""
        self._cell: _Cell | None = None
        """Where the sizes of the last call lay: those of the next are likely to lie there too."""

    def predict(self, request: Request) -> Prediction | None:
        """None where nothing similar was measured."""
        # Only torch knows the names of devices, and with JAX's arrays it may be imported at any time.
        if self._generation is not cost_tables.generation or request.kind == "jax":
            table = cost_tables.in_use(request.device)
            if table is not self._table or self._generation is not cost_tables.generation:
                self._measured = () if table is None else _measured(table, self._backend, request)
                self._cell = None
            self._table, self._generation = table, cost_tables.generation
        if not self._measured:
            return None
        tokens, items = request.B * request.T / request.N, request.N * request.HV
        cell = self._cell
        if cell is None or not (cell.few < items < cell.many and cell.above < tokens <= cell.most):
            cell = self._cell = _cell_of(self._measured[0][0], tokens, items)
        if cell is not None:
            return _prediction(cell.seconds(tokens, items), cell.source)
        for ordered in self._measured:
            found = _best(ordered, tokens, items)
            if found is not None:
                return found
        return None


Points = Sequence[tuple[float, float]]
"""Tokens of a sequence and seconds, ascending."""


class _Line(NamedTuple):
    """Times between two measured sizes, or beyond the last: ``seconds + slope * (tokens - start)``."""

    start: float
    seconds: float
    slope: float


class _Column(NamedTuple):
    """What was measured with one number of items, prepared once so that a prediction is a search and a product."""

    tokens: tuple[float, ...]
    """Tokens of a sequence, ascending."""
    lines: tuple[_Line, ...]
    """One for each place of a size among ``tokens``, the last for larger ones."""
    nearest: float
    """The fewest tokens that are within reach."""
    farthest: float


class _Variant(NamedTuple):
    """One measured variant of calls, as compared with those that are predicted."""

    columns: tuple[_Column, ...]
    counts: tuple[int, ...]
    """The numbers of items that were measured, ascending."""
    measured: str
    """The source of a prediction: what of the measured calls is not as in these, and where they were measured."""
    interpolated: str
    extrapolated: str
    reach: float


class _Cell(NamedTuple):
    """Sizes between two measured numbers of items, and measured numbers of tokens. Those on a measured number of items
    belong to none."""

    few: int
    many: int
    above: float
    """Fewer tokens than any here, barely."""
    most: float
    fewer: _Line
    more: _Line
    source: str

    def seconds(self, tokens: float, items: int) -> float:
        """The prediction for sizes in the cell."""
        few, many, _, _, (start, fewer, slope), (start_of_more, more, slope_of_more), _ = self
        fewer += slope * (tokens - start)
        more += slope_of_more * (tokens - start_of_more)
        return fewer + (more - fewer) * (items - few) / (many - few)


def _cell_of(variant: _Variant, tokens: float, items: int) -> _Cell | None:
    """The cell of a variant that sizes lie in, if they lie in one."""
    counts = variant.counts
    if not counts[0] < items < counts[-1]:
        return None
    i = bisect_left(counts, items)
    if counts[i] == items:
        return None
    above, most, lines = 0.0, math.inf, []
    for times, of_column, _, _ in variant.columns[i - 1 : i + 1]:
        if not times[0] <= tokens <= times[-1]:
            return None
        j = bisect_left(times, tokens)
        above = max(above, times[j - 1] if j else math.nextafter(times[0], 0.0))
        most = min(most, times[j])
        lines.append(of_column[j])
    return _Cell(counts[i - 1], counts[i], above, most, lines[0], lines[1], variant.interpolated)


_Measured = tuple[_Variant, ...]


def _measured(table: Table, backend: str, request: Request) -> tuple[_Measured, ...]:
    own, variant = group_of(request), variant_of(request)
    groups = [own, own._replace(op=_LIKE[own.op])] if own.op in _LIKE else [own]
    reaches = dict.fromkeys(groups, REACH)
    if not table.arch:
        reaches = dict.fromkeys(_nearest_on_cpu(table, backend, own), CPU_REACH)
    elif own.kind == "jax":
        # Few sizes are measured with JAX. Beyond them torch's calls of the same kernels tell more.
        reaches = dict.fromkeys(groups, 1.0) | {group._replace(kind="torch"): REACH for group in groups}
    found = []
    for group, reach in reaches.items():
        variants = table.times.get((backend, group))
        if not variants:
            continue
        # Steps with candidates are other kernels than those without.
        alike = [other for other in variants if _candidates(other) == _candidates(variant)]
        ordered = sorted(alike, key=lambda other: _difference(variant, other))
        found.append(
            tuple(
                [
                    _variant(
                        variants[other],
                        f"{_other(own, group, variant, other)} "
                        f"({table.device}; {table.source_of(backend, group, other)})",
                        own.K * own.V / (group.K * group.V),
                        reach,
                    )
                    for other in ordered
                ]
            )
        )
    return tuple(found)


def _candidates(variant: Variant) -> object:
    return dict(variant).get("candidates")


def _nearest_on_cpu(table: Table, backend: str, own: Group) -> list[Group]:
    """The measured group of a CPU that is most like a call's: of its head dims, or of those nearest to them, since
    there every implementation takes time in proportion to K * V, and of another dtype where its own was not measured.
    """
    alike = [
        group
        for name, group in table.times
        if (name, group.op, group.kind, group.grad) == (backend, own.op, own.kind, own.grad)
    ]
    size = math.log(own.K * own.V)
    alike.sort(key=lambda group: (group.dtype != own.dtype, abs(math.log(group.K * group.V) - size)))
    return alike[:1]


def _variant(columns: Columns, said: str, factor: float, reach: float) -> _Variant:
    """``factor``: on every measured time. ``reach``: how far beyond what was measured times are predicted; not at all
    where that is one size, which does not tell how they grow."""
    if sum(map(len, columns.values())) == 1:
        reach = 1.0
    prepared = tuple([_column([(t, s * factor) for t, s in points], reach) for points in columns.values()])
    measured, interpolated, extrapolated = [
        how + said
        for how in ("taken" if said.startswith(" from") else "measured", "interpolated", "extrapolated")
    ]
    return _Variant(prepared, tuple(columns), measured, interpolated, extrapolated, reach)


def _column(points: Points, reach: float) -> _Column:
    (first, at_first), (last, at_last) = points[0], points[-1]
    lines = [_Line(first, at_first, 0.0)]
    for (t0, s0), (t1, s1) in pairwise(points):
        lines.append(_Line(t0, s0, (s1 - s0) / (t1 - t0)))
    beyond = max(lines[-1].slope, 0.0) if len(points) > 1 else at_first / first
    lines.append(_Line(last, at_last, beyond))
    return _Column(tuple([t for t, _ in points]), tuple(lines), first / reach, last * reach)


def _best(ordered: _Measured, tokens: float, items: int) -> Prediction | None:
    """From the nearest variant that was measured around the sizes, else the nearest that was measured near them."""
    for variant in ordered:
        counts = variant.counts
        if not counts[0] <= items <= counts[-1]:
            continue
        i = bisect_left(counts, items)
        column = variant.columns[i]
        if counts[i] != items:
            cell = _cell_of(variant, tokens, items)
            if cell is not None:
                return _prediction(cell.seconds(tokens, items), cell.source)
        elif column.tokens[0] <= tokens <= column.tokens[-1]:
            exact = column.tokens[bisect_left(column.tokens, tokens)] == tokens
            return _prediction(_seconds(column, tokens), variant.measured if exact else variant.interpolated)
    for variant in ordered:
        found = _near(variant, tokens, items)
        if found is not None:
            return found
    return None


def _prediction(*fields: Any) -> Prediction:
    made: Prediction = tuple.__new__(Prediction, fields)  # in half the time of its constructor
    return made


def _near(variant: _Variant, tokens: float, items: int) -> Prediction | None:
    """From a variant that was measured within reach of the sizes."""
    counts = variant.counts
    i = bisect_left(counts, items)
    # The measured numbers of items below and above, the outermost one twice beyond it.
    high = min(i, len(counts) - 1)
    low = high if i in (0, len(counts)) or counts[high] == items else high - 1
    if not counts[low] / variant.reach <= items <= counts[high] * variant.reach:
        return None
    for column in variant.columns[low : high + 1]:
        if not column.nearest <= tokens <= column.farthest:
            return None
    if low < high:
        return Prediction(_between(variant, high, tokens, items), variant.extrapolated)
    # Beyond the most items time grows with them; the fewest do not fill the device.
    seconds = _seconds(variant.columns[high], tokens) * max(items / counts[high], 1.0)
    return Prediction(seconds, variant.extrapolated)


def _between(variant: _Variant, high: int, tokens: float, items: int) -> float:
    """Seconds of so many items, between the column of this number and the one before."""
    few, many = variant.counts[high - 1 : high + 1]
    seconds = _seconds(variant.columns[high - 1], tokens)
    return seconds + (_seconds(variant.columns[high], tokens) - seconds) * (items - few) / (many - few)


def _seconds(column: _Column, tokens: float) -> float:
    start, seconds, slope = column.lines[bisect_left(column.tokens, tokens)]
    return seconds + slope * (tokens - start)


def _difference(one: Variant, other: Variant) -> int:
    known = dict(other)
    return sum(_WEIGHTS.get(name, 1) for name, value in one if known.get(name) != value)


def _other(own: Group, group: Group, variant: Variant, measured: Variant) -> str:
    """Says what of the measured calls is not as in this one."""
    other = [f"{name}={value}" for name, value in measured if dict(variant).get(name) != value]
    if (group.K, group.V) != (own.K, own.V):
        other.insert(0, f"K={group.K}, V={group.V}")
    if group.dtype != own.dtype:
        other.insert(0, group.dtype)
    if group.op != own.op:
        other.insert(0, group.op)
    if group.kind != own.kind:
        other.insert(0, f"{group.kind} arrays")
    return f" from calls with {', '.join(other)}" if other else ""
