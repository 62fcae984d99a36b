"""Running cases: each is served and meets the contract, or is declined with reasons, and both are counted."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kdacore import plugin_faults
from kdacore.errors import PluginError, UnsupportedError
from kdacore.testing.cases import BATCH_INVARIANCE_CHECKS, Case
from kdacore.testing.checks import CHECKS
from kdacore.testing.compare import Finding, Findings
from kdacore.testing.compiled_programs import drop_if_many
from kdacore.testing.serving import judge
from kdacore.types import Reason

Status = Literal["served", "declined", "failed"]

_CODE = re.compile(r"[a-z][a-z0-9_]*")


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

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of the reasons, each once."""
        return tuple(dict.fromkeys(r.code for r in self.reasons))

    @property
    def worst(self) -> Finding | None:
        """The measured error nearest its bound (or farthest beyond)."""
        measured = [f for f in self.findings if f.bound > 0]
        return max(measured, key=lambda f: f.error / f.bound, default=None)


def run_case(case: Case) -> Result:
    """Run one case. Never raises for what the backend does wrong: that is the result."""
    drop_if_many()
    start = time.perf_counter()
    reasons = judge(case)
    findings = Findings()
    _, error = plugin_faults.attempt(CHECKS[case.check], case, findings)
    seconds = time.perf_counter() - start
    if isinstance(error, UnsupportedError):
        return _declined(case, reasons, error, seconds)
    if error is not None:  # the failure is the result
        # Of what dispatch found wrong with results the text says all.
        found_wrong = isinstance(error, PluginError) and error.__cause__ is None
        text = str(error) if found_wrong else plugin_faults.traceback_of(error)
        error.__traceback__ = None  # whose frames hold the arrays
        return Result(case, "failed", tuple(findings.items), reasons, text, seconds)
    problems = [str(f) for f in findings.failures]
    if reasons:
        codes = ", ".join(r.code for r in reasons)
        problems.insert(0, f"its verifiers decline this call ({codes}), yet it ran")
    if not findings.items:
        problems.append("the check measured nothing")
    status: Status = "failed" if problems else "served"
    return Result(case, status, tuple(findings.items), (), "\n".join(problems), seconds)


def _declined(case: Case, reasons: tuple[Reason, ...], error: UnsupportedError, seconds: float) -> Result:
    """A refusal must be the one the verifiers announced, and say something."""
    given = error.reasons.get(case.backend, ())
    if not reasons:
        text = f"its verifiers have no objection, yet the call was refused:\n{error}"
        return Result(case, "failed", (), given, text, seconds)
    if given != reasons:
        text = f"its verifiers gave {reasons}, the forced call {given}"
        return Result(case, "failed", (), reasons, text, seconds)
    broken = [str(r) for r in reasons if not _well_formed(r)]
    status: Status = "failed" if broken else "declined"
    return Result(case, status, (), reasons, "\n".join(broken), seconds)


def _well_formed(reason: Reason) -> bool:
    return reason.code != "verifier_error" and bool(_CODE.fullmatch(reason.code)) and bool(reason.message)


# --- all of them ---------------------------------------------------------------------------------------------------


def coverage_problems(answers: Iterable[tuple[Case, bool, tuple[str, ...]]]) -> list[str]:
    """What a backend declares and never serves: an op, an array kind or batch invariance, whose every case it declines.

    Args:
        answers: each case, whether it is served (well or badly), and the codes when it is declined.
    """
    served: Counter[str] = Counter()
    refused: dict[str, Counter[str]] = {}
    for case, serves, codes in answers:
        promised = [f"batch_invariant of {case.op}"] if case.check in BATCH_INVARIANCE_CHECKS else []
        for group in (case.op, f"{case.kind} arrays", *promised):
            served[group] += serves
            refused.setdefault(group, Counter()).update(codes)
    found = []
    for group, codes_of in refused.items():
        if not served[group]:
            listed = ", ".join(f"{code} {count}x" for code, count in codes_of.most_common())
            found.append(f"{group}: declared, but every case is declined ({listed})")
    return found if refused else ["there is no case at all"]


def judged(cases: Iterable[Case]) -> list[tuple[Case, bool, tuple[str, ...]]]:
    """The answers of :func:`coverage_problems` from the verifiers alone; nothing runs."""
    answers = []
    for case in cases:
        reasons = judge(case)
        answers.append((case, not reasons, tuple(r.code for r in reasons)))
    return answers


def summary(results: Iterable[Result]) -> list[str]:
    """Lines that count what was served, what was declined and why, and name the failures."""
    status: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    for r in results:
        status[r.status] += 1
        codes.update(r.codes)
    lines = [f"{status['served']} served, {status['declined']} declined, {status['failed']} failed"]
    lines += [f"declined for {code}: {count}" for code, count in sorted(codes.items())]
    return lines
