"""How many clusters run at once: as the driver says where there is one, else by a formula."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw, request_of
from recording_driver import EXECUTORS, Stub
from sized_kernel import SizedKernel

from kdacore.types import ChunkInputs
from kdacore_cuda.choice import Figures, cluster_size, preparing_clusters, resident_clusters
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.fused import launches as fused
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.forms.fused.workspace import cut_states_bytes
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD
from kdacore_cuda.runtime import device_figures, torch_launch
from kdacore_cuda.runtime.driver import DriverError

_OCCUPANCY = """
int refuses, asked, grid, threads, shared, counted; void* kernel;
int cuOccupancyMaxActiveClusters(int* count, void* k, const unsigned* config) {
  ++asked;
  if (nowhere && !current) return 201;
  if (refuses) return refuses;
  kernel = k, grid = config[0], threads = config[3], shared = config[6], counted = config[12];
  *count = 28;
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("occupancy"), {"chunk_forward": CHUNK_FORWARD}, _OCCUPANCY)


@pytest.fixture(params=EXECUTORS)
def stub(request: pytest.FixtureRequest, library: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The driver of device 0, through each executor."""
    library.install(monkeypatch, request.param)
    for name in ("refuses", "asked"):
        library.number(name).value = 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return library


def kernel(cluster: int, shared: int = 0) -> SizedKernel:
    """One of its own: what the driver says is remembered by kernel."""
    source = chunk_forward_kernel(128, cluster, True, False, "sm_90a").source
    return SizedKernel(source, CHUNK_FORWARD, threads=512, shared=shared)


@pytest.mark.parametrize("cluster", [2, 4])
def test_the_driver_is_asked_about_the_launch_that_is_meant(stub: Stub, cluster: int) -> None:
    asked = kernel(cluster, 220 * 1024)
    assert torch_launch.clusters_at_once(asked, "sm_90a", 0) == 28
    found = {name: stub.number(name).value for name in ("grid", "threads", "shared", "counted")}
    assert found == {"grid": cluster, "threads": 512, "shared": 220 * 1024, "counted": 1}
    assert stub.code_loaded == f"{asked.source.name}.sm_90a"
    assert stub.number("kernel").value == 1
    assert stub.limits == {"chunk_forward": 220 * 1024}


def test_a_thread_without_a_context(stub: Stub) -> None:
    stub.number("nowhere").value = 1
    assert torch_launch.clusters_at_once(kernel(4), "sm_90a", 3) == 28
    assert stub.context == 0x100 + 3


def test_what_the_driver_refuses(stub: Stub) -> None:
    stub.number("refuses").value = 1
    with pytest.raises(DriverError, match="cuOccupancyMaxActiveClusters failed"):
        torch_launch.clusters_at_once(kernel(4), "sm_90a", 0)


def test_the_driver_is_asked_once_for_a_kernel_and_device(stub: Stub) -> None:
    kernels = [kernel(cluster) for cluster in (2, 4)]
    for _ in range(3):
        for each in kernels:
            assert torch_launch.clusters_at_once(each, "sm_90a", 0) == 28
    assert stub.number("asked").value == 2
    assert torch_launch.clusters_at_once(kernels[0], "sm_90a", 1) == 28
    assert stub.number("asked").value == 3


def test_nobody_is_asked_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_launch.clusters_at_once(kernel(4), "sm_90a", 0) == 0


def test_nobody_is_asked_for_a_program_of_jax() -> None:
    d = Draw(0)
    tokens = {name: d.normal(1, 4, 1, 64) for name in ("q", "k", "v")}
    inputs = ChunkInputs(**tokens, beta=d.normal(1, 4, 1), **d.gate("random", 1, 4, 1, 64))
    r = dataclasses.replace(request_of("chunk_kda", inputs, **BOUNDED_MODEL), kind="jax")
    assert device_figures.clusters_at_once(r, kernel(4), "sm_90a") == 0


@pytest.mark.parametrize(
    ("said", "most_of_four", "resident"), [(0, 40, 30), (30, 40, 30), (28, 37, 28), (33, 44, 33)]
)
def test_sizes_and_shares_follow_the_driver(said: int, most_of_four: int, resident: int) -> None:
    """0: it does not say. 33: of a device whose parts have a multiple of four multiprocessors each."""

    def at_once(cluster: int) -> int:
        return {2: 66, 4: said}[cluster]

    device = Figures("sm_90a", 132, at_once, lambda: 0.0)
    sizes = {n: cluster_size(n, 8192, device) for n in range(1, 100)}
    assert max(n for n, size in sizes.items() if size == 4) == most_of_four
    assert resident_clusters(40, 4, device) == resident
    assert preparing_clusters(24, 1024, 4, True, device) == (6 if resident >= 30 else 0)


@pytest.mark.parametrize(("said", "clusters"), [(0, 66), (66, 66), (40, 40), (9, 9)])
def test_plans_follow_the_driver(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, said: int, clusters: int
) -> None:
    """Fewer clusters in a green context or an MPS partition."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda kernel, arch, index: said)
    d = Draw()
    inputs = ChunkInputs(
        **{n: d.normal(1, 200, 70, 128) for n in ("q", "k", "v")},
        beta=d.normal(1, 200, 70),
        **d.gate("random", 1, 200, 70, 128),
    )
    made = fused.launches_of(request_of("chunk_kda", inputs, **BOUNDED_MODEL))
    assert made.numbers["blocks"] == 2 * clusters
    assert made.buffers == {"workspace": cut_states_bytes(clusters)}


def test_calls_in_segments_load_no_fused_kernel(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    asked: list[str] = []
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda kernel, arch, index: asked.append(arch) or 0)
    d = Draw()
    inputs = ChunkInputs(
        **{n: d.normal(1, 200, 4, 128) for n in ("q", "k", "v")},
        beta=d.normal(1, 200, 4),
        **d.gate("random", 1, 200, 4, 128),
    )
    assert chosen(request_of("chunk_kda", inputs, **BOUNDED_MODEL)).form == "segments"
    assert not asked
