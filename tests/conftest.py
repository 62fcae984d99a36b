"""Two cores are shared by two test workers, so array libraries use one thread each.

Tests carry their own marks; ``pytest -m "not slow"`` is the inner loop.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_xla = ["--xla_force_host_platform_device_count=8"]
if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, and torch may import it in any test: so before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
    # Programs are compiled quickly, for most run once. On CPUs the compiler's older emitters take half the time of
    # those that go through MLIR. Tests of bits compile as JAX does without this (`full_speed` in
    # pallas/pallas_cases.py). Not where there is a GPU: other versions of the compiler end the process at a flag that
    # they do not know.
    _xla += [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
# JAX reads this once, so before all tests.
os.environ.setdefault("XLA_FLAGS", " ".join(_xla))

SLOW_FOLDERS = {"conformance", "cuda", "examples", "packaging", "parallel", "pallas", "triton", "typing"}
"""Here kernels are compiled, interpreted or emulated, or whole programs run, in nearly every test: all are slow, except
those that are marked ``quick``."""


@pytest.fixture(autouse=True)
def _configuration_of_this_test_alone() -> Iterator[None]:
    """What a test read from the variables that it set goes with them: they are put back before this fixture ends."""
    yield
    config = sys.modules.get("kdacore.config")
    if config is not None and config._config not in (None, config.parse(os.environ)):
        config.refresh()


@pytest.fixture(scope="session", autouse=True)
def _cpus_without_cost_tables() -> None:
    """Backends that tests make up for CPUs state no cost, so rank decides about them; see ``cpu_costs``."""
    from kdacore.dispatch import cost_tables

    cost_tables.CPU = "none"


@pytest.fixture
def cpu_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Cost tables count on CPUs, as they do outside of tests: the shipped one, and those in the folder."""
    from kdacore import config
    from kdacore.dispatch import cost_tables

    def anew() -> None:
        cost_tables.shipped.cache_clear()
        config.refresh()

    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_tables, "CPU", "cpu")
    anew()
    yield tmp_path / "costs"
    monkeypatch.undo()
    anew()


def pytest_collection_finish() -> None:
    """What was imported lives until the end, so the garbage collector need not look through it again and again, nor
    look as often as by default at what tracing makes: that took a tenth of the time of tests with JAX."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if "jax" in sys.modules:  # imported here, as many tests import no kdacore
        from kdacore.testing.compiled_programs import drop_if_many

        drop_if_many()


def _mark_later_cases(items: list[pytest.Item]) -> None:
    """What ``first_cases``, ``every_other`` and ``jax_later`` leave to the exhaustive gate."""
    seen: Counter[tuple[Path, str]] = Counter()
    places: defaultdict[tuple[Path, str, str], dict[int, int]] = defaultdict(dict)
    for item in items:
        name = (item.path, getattr(item, "originalname", item.name))
        if item.get_closest_marker("every_other"):
            given: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
            known = {argument: places[(*name, argument)] for argument in given}
            if sum(known[a].setdefault(id(value), len(known[a])) for a, value in given.items()) % 2:
                item.add_marker(pytest.mark.exhaustive)
        first = item.get_closest_marker("first_cases")
        if first is not None:
            seen[name] += 1
            if seen[name] > first.args[0]:
                item.add_marker(pytest.mark.exhaustive)
        elif item.get_closest_marker("jax_later") and "jax" in item.name:
            item.add_marker(pytest.mark.exhaustive)


def _is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("exhaustive"):  # `-m "not slow"` replaces the option that leaves these out
        return True
    return item.path.parent.name in SLOW_FOLDERS and not item.get_closest_marker("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the exhaustive and the slow tests, and skip those for a GPU where there is none.

    What the latter found on the hardware is in benchmarks/results.
    """
    _mark_later_cases(items)
    for item in items:
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
