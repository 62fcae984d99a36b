"""The pytest plugin that points the conformance suite at a backend.

::

    pytest --kdacore-backend=NAME [--kdacore-device=cpu|cuda|tpu] [--kdacore-level=quick|full]
           [--kdacore-kind=KIND] [--kdacore-random=N] --pyargs kdacore.testing.conformance

Every pytest run loads this module (it is an entry point), so it imports nothing until the suite is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_CONFORMANCE = Path(__file__).with_name("conformance.py")
_STATUS, _CODES, _WORST = "kdacore_status", "kdacore_codes", "kdacore_worst"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("kdacore", "conformance of a kdacore backend")
    group.addoption("--kdacore-backend", metavar="NAME", help="the backend to test")
    group.addoption(
        "--kdacore-device", choices=("cpu", "cuda", "tpu"), help="where (default: its first choice)"
    )
    group.addoption("--kdacore-level", choices=("quick", "full"), default="quick", help="how much (quick)")
    group.addoption(
        "--kdacore-kind",
        action="append",
        default=[],
        choices=("numpy", "torch", "jax"),
        metavar="KIND",
        help="only numpy, torch or jax arrays",
    )
    group.addoption(
        "--kdacore-random", type=_whole, default=0, metavar="N", help="also N random calls, and N of stages"
    )
    group.addoption(
        "--kdacore-seed", type=_whole, default=0, metavar="S", help="seed of the first random call"
    )


def _whole(text: str) -> int:
    from kdacore.argument_types import at_least

    return at_least(0)(text)


def pytest_configure(config: pytest.Config) -> None:
    """Long cases carry the marker ``slow``."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    if name := config.getoption("kdacore_backend"):
        from kdacore.errors import ContractError
        from kdacore.registry import REGISTRY

        try:
            REGISTRY.get(name, "pytest", "--kdacore-backend")
        except ContractError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[Any] | None:
    """Without a backend to test there are no conformance tests."""
    asked = collector.config.getoption("kdacore_backend")
    return [] if not asked and collector.path == _CONFORMANCE else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the backend's plan."""
    if "kdacore_case" not in metafunc.fixturenames:
        return
    cases = planned(metafunc.config).cases + _random(metafunc.config)
    marks = {c: [pytest.mark.slow] if c.slow else [] for c in cases}
    params = [pytest.param(c, id=c.id, marks=marks[c]) for c in cases]
    metafunc.parametrize("kdacore_case", params)


def planned(config: pytest.Config) -> Any:
    """The plan that the command line asks for."""
    from kdacore.testing.matrix import plan

    return plan(
        config.getoption("kdacore_backend"),
        device=config.getoption("kdacore_device"),
        level=config.getoption("kdacore_level"),
        kinds=tuple(config.getoption("kdacore_kind")),
    )


def _random(config: pytest.Config) -> tuple[Any, ...]:
    from kdacore.testing.random_cases import NothingServedError, calls_of, random_case

    plan, first = planned(config), config.getoption("kdacore_seed")
    seeds = range(first, first + config.getoption("kdacore_random"))
    drawn = [(seed, calls) for calls in calls_of(plan.backend) for seed in seeds]
    only = tuple(config.getoption("kdacore_kind"))
    try:
        return tuple(
            random_case(plan.backend, seed, plan.device, plan.level, calls, only) for seed, calls in drawn
        )
    except NothingServedError as error:
        raise pytest.UsageError(f"--kdacore-random: {error}") from None


@pytest.fixture(scope="session")
def kdacore_plan(pytestconfig: pytest.Config) -> Any:
    """Every case of the backend under test."""
    return planned(pytestconfig)


def describe(result: Any) -> list[tuple[str, object]]:
    """A result as properties of its test report: they reach the summary from worker processes too."""
    worst = result.worst
    found: list[tuple[str, object]] = [(_STATUS, result.status), (_CODES, list(result.codes))]
    if worst is not None:
        found.append((_WORST, [result.case.check, worst.what, worst.error, worst.bound]))
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many cases were served, how many declined and for which reasons."""
    if not config.getoption("kdacore_backend"):
        return
    reports = [r for name in ("passed", "failed") for r in terminalreporter.stats.get(name, [])]
    rows = [dict(r.user_properties) for r in reports if getattr(r, "when", "") == "call"]
    rows = [row for row in rows if _STATUS in row]
    if not rows:
        return
    terminalreporter.section(f"kdacore conformance: {config.getoption('kdacore_backend')}")
    for line in _counted(rows):
        terminalreporter.write_line(line)


def _counted(rows: list[dict[str, Any]]) -> list[str]:
    status = [row[_STATUS] for row in rows]
    lines = [", ".join(f"{status.count(s)} {s}" for s in ("served", "declined", "failed"))]
    codes = [code for row in rows if row[_STATUS] == "declined" for code in row[_CODES]]
    lines += [f"declined for {code}: {codes.count(code)}" for code in sorted(set(codes))]
    worst: dict[str, tuple[float, str]] = {}
    for check, what, error, bound in (row[_WORST] for row in rows if _WORST in row):
        if error / bound > worst.get(check, (-1.0, ""))[0]:
            worst[check] = (error / bound, f"worst {check}: {error:.2e} of {bound:.2e} allowed ({what})")
    return lines + [text for _, text in worst.values()]
