"""Forward results against the float64 oracle; inputs and their surroundings untouched."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from kdacore.arrays import adapter_of
from kdacore.selfcheck.bounds import Quantity, bound
from kdacore.testing.cases import Case
from kdacore.testing.compare import Findings
from kdacore.testing.expected import expected
from kdacore.testing.poisoned_arrays import arrays, place
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
    if "out" in placed:
        findings.require("o is out", results["o"] is placed["out"].view, "another array was returned")
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


def graph(case: Case, findings: Findings) -> None:
    """CUDA: a captured call, replayed on other numbers in the same memory."""
    import torch

    other = replace(case, seed=case.seed + 1)
    placed, fresh = arrays(place(case)), arrays(place(other))
    with watched(case, findings):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward(case, placed)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = forward(case, placed)
    for name, x in fresh.items():
        placed[name].copy_(x)
    captured.replay()
    torch.cuda.synchronize()
    check_results(other, results, findings)


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
    """One result: its form, and its values where they can be read."""
    if check_form(case, name, result, findings, prefix):
        findings.close(prefix + name, result, want, result_bound(case, name, result))


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
