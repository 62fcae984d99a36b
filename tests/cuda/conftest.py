"""Paths and the emulated launch, shared by the CUDA backend's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import emulator
import torch
from guarded_memory import guard
from program_launches import launches_of

from kdacore_cuda.build import launch_sizes
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.packaged_cubins import find_packaged
from kdacore_cuda.fitted_head_dims import fitted_request
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_cuda.runtime.program import Program


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


@cache
def emulated_sizes(kernel: KernelSource, arch: str) -> launch_sizes.LaunchSizes:
    """Those of the packaged kernel. Of one that is not packaged, as after a change of its sources, or for no
    architecture, what the CPU's compiler sees."""
    cubin = find_packaged(kernel, arch, source_key(kernel, arch)) if arch else None
    return (
        emulator.launch_sizes(kernel)
        if cubin is None
        else launch_sizes.read_launch_sizes(cubin, kernel.entry)
    )


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches run in the CPU emulator, with guarded workspaces; the list collects the kernels' names."""
    launched: list[str] = []
    guards = guard(monkeypatch)

    def start_of(program: Program, arch: str, index: int) -> Any:
        def start(stream: int, values: bytes) -> None:
            for step, grid, packed in launches_of(program, values):
                kernel, (threads, shared) = step.kernel.source, step.kernel.block(arch)
                launched.append(kernel.name)
                emulator.run(
                    *(kernel, step.kernel.params, step.kernel.params.packer.unpack(packed)),
                    grid=grid,
                    threads=threads,
                    shared=shared,
                    cluster=dict(kernel.defines).get("CLUSTER", 1),
                )
                guards.check(kernel.name)

        return start

    monkeypatch.setattr(launch_sizes, "launch_sizes", emulated_sizes)
    fitted_request.cache_clear()  # plans go by request, and hold what made their launches
    monkeypatch.setattr(executor, "start_of", start_of)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda kernel, arch, index: 0)
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
