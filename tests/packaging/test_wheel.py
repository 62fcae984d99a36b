"""One wheel holds everything, and the README's commands are the ones CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kdacore", "kdacore_reference", "kdacore_triton", "kdacore_cuda", "kdacore_pallas")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    assert path.name.endswith("py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_package_whole(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    roots = {"kdacore": ROOT / "kdacore"}
    roots.update({p: next(ROOT.glob(f"backends/*/{p}")) for p in PACKAGES[1:]})
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    missing = []
    for package, folder in roots.items():
        prefix = str(folder.relative_to(ROOT)) + "/"
        missing += [
            f for f in tracked if f.startswith(prefix) and f"{package}/{f[len(prefix) :]}" not in inside
        ]
    assert missing == []
    assert "kdacore/py.typed" in inside


def test_the_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == set(PACKAGES)


def test_metadata(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    text = wheel.read(name).decode()
    base = {
        re.split(r"[><=;\s]", r)[0]
        for r in re.findall(r"^Requires-Dist: (.*)$", text, re.M)
        if "extra ==" not in r
    }
    assert base == {"numpy", "pluggy", "array-api-compat", "rich"}
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.M))
    assert {"triton", "cuda", "pallas", "test", "bench"} <= extras
    assert "License-Expression: MIT" in text


def test_ci_runs_the_commands_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert [c for c in commands if c not in ci] == []


def test_versions_agree() -> None:
    import kdacore

    assert re.search(rf'^version = "{kdacore.__version__}"$', (ROOT / "pyproject.toml").read_text(), re.M)
