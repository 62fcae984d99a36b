"""Forward results against the float64 oracle; inputs and their surroundings untouched."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from kdacore.arrays import adapter_of
from kdacore.calls.arrays import host_values, rows_of
from kdacore.selfcheck.bounds import Quantity, bound
from kdacore.testing.cases import Case
from kdacore.testing.checks.memory import check_memory
from kdacore.testing.compare import Findings, bits, to_float64
from kdacore.testing.expected import expected
from kdacore.testing.poisoned_arrays import Placed, arrays, place
from kdacore.testing.run_call import forward, watched
from kdacore.testing.serving import device_of, request_of
from kdacore.types import Device

_STATES = ("final_state", "checkpoints", "h")
_NO_TENSOR_CORES = Device("cpu")
_ALWAYS_WIDE = ("log_decay", "gc")
"""Results that are float32 whatever the inputs' dtype, from float32 arithmetic."""


def accuracy(case: Case, findings: Findings) -> None:
    """One call on poisoned memory: right values, right shapes, dtypes and device, nothing written."""
    placed = place(case)
    with watched(case, findings):
        results = forward(case, arrays(placed))
    for p in placed.values():
        p.check(findings, written=p.name == "out")
    check_out(case, placed, results, findings)
    check_memory(case, placed, results, findings)
    if case.kind == "torch":
        given = {id(p.view) for p in placed.values()}
        check_changeable({n: x for n, x in results.items() if id(x) not in given}, findings)
    check_results(case, results, findings)


def uninitialised(case: Case, findings: Findings) -> None:
    """torch: the same with every fresh allocation full of NaN, so that memory read before it is written shows."""
    import torch

    was, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # about ops without a deterministic form: not our concern
        torch.use_deterministic_algorithms(True, warn_only=True)  # this is what fills the memory
        try:
            accuracy(case, findings)
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warn)


def check_results(case: Case, results: dict[str, Any], findings: Findings, prefix: str = "") -> None:
    """Results of the case's call against the oracle, within the contract's bounds."""
    want = expected(case)
    findings.require(
        f"{prefix}results", set(results) == set(want), f"got {sorted(results)}, wanted {sorted(want)}"
    )
    for name in want:
        if name in results:
            check_result(case, name, results[name], want[name], findings, prefix)


def check_result(case: Case, name: str, result: Any, want: Any, findings: Findings, prefix: str = "") -> None:
    """One result: its form, and its values where they can be read. What an op does not write, or has to leave zero,
    is no matter of bounds."""
    if not check_form(case, name, result, findings, prefix):
        return
    allowed = result_bound(case, name, result)
    has_tokens = name not in ("final_state", "checkpoints", "h")
    if has_tokens and (case.out or case.family == "stage") and tuple(result.shape) == np.shape(want):
        result, want = result[:, : case.shape.used], want[:, : case.shape.used]
    findings.close(prefix + name, result, want, allowed)
    if name == "o" and case.family != "stage":
        unread = unread_tokens(case)[:, : result.shape[1]]
        if unread.any():
            zero = not to_float64(result)[unread].any()
            findings.require(f"{prefix}o of tokens that are not read", zero, "it is not zero")


@functools.lru_cache(maxsize=64)
def unread_tokens(case: Case) -> Any:
    """``[B, T]`` bool: tokens of no sequence, or of one without a slot."""
    s = case.shape
    unread = np.ones(s.B * s.T, bool)
    padding = np.zeros(s.N, bool)
    if case.pool_use is not None:
        padding = rows_of(case, host_values(case)).padding
    start = 0
    for n, length in enumerate(s.sequence_lengths):
        unread[start : start + length] = padding[n]
        start += length
    return unread.reshape(s.B, s.T)


def check_out(case: Case, placed: dict[str, Placed], results: dict[str, Any], findings: Findings) -> None:
    """``out`` is what was returned, and its rows of no sequence are as they were."""
    if "out" not in placed:
        return
    out = placed["out"]
    findings.require("o is out", results["o"] is out.view, "another array was returned")
    if case.shape.padding:
        before = place(case)["out"].view
        rows = slice(case.shape.used, None)
        same = bits(out.view[:, rows]) == bits(before[:, rows])
        findings.require("out behind the last sequence", same, "it was written")


def check_changeable(results: dict[str, Any], findings: Findings) -> None:
    """torch: a caller may change a result in place and differentiate that, which autograd refuses for what it sees as a
    view that a backend made below it."""
    for name, x in results.items():
        findings.require(f"{name} is no view", not x._is_view(), "a view: return its detach()")


def result_bound(case: Case, name: str, result: Any) -> float:
    """The bound of one result, by its name and dtype."""
    where = device_of(case.kind, case.device)
    quantity: Quantity = "state" if name in _STATES else "o"
    dtype = dtype_of(result)
    if name in _ALWAYS_WIDE:
        return case.factor * bound(quantity, _NO_TENSOR_CORES, dtype)
    return case.factor * bound(quantity, where, case.dtype, dtype)


def check_form(case: Case, name: str, result: Any, findings: Findings, prefix: str = "") -> bool:
    """Kind, device and dtype of one result. False when it is none of the case's arrays, whatever it holds."""
    adapter = adapter_of(result)
    kind = None if adapter is None else adapter.kind
    findings.require(f"{prefix}{name} kind", kind == case.kind, f"a {type(result).__name__}, not {case.kind}")
    if adapter is None or kind != case.kind:
        return False
    on, where = adapter.device(result), device_of(case.kind, case.device)
    findings.require(f"{prefix}{name} device", on == where, f"on {on}, not on {where}")
    got, want = dtype_of(result), result_dtypes(case, name)
    findings.require(f"{prefix}{name} dtype", got in want, f"{got}, wanted {' or '.join(want)}")
    return on == where


def result_dtypes(case: Case, name: str) -> tuple[str, ...]:
    """The dtypes a result may have."""
    request = request_of(case)
    if name in ("final_state", "checkpoints"):
        return (request.state_dtype,)
    wide = "float64" if case.dtype == "float64" else "float32"
    if name in _ALWAYS_WIDE:
        return (wide,)
    if case.family == "stage" and name != "o":
        return tuple(dict.fromkeys((case.dtype, wide)))
    if case.op == "kda_chunk_output":
        return (case.stage_dtype or case.dtype,)
    return (case.dtype,)


def dtype_of(x: Any) -> str:
    """Canonical dtype name of an array of any kind."""
    adapter = adapter_of(x)
    return "" if adapter is None else adapter.spec(x).dtype
