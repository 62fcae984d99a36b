"""What this machine has: every probe is guarded, and those that could crash or hang run in a child process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdacore.version import __version__

CHILD_SECONDS = 120.0
DISTRIBUTIONS = (
    "numpy",
    "pluggy",
    "array-api-compat",
    "rich",
    "ml-dtypes",
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "jax",
    "jaxlib",
    "libtpu",
    "fla-core",
    "flash-kda",
    "nvidia-cudnn-frontend",
    "flash-qla",
    "tilelang",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
)

_DRIVER_FILES = {"cuda": "/proc/driver/nvidia/version", "rocm": "/sys/module/amdgpu/version"}

_TORCH = """
import json, torch
from kdacore.device import torch_device
out = {"cuda": torch.version.cuda or "", "hip": torch.version.hip or "", "devices": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p, d = torch.cuda.get_device_properties(i), torch_device("cuda", i)
        shown = f"{p.name} ({d.arch}, {p.total_memory / 2**30:.0f} GiB)"
        out["devices"].append([d.type, d.arch, p.name, shown])
print("\\n" + json.dumps(out))
"""
_JAX = """
import json, jax
from kdacore.device import jax_device
found = [(d, jax_device(d)) for d in jax.devices()]
print("\\n" + json.dumps({"devices": [[d.type, d.arch, raw.device_kind, raw.device_kind] for raw, d in found]}))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One fact. ``problem`` says what is broken, empty when nothing is."""

    name: str
    value: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device that kernels could run on."""

    kind: str
    """The array library that sees it: ``torch`` or ``jax``."""
    type: str
    arch: str
    name: str
    """The device's name in the array library; cost tables are stored by it."""


@dataclass(frozen=True, slots=True)
class Machine:
    rows: tuple[Row, ...]
    accelerators: tuple[Accelerator, ...]
    frameworks: tuple[str, ...]
    """Array libraries that import here, NumPy first."""


def version_of(distribution: str) -> str:
    """The installed version of a distribution, empty when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what makes it a pre-release or a local build: ``0.11rc1+git`` -> (0, 11)."""
    from packaging.version import Version  # here: `import kdacore` stays light

    return Version(version).release


def driver_version(device_type: str) -> str:
    """What the kernel module behind a type of device says of itself, empty when it says nothing. Starts no process."""
    path = _DRIVER_FILES.get(device_type)
    if path is None:
        return ""
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:  # no such driver, or a container that hides it
        return ""


def versions() -> tuple[Row, ...]:
    """kdacore, its interpreter, every distribution a backend may use, and the peers the bench times."""
    rows = [Row("kdacore", __version__), Row("python", platform.python_version())]
    return (*rows, *(Row(name, version_of(name) or "not installed") for name in DISTRIBUTIONS))


def probe() -> Machine:
    """Look at the whole machine; the children run side by side."""
    with ThreadPoolExecutor(4) as pool:
        torch = pool.submit(_framework, "torch", _TORCH)
        jax = pool.submit(_framework, "jax", _JAX)
        driver, nvcc = pool.submit(_driver), pool.submit(_nvcc)
        torch_row, torch_found = torch.result()
        jax_row, jax_found = jax.result()
        rows = (*_host(), driver.result(), nvcc.result(), torch_row, jax_row)
    devices = _accelerators("torch", torch_found) + _accelerators("jax", jax_found)
    frameworks = ("numpy", *(name for name, found in (("torch", torch_found), ("jax", jax_found)) if found))
    return Machine(rows, devices, frameworks)


def _host() -> tuple[Row, ...]:
    rows = [
        Row("system", f"{platform.system()} {platform.machine()}"),
        Row("cpu", f"{_cpu_model()}, {usable_cores()} cores usable"),
    ]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        rows.append(Row("memory", f"{memory / 2**30:.1f} GiB"))
    return tuple(rows)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The CPU's name for itself with the cores that are usable; the cost tables of CPUs are stored by it."""
    return f"{_cpu_model()}, {usable_cores()} cores"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def child(code: str, seconds: float = CHILD_SECONDS) -> tuple[Any, str]:
    """Run Python code in a child; its last line of output is JSON. Returns the value, or None and what went wrong."""
    try:
        done = start(code, [], seconds)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:g} s"
    except OSError as error:
        return None, f"cannot start a child process: {error}"
    return decode(done.returncode, done.stdout, done.stderr)


def start(code: str, words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child that imports from where this process does."""
    command = [sys.executable, "-c", f"{ENTRY}\n{code}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=child_environment())


ENTRY = "import sys; sys.path[:] = sys.path[sys.path[:1] == ['']:]"
"""First line of a child's code: ``-c`` puts the current folder first on the path, and a ``json.py`` there is none of
ours. Nothing was imported from there yet (``-P`` does the same, from Python 3.11 on)."""


def child_environment(**changed: str) -> dict[str, str]:
    """This process's environment, with which a child imports from where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changed}


def decode(status: int, out: str, err: str) -> tuple[Any, str]:
    """A child's answer, or None and what went wrong."""
    if status < 0:
        return None, f"crashed with signal {-status}"
    last = (out.strip().splitlines() or [""])[-1]
    if status:
        return None, (err.strip().splitlines() or [f"exit status {status}"])[-1]
    try:
        return json.loads(last), ""
    except ValueError:
        return None, f"answered {last[:80]!r}"


def _framework(name: str, code: str) -> tuple[Row, dict[str, Any] | None]:
    """Import a framework in a child and ask it for its devices."""
    if not version_of(name):
        return Row(name, "not installed"), None
    found, problem = child(code)
    if problem:
        return Row(
            name, "installed, does not work", f"{name} {version_of(name)} fails to import: {problem}"
        ), None
    seen = ", ".join(shown for *_, shown in found["devices"])
    if name == "jax":
        return Row(name, f"devices: {seen}"), found
    built = (
        f"CUDA {found['cuda']}" if found["cuda"] else f"HIP {found['hip']}" if found["hip"] else "CPU only"
    )
    return Row(name, f"built for {built}; {seen or 'no GPU'}"), found


def _accelerators(kind: str, found: dict[str, Any] | None) -> tuple[Accelerator, ...]:
    devices = found["devices"] if found else []
    return tuple(Accelerator(kind, type_, arch, name) for type_, arch, name, _ in devices if type_ != "cpu")


def _driver() -> Row:
    """The NVIDIA driver. A tool that is there and fails is a fact worth showing, not a fault of kdacore's."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Row("nvidia driver", "none found (no nvidia-smi)")
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = _output(query)
    return Row("nvidia driver", "; ".join(answer.splitlines()) or "nvidia-smi answers nothing")


def _nvcc() -> Row:
    tool = shutil.which("nvcc")
    if tool is None:
        return Row("cuda compiler", "no nvcc on the path (not needed: kernels build with NVRTC)")
    lines = [line for line in _output([tool, "--version"]).splitlines() if "release" in line]
    return Row("cuda compiler", lines[-1].strip() if lines else "nvcc answers nothing")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return done.stdout.strip() or done.stderr.strip()


def commit() -> str:
    """The commit of the checkout kdacore runs from, ``+`` appended when files differ; empty for an installed one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    head = _git(root, "rev-parse", "HEAD")
    return head + "+" * bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # no git here: the results say so by an empty commit
        return ""
    return done.stdout.strip()
