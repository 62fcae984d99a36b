"""Functions that import their module when they are first called; packages that are asked for by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from kdacore.lazy import lazy_function, lazy_module, package_probe
from kdacore.machine import release_of


def test_a_module_is_imported_by_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lately"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text("calls = []\ndef forward(x):\n    calls.append(x)\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forward = lazy_function("lately", "work", "forward")
    assert forward.__name__ == "forward" and "lately" not in sys.modules
    assert forward(3) == 6 and forward(4) == 8
    assert sys.modules["lately.work"].calls == [3, 4]
    for name in ("lately", "lately.work"):
        del sys.modules[name]


def test_a_stand_in_reads_the_module_that_is_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lately_read.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stand_in = lazy_module("lately_read")
    assert "lately_read" not in sys.modules
    assert stand_in.value == 1
    monkeypatch.setattr(sys.modules["lately_read"], "value", 2)
    assert stand_in.value == 2
    other = ModuleType("lately_read")
    other.value = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lately_read", other)
    assert stand_in.value == 3
    del sys.modules["lately_read"]
    assert stand_in.value == 1, "imported again"
    with pytest.raises(AttributeError, match="nothing"):
        _ = stand_in.nothing
    del sys.modules["lately_read"]


def test_what_is_not_there_is_an_error_of_the_call() -> None:
    missing = lazy_function("kdacore", "lazy", "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        missing()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_probe("pluggy")() is None
    (tmp_path / "a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("no_such_package", "a_folder"):
        assert package_probe(name)() == f"{name} is not installed"


@pytest.mark.parametrize(
    ("version", "numbers"), [("3.7.1", (3, 7, 1)), ("0.11rc1", (0, 11)), ("3.6.0+git1a2b", (3, 6, 0))]
)
def test_versions_are_read_as_installers_read_them(version: str, numbers: tuple[int, ...]) -> None:
    assert release_of(version) == numbers
