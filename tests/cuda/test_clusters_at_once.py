"""How many clusters run at once: as the driver says where there is one, else by a formula."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw, request_of

from kdacore.types import ChunkInputs
from kdacore_cuda.choice import cluster_size, preparing_clusters, resident_clusters
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.fused import forward as fused
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.forms.fused.sizes import cut_states_size
from kdacore_cuda.jax import devices as jax_devices
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD
from kdacore_cuda.runtime import device_figures, torch_launch
from kdacore_cuda.runtime import launcher as launch
from kdacore_cuda.runtime.driver import NO_CONTEXT, Driver, DriverError
from kdacore_cuda.runtime.launcher import Launcher

_STUB = """
int refuses, retained, set, asked, grid, threads, shared, attributes; void* kernel;
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { ++retained; *c = (void*)0x100; return 0; }
int cuCtxSetCurrent(void* c) { ++set; if (refuses == 201) refuses = 0; return 0; }
int cuLaunchKernelEx() { return 1; }
int cuLibraryLoadData() { return 1; }
int cuLibraryGetKernel() { return 1; }
int cuKernelSetAttribute(int what, int value, void* k, int d) { return 0; }
int cuOccupancyMaxActiveClusters(int* count, void* k, const unsigned* config) {
  ++asked;
  if (refuses) return refuses;
  kernel = k, grid = config[0], threads = config[3], shared = config[6], attributes = config[12];
  *count = 28;
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "stub.c").write_text(_STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "stub.c", "-o", folder / "libcuda.so.1"], check=True)
    return folder / "libcuda.so.1"


def number(library: Path, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), name)


@pytest.fixture
def asked(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Launchers ask the stub; kernels count as loaded."""
    driver = Driver(str(library))
    for name in ("refuses", "retained", "set", "asked"):
        number(library, name).value = 0
    monkeypatch.setattr(launch, "driver", lambda: driver)
    for cluster in (2, 4):
        monkeypatch.setitem(launch._handles, (kernel(cluster), "sm_90a"), 0x1000 + cluster)
    return library


def kernel(cluster: int) -> Any:
    return chunk_forward_kernel(128, cluster, True, False, "sm_90a")


@pytest.mark.parametrize("cluster", [2, 4])
def test_the_driver_is_asked_about_the_launch_that_is_meant(asked: Path, cluster: int) -> None:
    launcher = Launcher(kernel(cluster), CHUNK_FORWARD, 512, 220 * 1024)
    assert launcher.clusters_at_once(0, "sm_90a") == 28
    found = {name: number(asked, name).value for name in ("grid", "threads", "shared", "attributes")}
    assert found == {"grid": cluster, "threads": 512, "shared": 220 * 1024, "attributes": 1}
    assert number(asked, "kernel").value == 0x1000 + cluster


def test_a_thread_without_a_context(asked: Path) -> None:
    number(asked, "refuses").value = NO_CONTEXT
    assert Launcher(kernel(4), CHUNK_FORWARD, 512, 0).clusters_at_once(0, "sm_90a") == 28
    assert (number(asked, "retained").value, number(asked, "set").value) == (1, 1)


def test_what_the_driver_refuses(asked: Path) -> None:
    number(asked, "refuses").value = 1
    with pytest.raises(DriverError, match="cuOccupancyMaxActiveClusters failed"):
        Launcher(kernel(4), CHUNK_FORWARD, 512, 0).clusters_at_once(0, "sm_90a")


def test_the_driver_is_asked_once_for_a_kernel_and_device(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_launch, "current_device", lambda: 0)
    launchers = [Launcher(kernel(cluster), CHUNK_FORWARD, 512, 0) for cluster in (2, 4)]
    for _ in range(3):
        for launcher in launchers:
            assert torch_launch.clusters_at_once(launcher, "sm_90a", 0) == 28
    assert number(asked, "asked").value == 2


def test_nobody_is_asked_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launcher = Launcher(kernel(4), CHUNK_FORWARD, 512, 0)
    assert torch_launch.clusters_at_once(launcher, "sm_90a", 0) == 0
    assert jax_devices.clusters_at_once(launcher, "sm_90a", 0) == 0


@pytest.mark.parametrize(
    ("said", "most_of_four", "resident"), [(0, 40, 30), (30, 40, 30), (28, 37, 28), (33, 44, 33)]
)
def test_sizes_and_shares_follow_the_driver(said: int, most_of_four: int, resident: int) -> None:
    """0: it does not say. 33: of a device whose parts have a multiple of four multiprocessors each."""

    def at_once(cluster: int) -> int:
        return {2: 66, 4: said}[cluster]

    sizes = {n: cluster_size(128, n, 8192, 132, "sm_90a", at_once) for n in range(1, 100)}
    assert max(n for n, size in sizes.items() if size == 4) == most_of_four
    assert resident_clusters(128, 4, 40, 132, "sm_90a", at_once) == resident
    assert preparing_clusters(24, 1024, 4, True, 132, at_once) == (6 if resident >= 30 else 0)


@pytest.mark.parametrize(("said", "clusters"), [(0, 66), (66, 66), (40, 40), (9, 9)])
def test_plans_follow_the_driver(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, said: int, clusters: int
) -> None:
    """Fewer clusters in a green context or an MPS partition."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda launcher, arch, index: said)
    d = Draw()
    inputs = ChunkInputs(
        **{n: d.normal(1, 200, 70, 128) for n in ("q", "k", "v")},
        beta=d.normal(1, 200, 70),
        **d.gate("random", 1, 200, 70, 128),
    )
    plan = fused.plan_of(request_of("chunk_kda", inputs, **BOUNDED_MODEL))
    assert plan.grid == 2 * clusters
    assert plan.workspace_size == cut_states_size(clusters)


def test_calls_in_segments_load_no_fused_kernel(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    asked: list[str] = []
    monkeypatch.setattr(
        torch_launch, "clusters_at_once", lambda launcher, arch, index: asked.append(arch) or 0
    )
    d = Draw()
    inputs = ChunkInputs(
        **{n: d.normal(1, 200, 4, 128) for n in ("q", "k", "v")},
        beta=d.normal(1, 200, 4),
        **d.gate("random", 1, 200, 4, 128),
    )
    assert chosen(request_of("chunk_kda", inputs, **BOUNDED_MODEL)).form == "segments"
    assert not asked
