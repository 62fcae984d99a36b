"""No circle of imports in any package. The order of the layers is import-linter's (`lint-imports`)."""

from __future__ import annotations

import graphlib

import grimp
import pytest

pytestmark = pytest.mark.quick

PACKAGES = ("kdacore", "kdacore_reference", "kdacore_triton", "kdacore_cuda", "kdacore_pallas")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    """Imports inside functions count; imports for type checkers alone do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 5
    graphlib.TopologicalSorter(imports).prepare()  # CycleError names the circle


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
    assert len(modules) <= 31, modules
