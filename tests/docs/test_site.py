"""The site: every page once in its navigation, but for the lab's, which its search leaves out; its signatures."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
LAB = sorted((ROOT / "docs/lab").glob("*.md"))


def test_every_page_is_in_the_navigation() -> None:
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p not in LAB]
    named = re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(named) == sorted(str(p.relative_to(ROOT / "docs")) for p in pages)


@pytest.mark.parametrize("page", LAB, ids=lambda path: path.name)
def test_the_search_leaves_out_the_lab(page: Path) -> None:
    assert page.read_text().startswith("---\nsearch:\n  exclude: true\n---\n\n# ")


SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]


def test_signatures_are_wrapped_and_shown_once() -> None:
    """A line of 80 columns fits the text of a page in a window of 1,280 pixels."""
    options = SETTINGS["plugins"]["mkdocstrings"]["handlers"]["python"]["options"]
    assert options["separate_signature"] and options["show_overloads"] is False
    assert options["line_length"] <= 80
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(line.startswith("ruff") for line in extras["docs"]), "which mkdocstrings wraps them by"


def test_the_style_sheets_are_there() -> None:
    assert SETTINGS["extra_css"]
    assert all((ROOT / "docs" / name).is_file() for name in SETTINGS["extra_css"])


class Parameters(list[Any]):
    """As those of griffe: looked up by name too."""

    def __getitem__(self, name: Any) -> Any:
        return next(p for p in self if p.name == name) if isinstance(name, str) else super().__getitem__(name)


def parameters(**annotations: str) -> Parameters:
    return Parameters(SimpleNamespace(name=name, annotation=of) for name, of in annotations.items())


def test_the_one_signature_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the parameters that catch wrong calls, and what another overload takes by its own type."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    spec = importlib.util.spec_from_file_location("extensions", ROOT / "docs" / "griffe_extensions.py")
    assert spec is not None and spec.loader is not None
    extensions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extensions)
    torch = SimpleNamespace(parameters=parameters(q="Tensor", checkpoint_every="None"), returns="Tensor")
    jax = SimpleNamespace(parameters=parameters(q="jax.Array"), returns="jax.Array")
    own = parameters(q="Array", extra="object", checkpoint_every="int | None")
    function = SimpleNamespace(is_alias=False, overloads=[torch, jax], parameters=own, returns="Any")
    plain = SimpleNamespace(is_alias=False, overloads=None, parameters=own, returns="Any")
    inner = SimpleNamespace(is_alias=False, modules={}, functions={"f": function, "plain": plain})
    alias = SimpleNamespace(is_alias=True)
    package = SimpleNamespace(modules={"api": inner, "other": alias}, functions={"again": alias})
    extensions.OneSignature().on_package(pkg=package)
    assert [(p.name, p.annotation) for p in function.parameters] == [
        ("q", "Tensor"),
        ("checkpoint_every", "int | None"),
    ]
    assert (function.returns, function.overloads) == ("Tensor", None)
    assert (plain.parameters, plain.returns) == (own, "Any")
