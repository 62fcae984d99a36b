# ruff: noqa: E501  code of children, in strings
"""Plugins that hang, end the process, or cannot be read: each is named, and the others are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _install(folder: Path, name: str, code: str, entries: bytes = b"") -> None:
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_bytes(entries or f"[kdacore]\n{name} = {name}\n".encode())


def _run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


_LIST = """
from kdacore.registry import REGISTRY
for p in REGISTRY.plugins():
    if p.problem: print(p.distribution, p.problem)
print(len(REGISTRY.backends()) >= 4)
"""
_ENDLESS = """
from kdacore.hookspecs import hookimpl
@hookimpl
def kdacore_backends():
    while True: yield None
"""


@pytest.mark.parametrize(
    ("code", "entries", "said"),
    [
        ("class Odd(BaseException): pass\nraise Odd('no')", b"", "Odd('no')"),
        ("raise GeneratorExit", b"", "GeneratorExit"),
        (_ENDLESS, b"", "lists more than 1000 backends"),
        ("", b"[kdacore]\n\xff\xfe = bad\n", "entry_points.txt cannot be read"),
    ],
    ids=["base", "generator", "endless", "utf8"],
)
def test_bad_plugins_are_named_and_leave_the_others(
    tmp_path: Path, code: str, entries: bytes, said: str
) -> None:
    _install(tmp_path, "bad_one", code, entries)
    done = _run(tmp_path, _LIST)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "bad_one" in first.replace("-", "_") and said in first and last == "True"


def test_a_plugin_that_hangs_is_named(tmp_path: Path) -> None:
    _install(tmp_path, "slow_one", "import time; time.sleep(1)")
    done = _run(tmp_path, _LIST, KDACORE_PLUGIN_IMPORT_LIMIT="0.1")
    assert "plugin slow_one of slow_one is still being imported after 0.1 s" in done.stderr


def test_doctor_names_a_plugin_that_ends_the_process(tmp_path: Path) -> None:
    for name, code in (("killer", "import os; os.abort()"), ("quitter", "import os; os._exit(0)")):
        _install(tmp_path, name, code)
    _install(tmp_path, "healthy", "import os; os.write(1, b'noise')")
    code = """
import os
from kdacore.cli import doctor
said = []
with doctor._without_deadly_plugins(lambda where, what: said.append((where, what))):
    with doctor._stdout_aside():
        from kdacore.registry import REGISTRY
        found = {p.name: p.disabled for p in REGISTRY.plugins()}
print([w for w, _ in said], found["killer"], found["quitter"], found["healthy"], "KDACORE_DISABLE_PLUGINS" in os.environ)
"""
    done = _run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    want = "['plugin killer (killer)', 'plugin quitter (quitter)'] True True False False"
    assert done.stdout.strip() == want


_FORKS = {
    "exits": "import os, sys\nif not os.fork(): sys.exit(3)\nos.wait()",
    "says why": "import os, sys\nif not os.fork(): sys.exit('child is done')\nos.wait()",
    "raises": "import os\nif not os.fork(): raise ValueError('child is lost')\nos.wait()",
    "goes on": "import os\nif os.fork(): os.wait()",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("way", _FORKS)
def test_a_plugin_that_forks_at_import_runs_the_program_once(tmp_path: Path, way: str) -> None:
    _install(tmp_path, "forker", _FORKS[way])
    done = _run(tmp_path, "import kdacore\nnames = kdacore.backends()\nprint('ran', flush=True)")
    assert done.returncode == 0 and done.stdout == "ran\n"
    said = {"says why": "child is done", "raises": "child is lost"}.get(way, "")
    assert said in done.stderr


_FORKING_CODE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, kdacore
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Outputs
def fork(*given):
    if not os.fork(): {child}
    os.wait()
def forward(request, inputs):
    {forward}
    return Outputs(0 * inputs.v)
class Plugin:
    @hookimpl
    def kdacore_backends(self):
        op = OpImpl(forward, serves=FEATURES, verified_archs=frozenset({{"*"}}), verifiers=({verifier},), {more})
        return [Backend("forker", "1", ("numpy",), {{"chunk_kda": op}}, rank=9)]
REGISTRY.register(Plugin(), "forker")
x = [np.zeros((1, 4, 1, 4), np.float32) for _ in range(4)] + [np.zeros((1, 4, 1), np.float32)]
for _ in range(4):
    try: kdacore.chunk_kda(*x, backend="forker")
    except BaseException as error: print(type(error).__name__, flush=True)
print("ran", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("child", ["sys.exit()", "raise ValueError"])
@pytest.mark.parametrize(
    "place",
    [
        {"forward": "fork()"},
        {"verifier": "fork"},
        {"more": "fast_path=fork"},
        {"more": "fast_path=lambda r, x: lambda a: fork() or (0 * a[2], None, None)"},
    ],
    ids=["forward", "verifier", "offer", "fast path"],
)
def test_a_plugin_that_forks_in_a_call_runs_the_program_once(
    tmp_path: Path, place: dict[str, str], child: str
) -> None:
    parts = {"forward": "", "verifier": "lambda r: None", "more": "", "child": child, **place}
    done = _run(tmp_path, _FORKING_CODE.format(**parts), KDACORE_DISABLE_PLUGINS="all")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_that_the_program_forks_go_on(tmp_path: Path) -> None:
    """Also where a fault of a plugin meets them, and where they were forked while a plugin's code ran."""
    code = _FORKING_CODE.format(forward="raise SystemExit", verifier="lambda r: None", more="", child="pass")
    code += "\nif not os.fork():\n    try: kdacore.chunk_kda(*x, backend='forker')\n    except kdacore.PluginError: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    done = _run(tmp_path, code, KDACORE_DISABLE_PLUGINS="all")
    assert done.stdout.split() == ["PluginError"] * 4 + ["ran", "7"], done.stderr[-2000:]
