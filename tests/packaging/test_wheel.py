"""One wheel holds everything, and the README's commands are the ones CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kdacore_cuda.build.packaged_executors import executors_in

ROOT = Path(__file__).parents[2]
PACKAGES = ("kdacore", "kdacore_reference", "kdacore_triton", "kdacore_cuda", "kdacore_pallas")


def build(folder: Path, machine: str = "") -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = os.environ | {"KDACORE_WHEEL": machine}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """That of Linux on x86-64."""
    return build(tmp_path_factory.mktemp("dist"), "x86_64")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "any"])
def test_machine_code_is_in_the_wheels_of_linux_alone(tmp_path: Path, machine: str) -> None:
    """One executor, that of the machine, and all packaged kernels; the wheel for every machine has no ELF file."""
    made = build(tmp_path, machine)
    assert made.filename is not None
    tag = "any" if machine == "any" else f"manylinux_2_17_{machine}"
    assert made.filename.endswith(f"-py3-none-{tag}.whl")
    elf = {name for name in made.namelist() if made.read(name)[:4] == b"\x7fELF"}
    if machine == "any":
        assert elf == set()
        return
    folder = ROOT / "backends/cuda/kdacore_cuda"
    executor = executors_in().rows()[machine]["file"]
    cubins = {f"kdacore_cuda/cubins/{path.name}" for path in (folder / "cubins").glob("*.cubin")}
    assert elf == cubins | {f"kdacore_cuda/executors/{executor}"}


def test_a_machine_without_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build(tmp_path, "riscv64")
    assert b"KDACORE_WHEEL=riscv64: expected any or one of" in failed.value.stderr


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
    missing = [f for f in missing if not f.endswith(".so")]  # those of other machines
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
    assert base == {"numpy", "packaging", "platformdirs", "pluggy", "array-api-compat", "rich"}
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.M))
    assert {"triton", "cuda", "jax", "pallas", "conformance", "test", "bench"} <= extras
    assert "License-Expression: MIT" in text


def test_ci_runs_the_commands_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert [c for c in commands if c not in ci] == []


def test_the_version_is_written_once(wheel: zipfile.ZipFile) -> None:
    """In kdacore/version.py; the citation repeats it."""
    import kdacore

    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    assert f"\nVersion: {kdacore.__version__}\n" in wheel.read(name).decode()
    assert f"\nversion: {kdacore.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "\nversion = " not in (ROOT / "pyproject.toml").read_text().split("[tool.", 1)[0]
