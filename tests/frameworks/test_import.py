"""``import kdacore`` brings in no array framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "cuda",
    "numpy",
    "ml_dtypes",
    "rich",
    "array_api_compat",
    "pytest",
)


def loaded_after(code: str) -> list[str]:
    script = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_import_kdacore_imports_nothing_heavy() -> None:
    assert loaded_after("import kdacore") == []


def test_listing_backends_imports_no_framework() -> None:
    assert not {"torch", "jax", "triton"} & set(loaded_after("import kdacore; kdacore.backends()"))


@pytest.mark.parametrize("kind", ["numpy"])
def test_a_numpy_call_imports_no_framework(kind: str) -> None:
    code = """
import numpy as np, kdacore
x = np.ones((1, 4, 1, 4), np.float32)
kdacore.chunk_kda(x, x, x, -x, x[..., 0], use_qk_l2norm_in_kernel=True)
"""
    assert not {"torch", "jax", "triton", "pytest"} & set(loaded_after(code))


def test_dir_shows_public_names_and_modules_resolve() -> None:
    code = """
import types, kdacore
names = dir(kdacore)
assert set(kdacore.__all__) <= set(names) and "import_module" not in names and "Any" not in names
for name in ("compat", "integrations", "parallel", "stages"):
    assert name in names and isinstance(getattr(kdacore, name), types.ModuleType)
assert kdacore.__version__
"""
    assert not {"torch", "jax", "triton"} & set(loaded_after(code))
