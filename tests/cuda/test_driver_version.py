"""What the backend asks of the driver, with a driver that says what it is told to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_STUB = """
#include <stdlib.h>
int cuDriverGetVersion(int* version) { *version = atoi(getenv("STUB_VERSION")); return atoi(getenv("STUB_STATUS")); }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub."""
    assert shutil.which("gcc"), "the CUDA backend's tests need gcc and g++"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "stub.c").write_text(_STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "stub.c", "-o", folder / "libcuda.so.1"], check=True)
    return folder


def run(folder: Path, version: int, status: int, *command: str) -> str:
    """What a process prints that has this driver."""
    env = {"LD_LIBRARY_PATH": str(folder), "STUB_VERSION": str(version), "STUB_STATUS": str(status)}
    command = (sys.executable, *command)
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True).stdout


PROBE = "from kdacore_cuda import make_backend; print(make_backend().requirements[0].probe())"


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        (12090, 0, "the driver is for CUDA 12.9; the kernels need 13.0 or later"),
        (11040, 0, "the driver is for CUDA 11.4; the kernels need 13.0 or later"),
        (13000, 34, "no CUDA driver: cuDriverGetVersion returned 34"),
        (13000, 0, "None"),
        (13020, 0, "None"),
        (14000, 0, "None"),
    ],
)
def test_the_driver_must_load_what_nvrtc_13_makes(folder: Path, version: int, status: int, said: str) -> None:
    assert run(folder, version, status, "-c", PROBE).strip() == said


def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;")
    command = ["gcc", "-shared", "-fPIC", tmp_path / "empty.c", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(command, check=True)
    assert run(tmp_path, 13000, 0, "-c", PROBE).startswith("no CUDA driver: ")


@pytest.mark.exhaustive
def test_doctor_says_why_not(folder: Path) -> None:
    found: dict[str, Any] = json.loads(
        run(folder, 12080, 0, "-m", "kdacore", "doctor", "--json", "--no-selfcheck")
    )
    (cuda,) = [backend for backend in found["backends"] if backend["name"] == "cuda"]
    (missing,) = cuda["missing"]
    assert missing["what"] == "the driver is for CUDA 12.8; the kernels need 13.0 or later"
    assert missing["remedy"] == "install an NVIDIA driver for CUDA 13 (580 or later)"


def test_auto_does_not_choose_it(folder: Path) -> None:
    script = """
import kdacore
spec = lambda *shape: kdacore.ShapeDtype(shape, "bfloat16", device="cuda", kind="torch", arch="sm_90")
print(kdacore.explain("chunk_kda", *[spec(1, 8192, 64, 128)] * 4, spec(1, 8192, 64)))
"""
    old, new = (run(folder, version, 0, "-c", script) for version in (12080, 13000))
    assert "the driver is for CUDA 12.8" in old
    assert "the driver is for" not in new
