"""Running cases: each is served and meets the contract, or is declined with reasons, and both are counted."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from typing import Literal

from kdacore.errors import UnsupportedError
from kdacore.testing.cases import Case
from kdacore.testing.checks import CHECKS
from kdacore.testing.compare import Finding, Findings
from kdacore.testing.signature import judge
from kdacore.types import Reason

Status = Literal["served", "declined", "failed"]


@dataclass(frozen=True)
class Result:
    """What became of one case."""

    case: Case
    status: Status
    findings: tuple[Finding, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """The backend's own reasons against the case, when it declined."""
    message: str = ""
    """Why it failed."""
    seconds: float = 0.0


def run_case(case: Case) -> Result:
    """Run one case. Never raises for what the backend does wrong: that is the result."""
    start = time.perf_counter()
    reasons = judge(case)
    findings = Findings()
    try:
        CHECKS[case.check](case, findings)
    except UnsupportedError as error:
        return _declined(case, reasons, error, time.perf_counter() - start)
    except Exception:  # noqa: BLE001  a backend may fail in any way; the failure is the result
        return Result(case, "failed", tuple(findings.items), reasons, traceback.format_exc())
    seconds = time.perf_counter() - start
    problems = [str(f) for f in findings.failures]
    if reasons:
        codes = ", ".join(r.code for r in reasons)
        problems.insert(0, f"its verifiers decline this call ({codes}), yet it ran")
    if not findings.items:
        problems.append("the check measured nothing")
    status: Status = "failed" if problems else "served"
    return Result(case, status, tuple(findings.items), (), "\n".join(problems), seconds)


def _declined(case: Case, reasons: tuple[Reason, ...], error: UnsupportedError, seconds: float) -> Result:
    """A refusal must be the one the verifiers announced."""
    given = error.reasons.get(case.backend, ())
    if not reasons:
        return Result(case, "failed", (), given, f"it said it serves this call, then refused:\n{error}")
    if given != reasons:
        text = f"its verifiers gave {reasons}, the forced call {given}"
        return Result(case, "failed", (), reasons, text)
    broken = [str(r) for r in reasons if r.code == "verifier_error" or not r.code or not r.message]
    status: Status = "failed" if broken else "declined"
    return Result(case, status, (), reasons, "\n".join(broken), seconds)
