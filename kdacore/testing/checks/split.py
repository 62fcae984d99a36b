"""A sequence in several calls through its state equals the sequence in one."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.calls.values import PER_TOKEN
from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import result_bound
from kdacore.testing.compare import Findings, to_float64
from kdacore.testing.derived_calls import halves, prefill_and_decode, single_step
from kdacore.testing.expected import expected
from kdacore.testing.poisoned_arrays import arrays, place
from kdacore.testing.run_call import forward, watched


def split(case: Case, findings: Findings) -> None:
    """Two calls of the same op, and the one call they stand for."""
    _in_two(case, halves(case), findings)


def split_decode(case: Case, findings: Findings) -> None:
    """A prefill carried on by the decoding op."""
    _in_two(case, prefill_and_decode(case), findings)


def _in_two(case: Case, pieces: tuple[Case, Case], findings: Findings) -> None:
    values = host_values(case)
    cut = pieces[0].shape.T
    first = _piece(pieces[0], values, slice(0, cut), None, findings)
    second = _piece(pieces[1], values, slice(cut, None), first["final_state"], findings)
    with watched(case, findings):
        whole = forward(case, arrays(place(case, values)))
    o = np.concatenate([to_float64(first["o"]), to_float64(second["o"])], axis=1)
    want = expected(case)
    o_bound = result_bound(case, "o", whole["o"])
    findings.close("o in two calls", o, want["o"], o_bound)
    findings.close("o in two calls beside one", o, to_float64(whole["o"]), o_bound)
    if "final_state" in whole:
        state_bound = result_bound(case, "final_state", whole["final_state"])
        findings.close("state after two calls", second["final_state"], want["final_state"], state_bound)


def _piece(case: Case, values: Values, tokens: slice, state: Any, findings: Findings) -> dict[str, Any]:
    here = {name: x[:, tokens] if name in PER_TOKEN else x for name, x in values.items()}
    if state is not None:
        here["initial_state"] = to_float64(state)
    with watched(case, findings):
        return forward(case, arrays(place(case, here)))


def drift(case: Case, findings: Findings) -> None:
    """A long decode, one token a call: rounding must not pile up in the state."""
    values = host_values(case)
    step = single_step(case)
    state = values.get("initial_state")
    if state is None:
        state = np.zeros((case.shape.N, case.shape.HV, *case.state_tail))
    outputs = []
    placed = place(step, {**_token(values, 0), "initial_state": state})
    carried = placed["initial_state"].view
    with watched(case, findings):
        for t in range(case.shape.T):
            given = arrays(place(step, _token(values, t)))
            results = forward(step, {**given, "initial_state": carried})
            carried = results["final_state"]
            outputs.append(to_float64(results["o"]))
    want, T = expected(case), case.shape.T
    o = np.concatenate(outputs, axis=1)
    last = slice(T - T // 4, T)
    findings.close("last quarter of o", o[:, last], want["o"][:, last], result_bound(case, "o", results["o"]))
    allowed = result_bound(case, "final_state", carried)
    findings.close("state at the end", carried, want["final_state"], allowed)


def _token(values: Values, t: int) -> Values:
    return {
        name: x[:, t : t + 1] if name in PER_TOKEN else x
        for name, x in values.items()
        if name != "initial_state"
    }
