"""A step of a chunk kernel: its operands by name, its sequence's flags, and its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kdacore_pallas.tpu.own_rows import OwnRows
from kdacore_pallas.tpu.plan import ChunkGrid

Array = Any
Refs = dict[str, Any]


class Step(NamedTuple):
    refs: Refs
    """Inputs, outputs and scratch."""
    flag: Any
    """Flags of :mod:`kdacore_pallas.tpu.schedule`, added up."""
    own: OwnRows
    first_head: Any
    """Value head of the call at which the block of heads begins."""

    def has(self, flag: int) -> Any:
        return self.flag & flag != 0


def read_step(x: ChunkGrid, names: list[str], refs: tuple[Any, ...], at: Callable[[Any], Any]) -> Step:
    """The step at a grid position, by ``at``. ``refs``: the tables of the schedule, then those in ``names``."""
    _seq, flags, end, *rest = refs
    first = None
    if x.packed:
        first, _block, *rest = rest
    n = pl.program_id(0) * x.NC + at(pl.program_id(2))
    flag = flags[n]
    own = OwnRows(x.ragged, end[n], None if first is None else first[n])
    return Step(dict(zip(names, rest, strict=True)), flag, own, pl.program_id(1) * x.hvb)


def over_own_rows(
    x: ChunkGrid, step: Step, opening: int, outputs: tuple[str, ...], compute: Callable[[], None]
) -> None:
    """``compute()``, which writes rows of ``outputs``. Of a pack only where the step has rows; the first step at a
    block, which has the flag ``opening``, sets it to zero if it has rows of others."""
    if not step.own.shared:
        compute()
        return
    refs, first, end = step.refs, step.own.first, step.own.end

    @pl.when(step.has(opening) & (end - first < x.C))
    def _() -> None:
        for name in outputs:
            if name in refs:
                refs[name][...] = jnp.zeros_like(refs[name])

    pl.when(first < end)(compute)
