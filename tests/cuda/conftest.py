"""Paths and the emulated launch, shared by the CUDA backend's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import emulator
import torch
from guarded_memory import guard

from kdacore_cuda.build import cubin_lookup
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.prepacked_launch import PrepackedLauncher


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that a call gets is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches run in the CPU emulator, with guarded workspaces; the list collects the kernels' names."""
    launched: list[str] = []
    guards = guard(monkeypatch)

    def launch(launcher: Any, grid: int, arch: str, like: Any, values: Any) -> None:
        if isinstance(launcher, PrepackedLauncher):
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
        guards.check(launcher.kernel.name)

    def prepacked_start(launcher: Any, grid: int, arch: str, index: int) -> Any:
        return lambda stream, values: launch(launcher, grid, arch, None, values)

    monkeypatch.setattr(torch_launch, "launch", launch)
    # Sizes of kernels that are not packaged, as after a change of their sources.
    monkeypatch.setattr(cubin_lookup, "compiled_sizes", lambda kernel, arch: emulator.launch_sizes(kernel))

    def sequence_start(sequence: Any, arch: str, index: int) -> Any:
        def start(stream: int, *addresses: int) -> None:
            for i, (planned, launcher) in enumerate(zip(sequence.launches, sequence.launchers, strict=True)):
                launch(launcher.launcher, planned.grid, arch, None, sequence.values(i, addresses))

        return start

    monkeypatch.setattr(torch_launch, "prepacked_start", prepacked_start)
    monkeypatch.setattr(torch_launch, "sequence_start", sequence_start)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda launcher, arch, index: 0)
    monkeypatch.setattr(torch_launch, "memory_rate", lambda index: 3.35e12)  # an H100's
    monkeypatch.setattr(torch_launch, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(torch_launch, "current_device", lambda: -1)  # CPU tensors say they are there
    monkeypatch.setattr(torch_launch, "current_stream", lambda index: 0)
    return launched


@pytest.fixture(params=["native", "python"])
def either_handler(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Calls from JAX through each of the handlers; launches do nothing until told."""
    import jax_fixtures

    yield from jax_fixtures.installed(request.param, monkeypatch, tmp_path_factory)


@pytest.fixture
def from_jax(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Calls from JAX through the native handler, launched in the CPU emulator."""
    import jax_fixtures

    for device in jax_fixtures.installed("native", monkeypatch, tmp_path_factory):
        device.run = device.emulate
        yield device
