"""Every example in the documentation runs: Python blocks of README and docs, and the docstrings."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
MODULES = ["kdacore", "kdacore.api", "kdacore.dispatch.call", "kdacore.hookspecs", "kdacore.selections"]
MODULES += [f"kdacore.parallel.{name}" for name in ("fold", "local_ranks", "transition")]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


NEEDS = {"README.md": ("transformers",), "docs/guide/integrations.md": ("fla", "transformers")}
INTEGRATIONS = [f"kdacore.integrations.{name}" for name in ("fla", "transformers")]


def _pages() -> Iterator[Any]:
    """Pages on other projects need them; they warn of their own where there is no GPU."""
    for page in PAGES:
        missing = [name for name in NEEDS.get(page, ()) if importlib.util.find_spec(name) is None]
        skip = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
        yield pytest.param(
            page, marks=[skip, *([pytest.mark.filterwarnings("ignore")] if page in NEEDS else [])]
        )


@pytest.fixture
def integrations_not_imported() -> Iterator[None]:
    """Importing an integration activates it, but only once a process: each page imports it as the first to do so, and
    no later test finds it active."""
    from kdacore import integrations

    integrations.deactivate()
    before = {name: sys.modules.pop(name) for name in INTEGRATIONS if name in sys.modules}
    yield
    integrations.deactivate()
    for name in INTEGRATIONS:
        sys.modules.pop(name, None)
        vars(integrations).pop(name.rpartition(".")[2], None)
    for name, module in before.items():
        sys.modules[name] = module
        setattr(integrations, name.rpartition(".")[2], module)


@pytest.mark.slow
@pytest.mark.parametrize("page", tuple(_pages()))
def test_page(page: str, integrations_not_imported: None) -> None:
    """A page's blocks run top to bottom in one namespace, as a reader would run them."""
    namespace: dict[str, object] = {"__name__": "example"}
    text = (ROOT / page).read_text()
    for match in _BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + match[1], page, "exec")
        exec(code, namespace)


def test_the_pages_have_examples() -> None:
    assert sum(len(_BLOCK.findall((ROOT / page).read_text())) for page in PAGES) >= 8


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), verbose=False)
    assert results.failed == 0


def test_every_public_function_has_an_example() -> None:
    import kdacore

    functions = [getattr(kdacore, n) for n in kdacore.__all__ if callable(getattr(kdacore, n))]
    plain = [f for f in functions if not isinstance(f, type)]
    assert [f.__name__ for f in plain if ">>>" not in (f.__doc__ or "")] == []


def test_every_hook_has_an_example() -> None:
    from kdacore import hookspecs

    hooks = [f for n, f in vars(hookspecs).items() if n.startswith("kdacore_")]
    assert len(hooks) == 6
    assert [f.__name__ for f in hooks if ">>>" not in (f.__doc__ or "")] == []


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in PAGES:
        base = (ROOT / page).parent
        prose = re.sub(r"`[^`\n]*`", "", (ROOT / page).read_text())
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (base / target).exists():
                broken.append(f"{page}: {target}")
    assert broken == []
