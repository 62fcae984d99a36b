"""``kdacore/acceleration`` only makes calls faster: a copy of the front end without it passes tests of its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ("reference", "triton", "cuda", "pallas")
TESTS = (
    "tests/contract/test_bad_calls.py",
    "tests/contract/test_bad_pools.py",
    "tests/contract/test_memory.py",
    "tests/registry/test_selection.py",
    "tests/registry/test_forms.py",
)
CALLS = """
import numpy as np, torch, kdacore
from kdacore.arrays.numpy import NUMPY
from kdacore.arrays.torch.eager import TORCH

def tokens(T, kind):
    rng = np.random.default_rng(T)
    x = {n: rng.standard_normal((1, T, 2, 16), dtype=np.float32) for n in ("q", "k", "v")}
    x |= {"g": -np.abs(x["q"]), "beta": np.full((1, T, 2), 0.5, np.float32)}
    return x if kind == "numpy" else {n: torch.from_numpy(a) for n, a in x.items()}

for op in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
    for T in (4, 4, 4, 5, 6, 4):
        o, state = op(**tokens(T, "numpy"), output_final_state=True)
        o_torch, state_torch = op(**tokens(T, "torch"), output_final_state=True)
        np.testing.assert_allclose(o_torch.numpy(), o, atol=1e-5)
        np.testing.assert_allclose(state_torch.numpy(), state, atol=1e-5)
for op in (kdacore.chunk_gated_delta_rule, kdacore.fused_recurrent_gated_delta_rule):
    for T in (4, 5, 6, 4):
        x = tokens(T, "torch")
        assert op(**{**x, "g": x["g"][..., 0]})[0].shape == x["v"].shape
for T in (4, 5, 6, 4, 4):
    x = {n: a.requires_grad_() for n, a in tokens(T, "torch").items()}
    kdacore.chunk_kda(**x)[0].sum().backward()
    assert all(a.grad is not None and a.grad.shape == a.shape for a in x.values())
g = torch.zeros(1, 4, 2, 16, requires_grad=True)
for _ in range(3):
    kdacore.kda_gate(g, A_log=torch.zeros(2)).sum().backward()
assert g.grad is not None and kdacore.explain("chunk_kda", **tokens(4, "numpy")).backend
assert NUMPY.seen_calls is None and TORCH.seen_calls is None
"""


SUITE = """
import os, sys, pytest
code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]])
assert sys.modules["kdacore"].__file__.startswith(os.getcwd()), "the copy is what is tested"
assert not [name for name in sys.modules if name.startswith("kdacore.acceleration")]
sys.exit(code)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's packages and tests, without the folder."""
    folder = tmp_path_factory.mktemp("without")
    for name in ("kdacore", *[f"backends/{b}" for b in BACKENDS]):
        skipped = shutil.ignore_patterns("acceleration", "__pycache__", "csrc", "cubins")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in ("tests", "examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in the copy, with its packages before those that are installed."""
    path = os.pathsep.join(map(str, [folder, *[folder / "backends" / b for b in BACKENDS]]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_calls_work_without_it(copy: Path) -> None:
    assert (ROOT / "kdacore/acceleration/seen_calls.py").exists() and not (
        copy / "kdacore/acceleration"
    ).exists()
    done = run(copy, "-c", CALLS)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.exhaustive
def test_tests_of_calls_pass_without_it(copy: Path) -> None:
    done = run(copy, "-c", SUITE, *TESTS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
