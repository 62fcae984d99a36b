"""Calls that FlashQLA computes faster than kdacore, by the committed benchmark records.

``flash_qla_times.json`` has the measured calls; ``python -m benchmarks.flash_qla_times`` makes it from the records in
``benchmarks/results``. A call that is not in it is judged by the nearest one that is.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdacore.types import Request

FILE = "flash_qla_times.json"
OP = "chunk_gated_delta_rule"
SIZE = 128
"""K and V of every measured call, and of every call that FlashQLA serves."""
FACTOR = 4.0
"""A call that differs from a measured one by more than this factor in one of its sizes is not judged by it."""
_ROUNDING = 1e-9
"""Distances that differ by less are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One measured call of ``chunk_gated_delta_rule`` that was given the log decay and beta."""

    arch: str
    phase: str
    """``forward`` or ``training``: forward and backward."""
    dtype: str
    N: int
    """Sequences."""
    tokens: int
    """Of all sequences together."""
    H: int
    HV: int
    gates: str
    """The set of gates it was timed with (:data:`kdacore.bench.cases.GATE_SETS`)."""
    kdacore: float
    """Seconds of the backend that automatic choice took."""
    flash_qla: float
    """Seconds."""
    version: str
    """of FlashQLA."""
    record: str
    """File in ``benchmarks/results``."""

    @property
    def sizes(self) -> tuple[float, ...]:
        """What calls are compared by."""
        return _sizes(self.N, self.tokens, self.H, self.HV)


@functools.cache
def measured() -> tuple[Times, ...]:
    """The measured calls."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return tuple([Times(**call) for call in json.loads(text)["calls"]])


def why_slower(request: Request) -> str:
    """Why FlashQLA is to be preferred for a call: the times of the nearest measured one. Empty where kdacore is at
    least as fast there, with any of its gates, or where no measured call is near."""
    if request.op != OP or not request.K == request.V == SIZE:
        return ""
    near = nearest(request, measured())
    if not near or any(times.kdacore <= times.flash_qla for times in near):
        return ""
    times = near[0]
    call = f"{times.phase} of {times.tokens} tokens in {times.N} sequences, {times.H} key and {times.HV} value heads"
    theirs, ours = times.flash_qla * 1e3, times.kdacore * 1e3
    return (
        f"FlashQLA {times.version} is faster in the nearest measured call: {call}, on {times.arch}: {theirs:.3f} ms, "
        f"kdacore {ours:.3f} ms (benchmarks/results/{times.record})"
    )


def nearest(request: Request, among: tuple[Times, ...]) -> tuple[Times, ...]:
    """The measured calls of this architecture, phase and dtype whose sizes are nearest: the sum of the ratios'
    logarithms is smallest. There are several of one call with several sets of gates."""
    phase, tokens = "training" if request.needs_grad else "forward", request.B * request.T
    if tokens == 0:
        return ()
    mine = _sizes(request.N, tokens, request.H, request.HV)
    kind = request.device.arch, phase, request.dtype
    distances = {
        times: [abs(math.log(a / b)) for a, b in zip(mine, times.sizes, strict=True)]
        for times in among
        if (times.arch, times.phase, times.dtype) == kind
    }
    sums = {
        times: sum(each) for times, each in distances.items() if max(each) <= math.log(FACTOR) + _ROUNDING
    }
    least = min(sums.values(), default=0.0)
    return tuple([times for times, distance in sums.items() if distance <= least + _ROUNDING])


def _sizes(N: int, tokens: int, H: int, HV: int) -> tuple[float, ...]:
    """Sequences, tokens of one, key heads, value heads."""
    return N, tokens / N, H, HV
