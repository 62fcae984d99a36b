"""Two sections of CONTRIBUTING.md, followed literally on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ("reference", "triton", "cuda", "pallas")
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(section: str) -> list[tuple[str, str]]:
    """The section's code blocks in order: language and text."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    start = text.index(f"\n## {section}\n")
    end = text.find("\n## ", start + 1)
    body = text[start : end if end >= 0 else len(text)]
    return [(m[2], textwrap.dedent(m[3])) for m in _BLOCK.finditer(body)]


def apply_diff(tree: Path, diff: str) -> None:
    """Apply a block, ``--- file`` and lines of a diff, everywhere its context occurs."""
    head, *lines = diff.splitlines()
    path = tree / head.removeprefix("--- ")
    before = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
    after = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert before in text, f"CONTRIBUTING.md shows lines that {head} does not have:\n{before}"
    path.write_text(text.replace(before, after))


def write_file(tree: Path, block: str) -> None:
    """Write a block whose first line is a comment that names the file."""
    head, _, text = block.partition("\n")
    path = tree / head.removeprefix("# ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def follow(tree: Path, section: str) -> list[str]:
    """Apply the section's edits. Returns its shell commands."""
    commands: list[str] = []
    for language, text in blocks(section):
        if language == "diff":
            apply_diff(tree, text)
        elif language == "python":
            write_file(tree, text)
        else:
            commands += text.splitlines()
    return commands


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    folders = [tree, *(folder for folder in (tree / "backends").iterdir())]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "KDACORE_CACHE_DIR": str(tree / "cache"),
    }
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and of the tests the sections name."""
    skip = shutil.ignore_patterns("__pycache__", "*.cubin")
    for folder in ("kdacore", "codegen"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    for name in BACKENDS:
        shutil.copytree(ROOT / "backends" / name, tmp_path / "backends" / name, ignore=skip)
    shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "examples" / "plugin", ignore=skip)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "contract" / "test_options.py", tmp_path / "tests")
    return tmp_path


USE = """
import numpy as np, kdacore
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 9, 2, 16), dtype=np.float32) for _ in range(3))
g, beta = -rng.random((1, 9, 2, 16), dtype=np.float32), rng.random((1, 9, 2), dtype=np.float32)
plain, _ = kdacore.chunk_kda(q, k, v, g, beta)
with kdacore.record_selections() as ran:
    audited, _ = kdacore.chunk_kda(q, k, v, g, beta, audit=True)
assert np.array_equal(plain, audited) and ran[0].request.option("audit") is True
codes = {c.backend: [r.code for r in c.reasons] for c in ran[0].candidates}
assert codes.pop("reference") == [], codes
assert all("option" in why for why in codes.values()) and len(codes) == 4, codes
assert "audit: look at the results once more." in kdacore.chunk_kda.__doc__
print("served by", ran[0].backend)
"""
CHANGED = {
    "kdacore/ops/arguments_and_options.py",
    "kdacore/api.py",
    "kdacore/api.pyi",
    "backends/reference/kdacore_reference/__init__.py",
}
"""What adding an option touches; the second and the third are written by a program."""
EXPLAIN = (
    "-m", "kdacore", "explain", "chunk_kda", "--shape", "1,9,2,2,16,16",
    "--dtype", "float32", "--kind", "numpy", "--audit",
)  # fmt: skip
SUITE = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kdacore-backend=reference", "--kdacore-kind=numpy",
    "--pyargs", "kdacore.testing.conformance", "-k", "audit",
)  # fmt: skip


@pytest.mark.slow
def test_adding_an_option(tree: Path) -> None:
    (command,) = follow(tree, "Adding an option")
    program, *words = command.split()
    assert program == "python"
    written = run(tree, *words)
    assert written.stdout.split() == ["written:", "kdacore/api.py", "written:", "kdacore/api.pyi"], written
    done = run(tree, "-c", USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served by reference"
    checks = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_options.py")
    assert checks.returncode == 0, checks.stdout
    explained = run(tree, *EXPLAIN)
    assert "-> reference" in explained.stdout and "does not serve audit" in explained.stdout, explained
    suite = run(tree, *SUITE)
    served = re.search(r"(\d+) served, 0 declined, 0 failed", suite.stdout)
    assert served and int(served[1]) >= 2, suite.stdout
    assert _changed(tree) == CHANGED


def _changed(tree: Path) -> set[str]:
    """Files of the copied packages that differ from those of the repository, or that it does not have."""
    found = set()
    for folder in ("kdacore", "codegen", "backends", "examples"):
        for path in (tree / folder).rglob("*.*"):
            name = str(path.relative_to(tree))
            if path.suffix in (".py", ".pyi", ".in", ".json", ".md", ".toml"):
                before = ROOT / name
                if not before.exists() or before.read_bytes() != path.read_bytes():
                    found.add(name)
    return found


@pytest.mark.slow
def test_adding_a_backend(tree: Path) -> None:
    outputs = []
    for command in follow(tree, "Adding a backend"):
        program, *words = command.split()
        assert program == "python"
        done = run(tree, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    plugins, suite, explained = outputs
    assert "sixth" in plugins
    served = re.search(r"(\d+) served, (\d+) declined, 0 failed", suite)
    assert served and int(served[1]) > 10, suite
    assert "-> sixth" in explained, explained
