"""State pools: the rows named hold what they should, and of all others not one bit has changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values, rows_of
from kdacore.contract.state_rows import ZEROS
from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import check_out, check_result, result_bound
from kdacore.testing.checks.memory import check_memory
from kdacore.testing.compare import Findings, bits, to_float64
from kdacore.testing.expected import expected, written_arguments
from kdacore.testing.poisoned_arrays import Placed, arrays, place
from kdacore.testing.run_call import forward, watched

RECORDS = ("record_update", "record_key", "record_decay")


def pool(case: Case, findings: Findings) -> None:
    """One call on pools whose rows hold NaN unless they are to be read."""
    values = host_values(case)
    placed = place(case, values)
    with watched(case, findings):
        results = forward(case, arrays(placed))
    check_pool(case, values, placed, results, findings)


def check_pool(
    case: Case, values: Values, placed: dict[str, Placed], results: dict[str, Any], findings: Findings
) -> None:
    """What a call returned and left in its arrays.

    Args:
        case: the call.
        values: its host values.
        placed: the arrays it was given.
        results: what it returned, by name.
        findings: collects what is found.
    """
    use = case.pool_use
    target = written_pool(case) if use is not None and use.inplace else ""
    beside = written_arguments(case)
    for p in placed.values():
        p.check(findings, written=p.name in (target, "out", *beside))
    check_out(case, placed, results, findings)
    check_memory(case, placed, results, findings)
    want = expected(case)
    if "o" in want:
        check_result(case, "o", results["o"], want["o"], findings)
    for name in beside:
        if name not in RECORDS:
            _check_copies(case, values, placed[name], results, findings)
    if RECORDS[0] in beside:
        _check_records(case, values, placed, results, findings)
    if target:
        _check_written(case, values, placed[target], results, findings)
    elif "final_state" in want:
        check_result(case, "final_state", results["final_state"], want["final_state"], findings)
        padding = rows_of(case, values).padding
        zero = not to_float64(results["final_state"])[padding].any()
        findings.require("final_state without a slot", zero, "it is not zero")
    else:
        findings.require("final_state", "final_state" not in results, "a state nobody asked for")


def written_pool(case: Case) -> str:
    """The argument that an in-place call writes."""
    use = case.pool_use
    return "write_pool" if use is not None and use.separate else "initial_state"


def _check_written(
    case: Case, values: Values, state: Placed, results: dict[str, Any], findings: Findings
) -> None:
    """The whole pool after an in-place call."""
    mutable = case.kind != "jax"
    asked = case.family == "commit" or bool(case.option("output_final_state", False))
    after = state.view if mutable else results["final_state"]
    if mutable and asked:
        same = results["final_state"] is after or case.mode == "compile"  # there another tensor of its memory
        findings.require("final_state is the pool", same, "another array")
        if case.mode == "compile":
            findings.untouched("final_state is the pool", results["final_state"], after)
    if not asked:
        findings.require("final_state", "final_state" not in results, "a state nobody asked for")
    written = written_rows(case, values)
    before = place(case, values)[state.name].view
    differ = (_row_bits(after) != _row_bits(before)).any(1)
    for row in np.setdiff1d(np.arange(after.shape[0]), written).tolist():
        findings.require(f"pool row {row} untouched", not differ[row], "it was changed")
    got, want = to_float64(after)[written], expected(case)["final_state"][written]
    findings.close("rows written", got, want, result_bound(case, "final_state", after))


def _check_records(
    case: Case, values: Values, placed: dict[str, Placed], results: dict[str, Any], findings: Findings
) -> None:
    """The records after a call: one for each token of a sequence that has a row, nothing else written.

    Of ``update`` and ``key`` their product counts, which is what a token adds to a state: a factor of one, such as the
    norm of k, may stand with the other.
    """
    rows, lengths = rows_of(case, values), case.shape.sequence_lengths
    untouched = place(case, values)
    got, want = {}, {}
    for name in RECORDS:
        before = untouched[name].view
        after = results[name] if case.kind == "jax" else placed[name].view
        named = np.zeros(before.shape[:2], bool)
        for row, length in zip(rows.records, lengths, strict=True):
            if row != ZEROS:
                named[row, :length] = True
        got[name], want[name] = to_float64(after)[named], expected(case)[name][named]
        was, now = (np.frombuffer(bits(x), np.uint8).reshape(*named.shape, -1) for x in (before, after))
        findings.require(f"{name} of other tokens", bool((was == now)[~named].all()), "it was changed")
    update, key, decay = RECORDS
    bound = result_bound(case, decay, placed[decay].view)
    findings.close(decay, got[decay], want[decay], bound)
    added, exact = (_added(x[update], x[key]) for x in (got, want))
    findings.close("update and key", added, exact, bound)


def _added(update: Any, key: Any) -> Any:
    """What records add to states, ``[tokens, HV, K, V]``."""
    key = np.repeat(key, update.shape[1] // key.shape[1], axis=1)
    return key[..., :, None] * update[..., None, :]


def _check_copies(
    case: Case, values: Values, placed: Placed, results: dict[str, Any], findings: Findings
) -> None:
    """Tokens that are kept for the convolution, after a call: copies, so every number is the very one."""
    after = results[placed.name] if case.kind == "jax" else placed.view
    same = np.array_equal(to_float64(after), expected(case)[placed.name], equal_nan=True)
    findings.require(f"{placed.name}", same, "it does not hold the tokens that it should")


def _row_bits(pool: Any) -> Any:
    """The bytes of a pool, one row for each of its own: read at once, since JAX compiles a slice of each row."""
    return np.frombuffer(bits(pool), np.uint8).reshape(pool.shape[0], -1)


def written_rows(case: Case, values: Values) -> Any:
    """Rows of the pool that an in-place call writes, sorted."""
    rows = rows_of(case, values)
    named = np.concatenate(
        [np.ravel(x) for x in (rows.final, rows.per_token, rows.checkpoints) if x is not None]
    )
    return np.unique(named[named != ZEROS])
