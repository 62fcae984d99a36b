"""State pools: the rows named hold what they should, and of all others not one bit has changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.calls.pools import POOLS
from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import check_result, result_bound
from kdacore.testing.compare import Findings, bits, to_float64
from kdacore.testing.expected import expected
from kdacore.testing.poisoned_arrays import Placed, arrays, place
from kdacore.testing.run_call import forward, watched


def pool(case: Case, findings: Findings) -> None:
    """One call on a pool whose unnamed rows hold NaN."""
    how = POOLS[case.pool]
    values = host_values(case)
    placed = place(case, values)
    with watched(case, findings):
        results = forward(case, arrays(placed))
    state = placed["initial_state"]
    for p in placed.values():
        p.check(findings, written=how.inplace and p is state)
    want = expected(case)
    check_result(case, "o", results["o"], want["o"], findings)
    if how.inplace:
        _check_written(case, values, state, results, findings)
    elif "final_state" in want:
        check_result(case, "final_state", results["final_state"], want["final_state"], findings)
    else:
        findings.require("final_state", "final_state" not in results, "a state nobody asked for")


def _check_written(
    case: Case, values: Values, state: Placed, results: dict[str, Any], findings: Findings
) -> None:
    """The whole pool after an in-place call."""
    mutable = case.kind != "jax"
    asked = bool(case.option("output_final_state", False))
    after = state.view if mutable else results["final_state"]
    if mutable and asked:
        findings.require("final_state is the pool", results["final_state"] is after, "another array")
    written = written_rows(case, values)
    rows = after.shape[0]
    others = np.setdiff1d(np.arange(rows), written)
    before = place(case, values)["initial_state"].view
    for row in others:
        findings.require(
            f"pool row {row} untouched", bits(after[int(row)]) == bits(before[int(row)]), "it was changed"
        )
    got, want = to_float64(after)[written], expected(case)["final_state"][written]
    findings.close("rows written", got, want, result_bound(case, "final_state", after))


def written_rows(case: Case, values: Values) -> Any:
    """Rows of the pool an in-place call writes."""
    if "state_indices" not in values:
        return np.arange(case.shape.N)
    table = values["state_indices"]
    if table.ndim == 2:
        lengths = np.array(case.shape.lengths or (case.shape.T,) * case.shape.N)
        table = table[np.arange(table.shape[1]) < lengths[:, None]]
    return np.unique(table[table >= 0])
