"""Threads: no bit depends on them, the BLAS gets its number of threads back, and errors are raised."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kdacore.types import Backend
from kdacore_reference import arrays

Make = Callable[..., Any]


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the BLAS had been allowed four."""
    monkeypatch.setattr(arrays.SingleThreadedBlas, "hold", lambda self, blas: nullcontext(4))


def everything(backend: Backend, call: Any, grads: Any) -> list[Any]:
    op = backend.ops[call.request.op]
    out = op.forward(call.request, call.inputs)
    return [out.o, out.final_state, *op.backward(call.request, call.inputs, out.saved, grads)]


@pytest.mark.parametrize("options", [{"B": 2}, {"H": 20}, {"lengths": [700, 0, 1, 130], "H": 12}], ids=str)
def test_threads_do_not_change_a_bit(
    options: dict[str, Any], make_call: Make, backend: Backend, request: pytest.FixtureRequest
) -> None:
    """One unit of many slabs, several units, and sequences of different lengths in one."""
    sizes = {"T": 600, "H": 8, "K": 16, "V": 16, "needs_grad": True, "gate": "softplus"}
    call = make_call(**{**sizes, **options})
    grads = call.grads()
    one = everything(backend, call, grads)
    request.getfixturevalue("four_threads")
    four = everything(backend, call, grads)
    for a, b in zip(one, four, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("part", ["interact", "store", "scatter_sum"])
def test_an_error_in_a_thread_is_raised(
    part: str, make_call: Make, backend: Backend, monkeypatch: Any
) -> None:
    """While a slab is prepared, scanned or finished: the threads that wait for it stop too."""
    from kdacore_reference import chunk_forward

    seen = []

    def broken(*args: Any) -> Any:
        seen.append(threading.current_thread())
        raise FloatingPointError("broken on purpose")

    monkeypatch.setattr(chunk_forward, part, broken)
    call = make_call(T=1000, H=8)
    with pytest.raises(FloatingPointError, match="broken on purpose"):
        backend.ops["chunk_kda"].forward(call.request, call.inputs)
    assert threading.main_thread() not in seen


def test_the_number_of_blas_threads_is_restored() -> None:
    """Also when callers overlap, and when one of them fails."""

    class Blas:
        now = 3

        def set(self, threads: int) -> None:
            self.now = threads

    blas, holder = Blas(), arrays.SingleThreadedBlas()
    control = arrays.Blas(lambda: blas.now, blas.set)
    outer = holder.hold(control)
    assert outer.__enter__() == 3 and blas.now == 1
    with pytest.raises(ZeroDivisionError), holder.hold(control) as threads:
        assert threads == 3
        raise ZeroDivisionError
    assert blas.now == 1
    outer.__exit__(None, None, None)
    assert blas.now == 3


SCRIPT = """
import dataclasses, numpy as np
from kdacore.types import ChunkInputs, Device, Request
from kdacore_reference.chunk_forward import chunk_forward
from kdacore_reference.arrays import bundled_openblas
rng = np.random.default_rng()
T, H, K = 2000, 1, 128
q, k, v = (rng.standard_normal((1, T, H, K)).astype(np.float32) for _ in range(3))
g = -np.abs(rng.standard_normal((1, T, H, K))).astype(np.float32)
x = ChunkInputs(q, k, v, g, rng.random((1, T, H)).astype(np.float32) / K)
r = Request("chunk_kda", "numpy", Device("cpu"), 1, T, H, H, K, K, 1, "float32", "float32")
whole = chunk_forward(r, x).o
for t in (1, 40, 700):
    short = chunk_forward(dataclasses.replace(r, T=t), ChunkInputs(*(a[:, :t] for a in x[:5]))).o
    assert np.array_equal(short, whole[:, :t]), t
wide = ChunkInputs(*(np.concatenate([a, 2 * a], axis=2) for a in x[:3]), np.concatenate([g, g], axis=2),
                   np.concatenate([x.beta, x.beta], axis=2))
both = chunk_forward(dataclasses.replace(r, H=2, HV=2), wide).o
assert np.array_equal(both[:, :, :1], whole)
blas = bundled_openblas()
print("unknown" if blas is None else blas.get_threads())
"""


def test_causality_with_a_blas_of_two_threads() -> None:
    """In a process of its own, as a user without ``OMP_NUM_THREADS`` gets it."""
    env = {"OPENBLAS_NUM_THREADS": "2", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("2", "unknown")
