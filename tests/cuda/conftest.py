"""Paths and the emulated launch, shared by the CUDA backend's tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import emulator
import torch

from kdacore_cuda import runtime
from kdacore_cuda.fixed import FixedLauncher


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches run in the CPU emulator; the list collects the kernels' names."""
    launched: list[str] = []

    def launch(launcher: Any, grid: int, arch: str, like: Any, values: Any) -> None:
        if isinstance(launcher, FixedLauncher):
            values, launcher = launcher.all_values(values), launcher.launcher
        launched.append(launcher.kernel.name)
        emulator.run(
            launcher.kernel,
            launcher.params,
            values,
            grid=grid,
            threads=launcher.threads,
            shared=launcher.shared,
            cluster=dict(launcher.kernel.defines).get("CLUSTER", 1),
        )

    def starter(launcher: Any, grid: int, arch: str, index: int) -> Any:
        return lambda stream, values: launch(launcher, grid, arch, None, values)

    monkeypatch.setattr(runtime, "launch", launch)
    monkeypatch.setattr(runtime, "starter", starter)
    monkeypatch.setattr(runtime, "processors", lambda index: 132)
    monkeypatch.setattr(runtime, "current_device", lambda: -1)  # CPU tensors say they are there
    monkeypatch.setattr(runtime, "current_stream", lambda index: 0)
    return launched
