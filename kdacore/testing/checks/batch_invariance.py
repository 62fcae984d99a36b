"""Under ``batch_invariant()`` a sequence gives the same bits alone and with others, where that is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kdacore.calls.arrays import host_values
from kdacore.dispatch.plan import batch_invariant
from kdacore.testing.cases import Case
from kdacore.testing.checks.gradients import place_weights, run
from kdacore.testing.compare import Findings
from kdacore.testing.derived_calls import alone
from kdacore.testing.expected import Weights, weights
from kdacore.testing.poisoned_arrays import arrays, place
from kdacore.testing.run_call import forward, watched

_TOKENS = frozenset({"q", "k", "v", "g", "beta", "x", "z", "o", "log_decay"})
_STATES = frozenset({"initial_state", "final_state", "conv_state"})

Cut = Callable[[str, Any], Any]
"""``cut(name, x)``: the part of an argument, a result or a gradient that belongs to one sequence."""


def batch_invariance(case: Case, findings: Findings) -> None:
    """Results of each sequence, alone and with the others."""
    values = host_values(case)

    def results(of: Case, given: dict[str, Any]) -> dict[str, Any]:
        with watched(of, findings):
            return forward(of, arrays(place(of, given)))

    with batch_invariant():
        together = results(case, values)
        for n, single, cut in _sequences(case, values):
            for name, x in results(single, _cut_all(values, cut)).items():
                findings.same(f"{name} of sequence {n} alone", x, cut(name, together[name]))


def gradient_batch_invariance(case: Case, findings: Findings) -> None:
    """Gradients of what belongs to a sequence, alone and with the others."""
    values, loss = host_values(case), weights(case)

    def gradients(of: Case, given: dict[str, Any], w: Weights) -> dict[str, Any]:
        return run(of, place(of, given), place_weights(of, w), findings)[1]

    with batch_invariant():
        together = gradients(case, values, loss)
        for n, single, cut in _sequences(case, values):
            state = None if loss.final_state is None else cut("final_state", loss.final_state)
            found = gradients(single, _cut_all(values, cut), Weights(cut("o", loss.o), state))
            for name in sorted(found.keys() & (_TOKENS | _STATES)):
                findings.same(
                    f"gradient of {name} of sequence {n} alone", found[name], cut(name, together[name])
                )


def _sequences(case: Case, values: dict[str, Any]) -> Iterator[tuple[int, Case, Cut]]:
    """Each sequence that has tokens: its number, its call, and what cuts it out of the arrays of all."""
    packed = bool(case.shape.lengths)
    singles = iter(alone(case))
    for n in range(case.shape.N):
        start, end = (values["cu_seqlens"][n : n + 2]) if packed else (0, case.shape.T)
        if start < end:
            yield n, next(singles), _cutter(n, slice(start, end), packed)


def _cutter(n: int, tokens: slice, packed: bool) -> Cut:
    def cut(name: str, x: Any) -> Any:
        if name in _TOKENS:
            return x[:, tokens] if packed else x[n : n + 1]
        return x[n : n + 1] if name in _STATES else x

    return cut


def _cut_all(values: dict[str, Any], cut: Cut) -> dict[str, Any]:
    return {name: cut(name, x) for name, x in values.items() if name != "cu_seqlens"}
