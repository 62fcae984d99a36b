"""What can be wrong with an otherwise valid call, by name; :mod:`kdacore.testing.checks.refusal` makes such calls.

A fault is ``kind:which``:

- ``offsets:HOW``: ``cu_seqlens`` are no offsets, in one of the ways of :data:`OFFSETS`;
- ``negated:ARGUMENT``: torch, an argument that would be written is a lazily negated view;
- ``inference:ARGUMENT``: torch, an argument that would be written was made in inference mode;
- ``saved:ARGUMENT``: torch, an argument of a call that needs gradients was made in inference mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kdacore.calls.description import specs
from kdacore.calls.values import offsets
from kdacore.ops import DIFFERENTIABLE, OPS
from kdacore.testing.cases import Case

Offsets = list[int]


def wraps(bounds: Offsets, T: int, largest: int) -> Offsets:
    """Neighbours whose difference does not fit into the dtype, and comes out positive where it wraps."""
    if len(bounds) < 4:
        return [*bounds[:-1], -largest - 1]
    return [0, largest, -5, *bounds[3:-1], T]


def huge(bounds: Offsets, T: int, largest: int) -> Offsets:
    return [*bounds[:-1], largest]


def beyond(bounds: Offsets, T: int, largest: int) -> Offsets:
    return [*bounds[:-1], T + 1]


def decreasing(bounds: Offsets, T: int, largest: int) -> Offsets:
    return [0, *bounds[2:], bounds[-1] - 1] if len(bounds) > 2 else [0, -1]


def late(bounds: Offsets, T: int, largest: int) -> Offsets:
    """The first is not 0."""
    return [1, *(max(b, 1) for b in bounds[1:])]


def early(bounds: Offsets, T: int, largest: int) -> Offsets:
    return [-largest - 1, *bounds[1:]]


OFFSETS: dict[str, Callable[[Offsets, int, int], Offsets]] = {
    f.__name__: f for f in (wraps, huge, beyond, decreasing, late, early)
}
"""Each takes valid offsets, ``T`` and the largest number of the dtype."""
_OTHER = "disagree"
"""``cu_seqlens_cpu`` are offsets, but not those of ``cu_seqlens``."""


def are_offsets(bounds: Offsets, T: int) -> bool:
    """What the contract says of ``cu_seqlens``; Python's integers do not wrap."""
    return bounds[0] == 0 and bounds[-1] <= T and all(a <= b for a, b in itertools.pairwise(bounds))


def wants_gradients(case: Case) -> bool:
    """Must the call be differentiable for the fault to be one?"""
    return case.fault.startswith("saved:")


def written(case: Case) -> tuple[str, ...]:
    """Arguments that the call writes."""
    pool = case.pool_use
    return OPS[case.op].written_of(specs(case), pool is not None and pool.inplace)


def faults_of(case: Case) -> tuple[str, ...]:
    """The faults that a call can have, which is valid without."""
    found = []
    given = specs(case)
    if "cu_seqlens" in given:
        found += [f"offsets:{name}" for name in OFFSETS if not are_offsets(*_bad_offsets(case, name))]
        if "cu_seqlens_cpu" in given and _others(case) != offsets(case.shape.lengths).tolist():
            found.append(f"offsets:{_OTHER}")
    if case.kind == "torch" and case.check == "gradients":
        found += [f"saved:{name}" for name in given if name in (*DIFFERENTIABLE, "cu_seqlens")]
    elif case.kind == "torch":
        found += [f"{kind}:{name}" for kind in ("negated", "inference") for name in written(case)]
    return tuple(found)


def arguments_of(case: Case) -> tuple[str, ...]:
    """The arguments one of which the error has to name."""
    kind, _, which = case.fault.partition(":")
    return ("cu_seqlens", "cu_seqlens_cpu") if kind == "offsets" else (which,)


def bad_offsets(case: Case) -> dict[str, Any]:
    """The offsets of a call whose fault they are, by argument, int64 NumPy."""
    which = case.fault.partition(":")[2]
    if which == _OTHER:
        return {"cu_seqlens_cpu": np.array(_others(case), np.int64)}
    bad = np.array(_bad_offsets(case, which)[0], np.int64)
    return {name: bad for name in ("cu_seqlens", "cu_seqlens_cpu") if name in specs(case)}


def _bad_offsets(case: Case, how: str) -> tuple[Offsets, int]:
    largest = int(np.iinfo(case.index_dtype).max)
    T = case.shape.T
    return OFFSETS[how](offsets(case.shape.lengths).tolist(), T, largest), T


def _others(case: Case) -> Offsets:
    """The lengths the other way round, where that is another pack."""
    found: Offsets = offsets(case.shape.lengths[::-1]).tolist()
    return found
