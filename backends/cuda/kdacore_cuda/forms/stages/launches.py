"""The launch of a training stage as data: eager calls from torch and calls from JAX are made of it."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.forms.stages.sizes import plan_of
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.runtime.launch_sequence import LaunchSequence, PlannedLaunch


class StageArrays(NamedTuple):
    """The arrays of a stage's kernels."""

    given: tuple[str, ...]
    """Arguments, in the order in which a call gives their addresses, before those of the results."""
    results: tuple[str, ...]
    strided: tuple[str, ...]
    """Those of the arguments whose batch, token and head stride the kernels take, in that order."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.given, *self.results)


ARRAYS = {
    "kda_chunk_intra": StageArrays(
        given=("q", "k", "gc", "beta", "cu_seqlens"),
        results=("Aqk", "Akk"),
        strided=("q", "k", "gc", "beta"),
    ),
    "kda_recompute_w_u": StageArrays(
        given=("k", "v", "beta", "gc", "Akk", "q", "cu_seqlens"),
        results=("w", "u", "kg", "qg"),
        strided=("k", "v", "beta", "gc", "Akk", "q"),
    ),
}
"""By op. Without q its strides are those of k, and there is no qg."""


def launch_of(r: Request, strides: tuple[int, ...] = ()) -> PlannedLaunch:
    """The launch of a call.

    Args:
        r: the call.
        strides: of :attr:`StageArrays.strided`, three each, in elements; those of contiguous arrays if not given.
    """
    plan, arrays = plan_of(r), ARRAYS[r.op]
    absent = {name for name in arrays.given if not r.has(name)} | (set() if r.has("q") else {"qg"})
    places = {"g" if name == "gc" else name: (name, 0) for name in arrays.names if name not in absent}
    fixed = plan.launcher.params.last(*(strides or _contiguous(r, arrays)), *plan.sizes)
    return PlannedLaunch(r.op, plan.launcher, plan.grid, places, fixed)


def _contiguous(r: Request, arrays: StageArrays) -> tuple[int, ...]:
    specs = (r.spec(name if r.has(name) else "k") for name in arrays.strided)
    return tuple(s for spec in specs for s in contiguous_strides(spec.shape)[:3])


_MAX_STRIDES = 64
"""Sets of strides that are kept for one request."""


def sequence_of(r: Request, strides: tuple[int, ...]) -> LaunchSequence:
    """The same to be made, given the addresses of :attr:`StageArrays.names`; 0 for an absent array."""
    known = plan_of(r).sequences
    found = known.get(strides)
    if found is None:
        if len(known) >= _MAX_STRIDES:
            known.clear()
        found = known[strides] = LaunchSequence((launch_of(r, strides),), ARRAYS[r.op].names)
    return found
