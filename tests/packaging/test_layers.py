"""No circle of imports in any package. The order of the layers is import-linter's (`lint-imports`)."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import grimp
import pytest
import tomllib

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PACKAGES = ("kdacore", "kdacore_reference", "kdacore_triton", "kdacore_cuda", "kdacore_pallas")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    """Imports inside functions count; imports for type checkers alone do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 5
    graphlib.TopologicalSorter(imports).prepare()  # CycleError names the circle


def _modules_for_authors() -> set[str]:
    page = (ROOT / "docs/guide/writing-a-backend.md").read_text()
    table = page.split("## What to import")[1].split("\n## ")[0]
    return set(re.findall(r"(?m)^\| `(kdacore[\w.]*)` \|", table)) - {"kdacore"}


def _within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_backends_import_what_the_page_for_authors_names(package: str) -> None:
    """Imports for type checkers count too."""
    graph = grimp.build_graph(package, "kdacore", cache_dir=None)
    named = _modules_for_authors()
    modules = [m for m in graph.modules if _within(m, {package})]
    imported = {i for m in modules for i in graph.find_modules_directly_imported_by(m)}
    own = {i for i in imported if i.startswith("kdacore.")}
    assert own and sorted(i for i in own if not _within(i, named)) == []


def test_the_linter_forbids_backends_all_other_modules() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["name"].startswith("backends import")]
    forbidden, named = set(contract["forbidden_modules"]), _modules_for_authors()
    assert not [m for m in named if _within(m, forbidden)]
    graph = grimp.build_graph("kdacore", cache_dir=None)
    assert forbidden <= graph.modules
    unlisted = {m for m in graph.modules if not _within(m, forbidden | named)}
    assert unlisted == {"kdacore", "kdacore.arrays", "kdacore.arrays.torch", "kdacore.contract"}


def test_production_never_imports_the_conformance_suite() -> None:
    graph = grimp.build_graph("kdacore", exclude_type_checking_imports=True, cache_dir=None)
    suite = {"kdacore.testing", *graph.find_descendants("kdacore.testing")}
    tools = ("kdacore.testing", "kdacore.bench", "kdacore.cli", "kdacore.__main__")
    users = {
        module
        for module in graph.modules
        if not module.startswith(tools) and graph.find_modules_directly_imported_by(module) & suite
    }
    assert not users


def test_a_first_call_loads_few_modules() -> None:
    import os
    import subprocess
    import sys

    code = (
        "import sys, numpy as np, kdacore;"
        "x = np.ones((1, 64, 2, 8), np.float32);"
        "kdacore.chunk_kda(x, x, x, -x, x[..., 0]);"
        "print(*sorted(m for m in sys.modules if m.startswith('kdacore')))"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "KDACORE_DISABLE_PLUGINS": "all",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    modules = done.stdout.split()
    assert len(modules) <= 34, modules  # of the ops: definitions, arguments, families of features
