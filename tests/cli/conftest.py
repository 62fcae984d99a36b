"""A machine with NumPy alone and the reference backend, so that each test adds just what it is about."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kdacore import config, feature_matrix, machine, registry
from kdacore.machine import Machine, Row
from kdacore.registry import REGISTRY

WriteDistribution = Callable[..., None]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "BUILTIN_PLUGINS", ("kdacore_reference",))
    monkeypatch.setattr(registry, "third_parties", lambda: ([], []))
    small = Machine((Row("system", "a test"),), (), ("numpy",))
    monkeypatch.setattr(machine, "probe", lambda: small)
    config.refresh()
    yield small
    monkeypatch.undo()
    config.refresh()


@pytest.fixture
def every_backend(small_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends kdacore ships, in place of the reference alone."""
    monkeypatch.setattr(registry, "BUILTIN_PLUGINS", _real_plugins)
    REGISTRY.reset()


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WriteDistribution:
    """Installs a distribution with one plugin: ``distribution(name, source, entry_point)``."""
    monkeypatch.setattr(registry, "third_parties", _real_third_parties)
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def write(name: str, source: str, entry_point: str = "") -> None:
        module = name.replace("-", "_")
        (root / f"{module}.py").write_text(textwrap.dedent(source))
        info = root / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kdacore]\n{entry_point or name} = {module}\n")
        REGISTRY.reset()

    return write


@pytest.fixture
def requests_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's table of features asks each backend about the same 2000 requests: they are built once for all tests
    that are not about them."""
    monkeypatch.setattr(feature_matrix, "request_of", _request_of)


_request_of = functools.cache(feature_matrix.request_of)
_real_third_parties = registry.third_parties
_real_plugins = registry.BUILTIN_PLUGINS
