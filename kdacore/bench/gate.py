"""The correctness gate: nothing is timed that is not right on the very inputs it is timed on.

Heads and sequences are independent, so the oracle runs exactly on a slice: the longest (or last) sequence, the
last query/key head and its value heads, all tokens up to a limit.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdacore import api, contract
from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case
from kdacore.ops import OPS
from kdacore.selfcheck.check import relative_error
from kdacore.types import OutputGrads

BOUNDS = {
    "float32": {"o": 1e-3, "final_state": 1e-3, "gradients": 4e-3},
    "bfloat16": {"o": 9e-3, "final_state": 6.6e-3, "gradients": 1.6e-2},
    "float16": {"o": 9e-3, "final_state": 6.6e-3, "gradients": 1.6e-2},
}
"""Twice the contract's section 4, as it allows for these gates (float32: with tf32)."""
FLAT = 1e-3
"""Share of the gate's largest slope below which float32 rounds the slope itself (1 - sigmoid near 1)."""
GRADIENTS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Worst error relative to its bound, for the row."""

    error: float
    bound: float
    what: str

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the call the oracle computes."""

    b: int
    rows: slice
    n: int
    head: int
    heads: slice
    whole: bool
    """All tokens of the sequence, so that states and gradients can be compared too."""


@dataclass(frozen=True, slots=True)
class Expected:
    part: Part
    o: Any
    final_state: Any
    gradients: dict[str, Any]
    gate_slope: Any = None
    """Derivative of the log decay by g, where there are gradients."""


def choose(case: Case) -> Part:
    """The part of a case the oracle looks at."""
    group = case.value_heads // case.H
    heads = slice(case.value_heads - group, case.value_heads)
    if case.lengths:
        n = int(np.argmax(case.lengths))
        start, length = sum(case.lengths[:n]), case.lengths[n]
        b = 0
    else:
        n = b = case.B - 1
        start, length = 0, case.T
    used = min(length, case.oracle_tokens)
    return Part(b, slice(start, start + used), n, case.H - 1, heads, used == length)


def expected(case: Case, arrays: Arrays, do: Any = None) -> Expected:
    """The oracle's results on its part; with ``do`` (the gradient of o) also the gradients."""
    from kdacore.oracle.gate import oracle_gate_backward
    from kdacore.oracle.recurrence import oracle_backward, oracle_forward

    part = choose(case)
    opdef = OPS[case.op]
    given = options(case)
    given.pop("inplace_state", None)
    inputs = opdef.inputs(**{name: x for name, x in _sliced(arrays, part).items() if name in opdef.arrays})
    parameters = inspect.signature(getattr(api, case.op)).parameters
    values = tuple(given.get(name, parameters[name].default) for name in opdef.options)
    request, _ = contract.build_request(opdef, inputs, values)
    result = oracle_forward(request, inputs)
    if do is None or not part.whole:
        return Expected(part, result.o, result.final_state, {})
    found = oracle_backward(
        request, inputs, OutputGrads(_host(do[part.b : part.b + 1, part.rows, part.heads]))
    )
    gradients = {name: getattr(found, name) for name in GRADIENTS}
    slope = oracle_gate_backward(request, inputs, np.ones_like(inputs.g)).g
    return Expected(part, result.o, result.final_state, gradients, slope)


def judge(case: Case, want: Expected, o: Any, state: Any, gradients: dict[str, Any] | None = None) -> Verdict:
    """The worst of output, state and gradients."""
    part, bounds = want.part, BOUNDS[case.dtype]
    row = slice(part.b, part.b + 1)
    verdicts = [Verdict(relative_error(_host(o[row, part.rows, part.heads]), want.o), bounds["o"], "o")]
    if part.whole and state is not None:
        got = _host(state[part.n : part.n + 1, part.heads])
        verdicts.append(Verdict(relative_error(got, want.final_state), bounds["final_state"], "final_state"))
    for name, reference in want.gradients.items():
        heads = slice(part.head, part.head + 1) if name in ("q", "k") else part.heads
        got = _host((gradients or {})[name][row, part.rows, heads])
        if name == "g":
            got, reference = _by_log_decay(got, want.gate_slope), _by_log_decay(reference, want.gate_slope)
        verdicts.append(Verdict(relative_error(got, reference), bounds["gradients"], f"d{name}"))
    return max(verdicts, key=lambda v: v.error / v.bound)


def _by_log_decay(dg: Any, slope: Any) -> Any:
    """The gradient by the log decay, from the one by g.

    Gates as models begin with are flat almost everywhere: the norm of dg is that of a few numbers, whose rounding does
    not average out (docs/lab/cuda-backward.md).
    """
    steep = np.abs(slope) > FLAT * np.abs(slope).max()
    return dg[steep] / slope[steep]


def _sliced(arrays: Arrays, part: Part) -> Arrays:
    """The part's inputs as float64 NumPy arrays."""
    row = slice(part.b, part.b + 1)
    out: Arrays = {}
    for name, x in arrays.items():
        if name in ("q", "k"):
            out[name] = _host(x[row, part.rows, part.head : part.head + 1])
        elif name in ("v", "g", "beta"):
            out[name] = _host(x[row, part.rows, part.heads])
        elif name in ("A_log", "dt_bias"):
            out[name] = _host(x[part.heads])
        elif name == "initial_state":
            out[name] = _host(x[part.n : part.n + 1, part.heads])
    return out


def _host(x: Any) -> Any:
    from kdacore.oracle.host_values import to_float64

    return np.ascontiguousarray(to_float64(x.detach() if hasattr(x, "detach") else x))
