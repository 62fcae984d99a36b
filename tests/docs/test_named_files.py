"""Files that pages, docstrings and comments name exist. The lab's logs name those of their time."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdacore.lazy import ON_AN_INDEX, install_line

ROOT = Path(__file__).parents[2]
FOLDERS = ("kdacore", "backends", "benchmarks", "tests", "docs", "examples", "codegen")
PAGES = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "lab"]
PAGES += [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/README.md")
]
SOURCES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if "docs" not in p.parts]
NAME = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|pyi|md|json|cuh?|c|svg|toml|in))\b")
MODULE = re.compile(r":(?:mod|func|class|data|meth|attr):`~?(kdacore(?:_\w+)?(?:\.\w+)+)`")
NEW = {
    "CONTRIBUTING.md": {
        "backends/sixth/kdacore_sixth/__init__.py",
        "backends/sixth/kdacore_sixth/recurrent.py",
    },
}
"""Files that a recipe tells a reader to make."""


def _named(text: str) -> Iterator[str]:
    for name in NAME.findall(text):
        if not re.search(r"[<>*{]|NAME|\.\.\.", name):
            yield name


FROM_AN_INDEX = re.compile(r"pip install [^`\n;&]*?(?<![\w/.-])(?<!checkout of )kdacore(?![\w/])")


def _from_an_index(text: str) -> list[str]:
    return [match[0] for match in FROM_AN_INDEX.finditer(text)]


@pytest.mark.skipif(ON_AN_INDEX, reason="kdacore is on an index")
def test_what_installs_kdacore_works_before_it_is_on_an_index() -> None:
    """Pages and messages: a checkout's line. One function makes those of messages."""
    for line in (
        "`pip install 'kdacore[cuda]'`",
        "pip install kdacore jax",
        "pip install vllm 'kdacore[cuda]'",
    ):
        assert _from_an_index(line)
    for line in ("pip install '.[cuda]' in a checkout of kdacore", "pip install . && .venv/bin/kdacore demo"):
        assert not _from_an_index(line)
    shipped = [path for path in SOURCES if "tests" not in path.parts and path.name != "lazy.py"]
    wrong = {path: found for path in (*PAGES, *shipped) if (found := _from_an_index(path.read_text()))}
    assert wrong == {}


def test_the_line_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdacore.lazy.ON_AN_INDEX", False)
    assert install_line("cuda") == "pip install '.[cuda]' in a checkout of kdacore"
    monkeypatch.setattr("kdacore.lazy.ON_AN_INDEX", True)
    assert install_line("cuda") == "pip install 'kdacore[cuda]'"


def test_names_are_found() -> None:
    assert sum(len(list(_named(page.read_text()))) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    new = NEW.get(page.name, set())
    assert [n for n in _named(page.read_text()) if n not in new and not (ROOT / n).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_nowhere(page: Path) -> None:
    """Names without a folder, such as `compose.cuh`."""
    names = set(re.findall(r"`([\w-]+\.(?:py|cuh?|svg|toml))`", page.read_text()))
    assert names <= _every_file()


@functools.cache
def _every_file() -> set[str]:
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {"pyproject.toml"}


def test_sources_name_files_that_exist() -> None:
    """In docstrings, comments and strings."""
    wrong = []
    for path in SOURCES:
        for name in _named(path.read_text()):
            if not (ROOT / name).exists():
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_cross_references_name_what_exists() -> None:
    """``:func:`kdacore.x.y``` and the like: the longest part of the name that is a module must define the rest."""
    wrong = []
    for path in (p for p in SOURCES if p.parts[len(ROOT.parts)] in ("kdacore", "backends", "benchmarks")):
        for name in MODULE.findall(path.read_text()):
            if not _defines(name):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def _defines(name: str) -> bool:
    parts = name.split(".")
    roots = [ROOT, *(ROOT / "backends").iterdir()]
    for length in range(len(parts), 0, -1):
        for root in roots:
            module = root.joinpath(*parts[:length])
            file = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
            if file.exists():
                source = file.read_text()
                return all(re.search(rf"\b{part}\b", source) for part in parts[length:])
    return False
