"""What a sample on a GPU begins with, in a torch and a driver that only note what is asked of them."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kdacore.bench.clock import CudaClock


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the clock does, in order."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 2.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: None, _sleep=lambda cycles: done.append("sleep"))
    flush = SimpleNamespace(sum=lambda: done.append("flush"))
    torch = SimpleNamespace(
        int64=None, zeros=lambda *size, **how: flush, cuda=cuda, version=SimpleNamespace(hip=None)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)

    def reset() -> int:
        done.append("reset")
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuCtxResetPersistingL2Cache=reset))
    return done


def sample(noted: list[str]) -> list[str]:
    """Of one call, without those that find out how long it takes to queue."""
    clock = CudaClock()
    assert clock(lambda: noted.append("call")) == pytest.approx(2e-3)
    return noted[noted.index("record") - 3 :]


def test_kept_lines_are_given_up_before_the_cache_is_emptied(noted: list[str]) -> None:
    assert sample(noted) == ["reset", "flush", "sleep", "record", "call", "record"]


def test_a_driver_that_refuses_is_named(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: Any = SimpleNamespace(cuCtxResetPersistingL2Cache=lambda: 801)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: refusing)
    with pytest.raises(RuntimeError, match="cuCtxResetPersistingL2Cache failed with CUDA error 801"):
        sample(noted)


def test_no_cuda_driver_is_asked_for_elsewhere(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch"].version, "hip", "6.4")

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert sample(noted)[1:] == ["flush", "sleep", "record", "call", "record"]
