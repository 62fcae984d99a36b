"""The example plugin, installed as a user would: found, chosen, shown by the doctor, passing the conformance suite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plugin is installed."""
    base = tmp_path_factory.mktemp("plugin")
    source, target = base / "source", base / "site"
    shutil.copytree(ROOT / "examples" / "plugin", source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KDACORE_", "PYTEST_"))}
    path = [str(target), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "KDACORE_CACHE_DIR": str(base / "cache")}


def run(
    environment: dict[str, str], *command: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )


CALL = """
import json, sys
import numpy as np
import kdacore
info = {b.name: b for b in kdacore.backends()}["example"]
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 9, 2, 8), dtype=np.float32) / 3 for _ in range(3))
g, beta = -rng.random((1, 9, 2, 8), dtype=np.float32), rng.random((1, 9, 2), dtype=np.float32)
packed = np.array([0, 4, 9])
with kdacore.record_selections() as ran:
    kdacore.chunk_kda(q, k, v, g, beta)                                  # auto: the lower cost
    with kdacore.use_backend("reference"):
        kdacore.chunk_kda(q, k, v, g, beta)
    with kdacore.use_backend("example"):
        kdacore.chunk_kda(q, k, v, g, beta)
        kdacore.chunk_kda(q, k, v, g, beta, cu_seqlens=packed)           # cannot: another one runs
    kdacore.fused_recurrent_kda(q, k, v, g, beta, backend="example")
try:
    kdacore.chunk_kda(q, k, v, g, beta, cu_seqlens=packed, backend="example")
except kdacore.UnsupportedError as error:
    refused = [r.code for r in error.reasons["example"]]
print(json.dumps({"distribution": info.distribution, "available": info.available, "refused": refused,
                  "ran": [s.backend for s in ran], "frameworks": [m for m in ("torch", "jax") if m in sys.modules]}))
"""


def test_it_is_found_and_chosen(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(installed, "-c", CALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "distribution": "kdacore-example-plugin",
        "available": True,
        "refused": ["option"],
        "ran": ["reference", "reference", "example", "reference", "example"],
        "frameworks": [],
    }


def test_it_passes_the_conformance_suite(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(
        installed,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--kdacore-backend=example", "--kdacore-random=20"),
        *("--pyargs", "kdacore.testing.conformance"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = next(line for line in done.stdout.splitlines() if " served, " in line)
    served, declined, failed = (int(part.split()[0]) for part in counted.split(", "))
    assert served > 50 and declined > 20 and failed == 0
    for code in ("dtype", "gradients", "option"):
        assert f"declined for {code}: " in done.stdout


def test_the_suite_is_not_collected_without_the_option(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(
        installed,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "kdacore.testing.conformance",
        cwd=tmp_path,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


def test_an_unknown_backend_is_a_usage_error(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(
        installed,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--kdacore-backend=nowhere"),
        *("--pyargs", "kdacore.testing.conformance"),
        cwd=tmp_path,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "nowhere" in done.stdout + done.stderr and "reference" in done.stdout + done.stderr


def test_the_doctor_and_the_plugin_list_show_it(installed: dict[str, str], tmp_path: Path) -> None:
    doctor = run(installed, "-m", "kdacore", "doctor", "--json", "--no-selfcheck", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "kdacore-example-plugin" in doctor.stdout
    plugins = run(installed, "-m", "kdacore", "plugins", cwd=tmp_path)
    assert plugins.returncode == 0, plugins.stdout + plugins.stderr
    assert "example" in plugins.stdout and "kdacore-example-plugin" in plugins.stdout


def test_verify_writes_its_record(installed: dict[str, str], tmp_path: Path) -> None:
    script = """
from pathlib import Path
from kdacore.testing.verify import load_records, verify
report = verify("example", random=5, path=Path("records/one.json"), progress=False)
assert report.ok, "\\n".join(report.lines())
assert [r.backend for r in load_records(Path("records"))] == ["example"]
"""
    done = run(installed, "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
