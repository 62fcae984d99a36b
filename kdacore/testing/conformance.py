"""The conformance suite as pytest tests; see :mod:`kdacore.testing.pytest_plugin` for the command."""

from __future__ import annotations

import pytest

from kdacore.testing.cases import Case
from kdacore.testing.matrix import Plan
from kdacore.testing.pytest_plugin import describe
from kdacore.testing.suite import coverage_problems, judged, run_case


def test_case(kdacore_case: Case, request: pytest.FixtureRequest) -> None:
    """One case: served within the contract, or declined with the reasons announced."""
    result = run_case(kdacore_case)
    request.node.user_properties.extend(describe(result))
    if result.status == "failed":
        pytest.fail(f"{kdacore_case}\n{result.message}", pytrace=False)


def test_declared_is_served(kdacore_plan: Plan) -> None:
    """Every op and array kind the backend declares is served in some case."""
    problems = coverage_problems(judged(kdacore_plan.cases))
    if problems:
        pytest.fail("\n".join([*problems, *kdacore_plan.notes]), pytrace=False)
