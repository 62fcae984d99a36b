"""A NaN stays in its sequence and in the value heads that read it, bit for bit.

A tile whose rows past the end are multiplied by zero, or a sum over heads that are masked afterwards, passes every
accuracy test and fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.testing.cases import Case
from kdacore.testing.checks.gradients import place_weights, run
from kdacore.testing.compare import Findings, to_float64
from kdacore.testing.expected import weights
from kdacore.testing.poisoned_arrays import arrays, place
from kdacore.testing.run_call import forward, watched

_ARGUMENTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
_OF_TOKENS = frozenset({"o", "v", "g", "beta"})
"""Results and gradients ``[B, T, HV, ...]``."""
_OF_STATES = frozenset({"final_state", "initial_state"})
_OF_KEY_HEADS = frozenset({"q", "k"})


def nan_containment(case: Case, findings: Findings) -> None:
    """Results of the other sequences and value heads."""
    _check(case, findings, "", lambda values: _results(case, values, findings))


def gradient_nan_containment(case: Case, findings: Findings) -> None:
    """Gradients of what the other sequences and heads own; those that sequences share, of the other heads."""
    loss = weights(case)
    _check(
        case,
        findings,
        "gradient of ",
        lambda values: run(case, place(case, values), place_weights(case, loss), findings)[1],
    )


def _results(case: Case, values: Values, findings: Findings) -> dict[str, Any]:
    with watched(case, findings):
        return forward(case, arrays(place(case, values)))


def _check(case: Case, findings: Findings, prefix: str, call: Callable[[Values], dict[str, Any]]) -> None:
    values = host_values(case)
    clean = {name: to_float64(x) for name, x in call(values).items()}
    for argument, where in _places(case, values):
        given = values[argument].copy()
        given[where.index] = np.nan
        found = call({**values, argument: given})
        for name, x in found.items():
            others = ~where.reached(case, name, clean[name].shape)
            findings.same(
                f"{prefix}{name} of others, NaN in {argument}", to_float64(x)[others], clean[name][others]
            )


@dataclass(frozen=True)
class _Place:
    """Where a NaN is, and what it may reach."""

    index: tuple[int, ...]
    sequences: tuple[int, ...]
    heads: slice
    """Value heads."""

    def reached(self, case: Case, name: str, shape: tuple[int, ...]) -> Any:
        """A mask of the result or gradient ``name``: what the NaN may change."""
        may = np.zeros(shape, bool)
        group = case.shape.HV // case.shape.H
        keys = slice(self.heads.start // group, -(-self.heads.stop // group))
        if name not in (_OF_TOKENS | _OF_STATES | _OF_KEY_HEADS):  # of a parameter: all sequences share it
            may.reshape(case.shape.HV, -1)[self.heads] = True
            return may
        for n in self.sequences:
            if name in _OF_STATES:
                may[n, self.heads] = True
            else:
                b, tokens = _tokens(case, n)
                may[b, tokens, keys if name in _OF_KEY_HEADS else self.heads] = True
        return may


def _tokens(case: Case, n: int) -> tuple[int, slice]:
    """Row of the batch and tokens of a sequence."""
    if not case.shape.lengths:
        return n, slice(0, case.shape.T)
    start = sum(case.shape.lengths[:n])
    return 0, slice(start, start + case.shape.lengths[n])


def _places(case: Case, values: Values) -> Iterator[tuple[str, _Place]]:
    """One NaN in each argument: in the first and last token of a sequence between others, in its last head."""
    s = case.shape
    inner = [n for n in range(s.N) if s.sequence_lengths[n]]
    n = inner[len(inner) // 2]
    b, tokens = _tokens(case, n)
    group = s.HV // s.H
    one, all_ = slice(s.HV - 1, s.HV), tuple(range(s.N))
    for name in _ARGUMENTS:
        if name not in values:
            continue
        rest = (0,) * (values[name].ndim - 3)
        if name in ("A_log", "dt_bias"):
            last = (s.HV - 1, *(0,) * (values[name].ndim - 1))
            flat = name == "dt_bias" and case.dt_bias == "flat"
            yield name, _Place((values[name].size - 1,) if flat else last, all_, one)
        elif name == "initial_state":
            yield name, _Place((n, s.HV - 1, 0, 0), (n,), one)
        elif name in _OF_KEY_HEADS:
            for t in (tokens.start, tokens.stop - 1):
                yield name, _Place((b, t, s.H - 1, *rest), (n,), slice(s.HV - group, s.HV))
        else:
            yield name, _Place((b, tokens.stop - 1, s.HV - 1, *rest), (n,), one)
