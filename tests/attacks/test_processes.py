# ruff: noqa: E501  code of children, in strings
"""Attacks that end or hang a process: each runs in a child, with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120

_CALL = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import numpy as np, kdacore
def arrays(make):
    q, k, v, g = (make((2, 16, 1, 8)) for _ in range(4))
    return [q, k, v, g, make((2, 16, 1))]
"""

_NESTED = """
import torch
x = arrays(torch.zeros)
bad = {nested!r}
x[0] = torch.ones_like(x[0])
for _ in range(3):
    kdacore.chunk_kda(*x, backend="reference")
for i in range(5):
    y = list(x)
    y[i] = torch.nested.nested_tensor([*x[i]]) if bad == "nested" else 3 if bad == "int" else object()
    try:
        kdacore.chunk_kda(*y, backend="reference")
    except kdacore.ContractError as error:
        print(error.argument)
"""

_THREADS = """
import torch
x = [t.requires_grad_() for t in arrays(torch.rand)]
barrier, errors = threading.Barrier(16), []
def work():
    barrier.wait()
    try:
        kdacore.chunk_kda(x[0], x[1], x[2], -x[3], x[4], backend="reference")
    except BaseException as error:
        errors.append(repr(error))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(16)]
[t.start() for t in threads]
[t.join() for t in threads]
print(errors)
"""

_FORK = """
import os, signal
from kdacore import config
from kdacore.dispatch import plan, selection
from kdacore.registry import REGISTRY
from kdacore_reference.arrays import single_threaded_blas
x = arrays(np.ones)
kdacore.chunk_kda(*x)
held, done = threading.Event(), threading.Event()
def hold():
    with {lock}:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    config.refresh()
    kdacore.chunk_kda(*arrays(lambda shape: np.ones((shape[0], 128, *shape[2:]))))
    os._exit(0)
print(os.waitpid(child, 0)[1])
done.set()
"""


def answer(code: str, cwd: Path | None = None, **environment: str) -> str:
    """What Python code prints in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-c", _CALL + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env, cwd=cwd)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.first_cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("bad", ["nested", "int", "object"])
def test_what_is_no_tensor_after_calls_that_are_cached(bad: str) -> None:
    """torch's check of cached calls ends the process at a nested tensor."""
    pytest.importorskip("torch")
    assert answer(_NESTED.format(nested=bad)).split() == ["q", "k", "v", "g", "beta"]


@pytest.mark.slow
def test_first_gradient_calls_of_many_threads() -> None:
    pytest.importorskip("torch")
    assert answer(_THREADS).strip() == "[]"


def test_an_adapter_is_published_when_its_module_is_complete() -> None:
    """The race of the test above, made certain: no class of the module is made after the adapter's types are known."""
    pytest.importorskip("torch")
    code = """
import builtins, kdacore.arrays as arrays
build, seen = builtins.__build_class__, []
def spy(function, name, *bases, **words):
    if function.__module__ == "kdacore.arrays.torch.eager":
        seen.append((name, len(arrays.ADAPTERS)))
    return build(function, name, *bases, **words)
builtins.__build_class__ = spy
import kdacore.arrays.torch.eager
assert seen and len(arrays.ADAPTERS) == 2, seen
print({count for _, count in seen})
"""
    assert answer(code).strip() == "{0}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "lock",
    ["selection._lock", "plan._lock", "config._lock", "REGISTRY._lock", "single_threaded_blas.lock"],
)
def test_a_fork_while_another_thread_holds_a_lock(lock: str) -> None:
    assert answer(_FORK.format(lock=lock)).strip() == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_computes_leaves_the_child_its_threads() -> None:
    code = """
import os
from kdacore_reference.arrays import bundled_openblas, single_threaded_blas
blas = bundled_openblas()
if blas is None or blas.get_threads() < 2:
    print("skip")
    raise SystemExit
before = blas.get_threads()
inside, done = threading.Event(), threading.Event()
def hold():
    with single_threaded_blas.hold(blas):
        inside.set()
        done.wait()
threading.Thread(target=hold).start()
inside.wait()
child = os.fork()
if child == 0:
    os._exit(0 if blas.get_threads() == before and single_threaded_blas.inside == 0 else 1)
print(os.waitpid(child, 0)[1])
done.set()
"""
    said = answer(code).strip()
    if said == "skip":
        pytest.skip("this NumPy's BLAS has one thread")
    assert said == "0"


@pytest.mark.parametrize("what", ["machine", "imports"])
def test_children_do_not_import_from_the_current_folder(what: str, tmp_path: Path) -> None:
    for module in ("json", "numpy", "time", "dataclasses", "kdacore"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('executed')")
    codes = {
        "machine": "from kdacore import machine; os.chdir(here); print(machine.child('import json; print(json.dumps(1))'))",
        "imports": "import tempfile; from kdacore.bench import imports; os.chdir(here); print(imports._once(tempfile.mkdtemp()) > 0)",
    }
    code = f"import os; here = {str(tmp_path)!r}\n{codes[what]}"
    assert answer(code).strip() in ("(1, '')", "True")


@pytest.mark.slow
def test_plugins_come_and_go_while_others_call() -> None:
    """Selection goes through the backends while another thread changes which there are."""
    code = """
import time
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl
class Plugin:
    @hookimpl
    def kdacore_backends(self):
        return [Backend(name=f"extra{i}", version="0", kinds=("jax",), ops={"chunk_kda": OpImpl(print)}) for i in range(8)]
going = iter(REGISTRY.backends())
next(going)
REGISTRY.register(Plugin(), "extra")
print(len([*going]))
stop, errors = time.monotonic() + 2, []
def churn():
    while time.monotonic() < stop:
        REGISTRY.unregister("extra"); REGISTRY.register(Plugin(), "extra")
def work():
    while time.monotonic() < stop:
        try:
            [name for name in REGISTRY.backends() if (lambda: name)()]
            kdacore.backends()
        except Exception as error:
            errors.append(repr(error))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=f) for f in (churn, work, work)]
[t.start() for t in threads]
[t.join() for t in threads]
print(errors[:2])
"""
    first, last = answer(code).splitlines()[-2:]
    assert int(first) >= 3 and last == "[]"
