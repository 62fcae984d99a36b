"""kdacore.compat.fla has the names, positions and defaults of flash-linear-attention 0.6."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from kdacore.compat import fla

sys.path.insert(0, str(Path(__file__).parent))
from fla_signatures import SIGNATURES

sys.path.pop(0)

OURS_ALONE = {"head_first"}
"""Keywords that are named to be refused where flash-linear-attention ignores them."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_ours_are_as_published(name: str) -> None:
    _, wanted, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    positional = [(p.name, _default(p)) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == wanted
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - OURS_ALONE == keywords - OURS_ALONE
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else repr(parameter.default)


def test_both_names_of_the_gated_delta_rule() -> None:
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
    assert set(fla.__all__) == {*SIGNATURES, "chunk_gdn", "fused_recurrent_gdn"}


def _published() -> importlib.metadata.Distribution | None:
    try:
        found = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if found.version.startswith("0.6.") else None


PUBLISHED: Any = _published()


@pytest.mark.skipif(PUBLISHED is None, reason="fla-core 0.6 is not installed")
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_description_is_the_published_source(name: str) -> None:
    """Its source is read, not imported."""
    path, wanted, keywords = SIGNATURES[name]
    tree = ast.parse(Path(PUBLISHED.locate_file(path)).read_text(encoding="utf-8"))
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults = [ast.unparse(d) for d in arguments.defaults]
    given = [""] * (len(names) - len(defaults)) + defaults
    assert list(zip(names, given, strict=True)) == wanted
    assert _read_from_kwargs(function) == keywords


def _read_from_kwargs(function: ast.FunctionDef) -> set[str]:
    """Names in ``kwargs.get("x")``, ``kwargs.pop("x")`` and ``"x" in kwargs``."""
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs")), args=[key, *_]):
                found.add(ast.literal_eval(key))
            case ast.Compare(left=key, ops=[ast.In()], comparators=[ast.Name(id="kwargs")]):
                found.add(ast.literal_eval(key))
    return found
