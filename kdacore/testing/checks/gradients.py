"""Gradients of every input against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.arrays import adapter_of
from kdacore.calls.values import PER_TOKEN
from kdacore.selfcheck.bounds import bound
from kdacore.testing import run_call
from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import check_results, dtype_of
from kdacore.testing.checks.memory import check_memory
from kdacore.testing.compare import Findings, to_float64
from kdacore.testing.expected import Weights, expected_gradients, weights
from kdacore.testing.poisoned_arrays import Placed, arrays, place, place_one
from kdacore.testing.serving import device_of, request_of
from kdacore.types import OutputGrads

_FLOAT16_MAX = float(np.finfo(np.float16).max)


def gradients(case: Case, findings: Findings) -> None:
    """Results and gradients of one differentiable call on poisoned memory."""
    _measure(case, findings, recompute=False)


def recomputed_gradients(case: Case, findings: Findings) -> None:
    """The backward without residuals, as compiled graphs call it."""
    _measure(case, findings, recompute=True)


def _measure(case: Case, findings: Findings, *, recompute: bool) -> None:
    placed = place(case)
    loss = place_weights(case, weights(case))
    results, found = run(case, placed, loss, findings, recompute=recompute)
    for p in (*placed.values(), *loss.values()):
        p.check(findings)
    named = {f"gradient of {name}": x for name, x in found.items()}
    check_memory(case, placed, {**results, **named}, findings)
    check_results(case, results, findings)
    check_gradients(case, placed, found, findings)


def place_weights(case: Case, w: Weights) -> dict[str, Placed]:
    """The loss's weights as arrays, poison around them too."""
    dtype = case.dtype if case.family != "gate" or case.dtype == "float64" else "float32"
    do = np.array(w.o)
    do[:, do.shape[1] - case.shape.padding :] = np.nan  # of tokens of no sequence: not read
    placed = {"do": place_one(case, "do", do, dtype)}
    if w.final_state is not None:
        # The result's dtype, which is not the case's where no state is given. JAX takes no other.
        placed["dstate"] = place_one(case, "dstate", w.final_state, request_of(case).state_dtype)
    return placed


def run(
    case: Case,
    placed: dict[str, Placed],
    loss: dict[str, Placed],
    findings: Findings,
    *,
    recompute: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results and gradients; sees to it that the case's backend computed them."""
    grads = OutputGrads(loss["do"].view, loss["dstate"].view if "dstate" in loss else None)
    if run_call.is_direct(case, recompute):  # the selection is made by hand there, and forced
        return run_call.gradients(case, arrays(placed), grads, recompute=recompute)
    with run_call.watched(case, findings):
        return run_call.gradients(case, arrays(placed), grads)


def held_to_float16(got: Any, want: Any, allowed: float) -> tuple[Any, Any]:
    """A float16 gradient and what it should be, both as they are compared: the gate's are held to the largest number.

    Where some are larger than that, rounding errors of theirs may be too, in elements that should be 0. Such elements
    are not judged.
    """
    held = np.clip(want, -_FLOAT16_MAX, _FLOAT16_MAX)
    if got.shape != want.shape or not (np.abs(want) > _FLOAT16_MAX).any():
        return got, held
    noise = allowed * np.linalg.norm(want) / np.sqrt(want.size)
    return np.where(np.isfinite(got) & (np.abs(want) <= noise), held, got), held


def check_gradients(case: Case, placed: dict[str, Placed], found: dict[str, Any], findings: Findings) -> None:
    """Each gradient: there, formed like its input, within bounds."""
    where = device_of(case.kind, case.device)
    for name, want in expected_gradients(case).items():
        got = found.get(name)
        if got is None:
            findings.require(f"gradient of {name}", False, "it is missing")
            continue
        adapter, dtype = adapter_of(got), dtype_of(placed[name].view)
        kind = None if adapter is None else adapter.kind
        findings.require(f"gradient of {name} kind", kind == case.kind, f"a {type(got).__name__}")
        if kind != case.kind:
            continue
        findings.require(
            f"gradient of {name} dtype", dtype_of(got) == dtype, f"{dtype_of(got)}, wanted {dtype}"
        )
        allowed = case.factor * bound("gradient", where, case.dtype, dtype)
        if dtype == "float16":
            got, want = held_to_float16(to_float64(got), np.asarray(want, np.float64), allowed)
        findings.close(f"gradient of {name}", got, want, allowed, dtype)
        if case.shape.padding and name in PER_TOKEN:
            zero = not to_float64(got)[:, case.shape.used :].any()
            findings.require(f"gradient of {name} behind the last sequence", zero, "it is not zero")
