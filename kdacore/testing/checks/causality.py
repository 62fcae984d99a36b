"""Strict causality, bit for bit: later tokens change nothing before them, in results or in gradients.

An exponent anchored at a later row passes every accuracy test and fails here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.calls.description import specs
from kdacore.calls.values import PER_TOKEN
from kdacore.oracle.host_values import rounded
from kdacore.testing.cases import Case
from kdacore.testing.checks.gradients import place_weights, run
from kdacore.testing.compare import Findings, to_float64
from kdacore.testing.derived_calls import cut_points, prefix
from kdacore.testing.expected import Weights, weights
from kdacore.testing.poisoned_arrays import arrays, place
from kdacore.testing.run_call import forward, watched


def causality(case: Case, findings: Findings) -> None:
    """Changing every token after t changes no bit of ``o[:t+1]``."""
    values = host_values(case)
    other = _other_tokens(case)
    whole = _outputs(case, values, findings)
    for t in cut_points(case):
        changed = _outputs(case, changed_after(values, other, t), findings)
        findings.same(f"o up to {t}, later tokens changed", changed[:, : t + 1], whole[:, : t + 1])


def causality_append(case: Case, findings: Findings) -> None:
    """Appending tokens changes no bit of what was there."""
    values = host_values(case)
    whole = _outputs(case, values, findings)
    for t in cut_points(case):
        short = _outputs(prefix(case, t + 1), cut_after(values, t), findings)
        findings.same(f"o up to {t}, tokens appended", short, whole[:, : t + 1])


def gradient_causality(case: Case, findings: Findings) -> None:
    """Changing tokens after t changes no bit of any gradient of a loss on ``o[:t+1]``."""
    values = host_values(case)
    other, w = _other_tokens(case), weights(case)
    for t in cut_points(case):
        loss = _prefix_loss(w, t)
        whole = _gradients(case, values, loss, findings)
        changed = _gradients(case, changed_after(values, other, t), loss, findings)
        for name, got in changed.items():
            findings.same(f"gradient of {name}, loss up to {t}, later tokens changed", got, whole[name])


def gradient_causality_append(case: Case, findings: Findings) -> None:
    """Appending tokens the loss does not see changes no bit of any gradient."""
    values, w = host_values(case), weights(case)
    for t in cut_points(case):
        whole = _gradients(case, values, _prefix_loss(w, t), findings)
        short = _gradients(prefix(case, t + 1), cut_after(values, t), _cut_loss(w, t), findings)
        for name, got in short.items():
            there = whole[name][:, : t + 1] if name in PER_TOKEN else whole[name]
            findings.same(f"gradient of {name}, loss up to {t}, tokens appended", got, there)


def _other_tokens(case: Case) -> Values:
    """Tokens of another draw, decaying harder, with larger values."""
    other = host_values(replace(case, seed=case.seed + 1000))
    wanted = specs(case)
    harder = other["g"] + 2.0 if case.raw_gate else np.maximum(8.0 * other["g"], _lowest(case))
    larger = "v" if "v" in other else "x"
    return {
        **other,
        larger: rounded(4.0 * other[larger], wanted[larger].dtype),
        "g": rounded(harder, wanted["g"].dtype),
    }


def _lowest(case: Case) -> float:
    bound: float | None = case.option("lower_bound")
    return -60.0 if bound is None else bound


def changed_after(values: Values, other: Values, t: int) -> Values:
    """``values`` with every token after t taken from ``other``."""
    changed = dict(values)
    for name in values.keys() & {*PER_TOKEN}:
        x = values[name].copy()
        x[:, t + 1 :] = other[name][:, t + 1 :]
        changed[name] = x
    return changed


def cut_after(values: Values, t: int) -> Values:
    """``values`` without the tokens after t."""
    return {name: x[:, : t + 1] if name in PER_TOKEN else x for name, x in values.items()}


def _prefix_loss(w: Weights, t: int) -> Weights:
    o = w.o.copy()
    o[:, t + 1 :] = 0.0
    return Weights(o, None)


def _cut_loss(w: Weights, t: int) -> Weights:
    return Weights(w.o[:, : t + 1], None)


def _outputs(case: Case, values: Values, findings: Findings) -> Any:
    with watched(case, findings):
        return to_float64(forward(case, arrays(place(case, values)))["o"])


def _gradients(case: Case, values: Values, loss: Weights, findings: Findings) -> Values:
    _, found = run(case, place(case, values), place_weights(case, loss), findings)
    return {name: to_float64(x) for name, x in found.items()}
