"""Launches fit the shared memory of every architecture, and are what was measured where there is enough."""

from dataclasses import replace
from typing import Any

import pytest

from kdacore.types import Device, Request
from kdacore_triton import configs, stages_aot
from kdacore_triton.chunk_backward_plan import plan_backward
from kdacore_triton.chunk_forward_choice import config_of
from kdacore_triton.chunk_forward_plan import padded_values
from kdacore_triton.gate_families import EXAMPLE_OPTIONS
from kdacore_triton.hardware_limits import has_warp_products, shared_memory

KIB = 1024
SMALL = ("sm_86", "sm_89", "sm_120", "sm_121")
LARGE = ("sm_80", "sm_87", "sm_90", "sm_90a", "sm_100", "sm_103")


def request(arch: str, gate: str = "scalar", K: int = 128, dtype: str = "bfloat16") -> Request:
    call = Request(
        op="chunk_kda", kind="torch", device=Device("rocm" if arch.startswith("gfx") else "cuda", 0, arch), B=1,
        T=4096, H=32, HV=32, K=K, V=K, N=1, dtype=dtype, state_dtype="float32", scale=1.0,
    )  # fmt: skip
    options: dict[str, Any] = EXAMPLE_OPTIONS[gate]
    return replace(call, **options)


def measured(call: Request) -> configs.Config:
    half = call.dtype != "float32"
    gate = "scalar" if call.scalar_gate else "bounded"
    return configs.get(
        "chunk_forward", call.device.arch, gate=gate, K=call.K, V=call.V, half=half, heads=32, T=4096
    )


def test_shared_memory() -> None:
    assert {shared_memory(arch) for arch in SMALL} == {99 * KIB}
    assert [shared_memory(arch) // KIB for arch in LARGE] == [163, 163, 227, 227, 227, 227]
    assert [shared_memory(arch) // KIB for arch in ("gfx942", "gfx90a", "gfx950")] == [64, 64, 160]
    assert shared_memory("sm_999") == shared_memory("") == 99 * KIB


def test_whose_work_a_product_is() -> None:
    assert {arch for arch in (*SMALL, *LARGE, "gfx942") if has_warp_products(arch)} == {
        *SMALL,
        "sm_80",
        "sm_87",
    }


@pytest.mark.parametrize("arch", LARGE)
@pytest.mark.parametrize("gate", ["scalar", "bounded"])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_enough_shared_memory_leaves_a_configuration_as_measured(K: int, gate: str, arch: str) -> None:
    call = request(arch, gate, K)
    assert config_of(call, False) == measured(call)


@pytest.mark.parametrize(("arch", "stages"), [*((arch, 3) for arch in SMALL), ("gfx942", 2), ("gfx950", 4)])
def test_little_shared_memory_takes_stages_of_the_scan(arch: str, stages: int) -> None:
    call = request(arch)
    assert config_of(call, False) == {**measured(call), "scan_stages": stages}


@pytest.mark.parametrize(("arch", "block"), [("sm_80", 16), ("sm_86", 16), ("sm_90", 64), ("gfx942", 64)])
def test_wide_float32_scans_where_products_are_a_warps(arch: str, block: int) -> None:
    assert config_of(request(arch, "bounded", 256, "float32"), False)["scan_BV"] == block
    assert config_of(request(arch, "bounded", 128, "float32"), False)["scan_BV"] == 64


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 2), ("sm_90", 2), ("sm_86", 1)])
def test_the_backwards_wide_scan(arch: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks of 64 rows alone, and of more than 128 channels."""
    monkeypatch.setattr("kdacore_triton.kernel_options.INTERPRETING", False)
    assert plan_backward(request(arch, "bounded", 256)).tiles.scan_stages == stages
    assert plan_backward(request(arch, "bounded", 128)).tiles.scan_stages == 2
    assert plan_backward(request(arch, "scalar", 256)).tiles.scan_stages == 2
    plan_backward.cache_clear()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_the_backwards_registers(arch: str) -> None:
    """V of 129 to 192 takes the forms with fewer registers; the kernels of other head dims stay what was measured."""
    for gate in ("scalar", "bounded"):
        for V in (64, 128, 129, 192, 193, 256):
            plan = plan_backward(replace(request(arch, gate), V=V))
            few = 128 < V <= 192
            assert plan.diagonal_axis == (0 if few else 1)
            assert plan.states_by_rows == (few and arch != "sm_90")


@pytest.mark.parametrize(("arch", "warps"), [("sm_80", 4), ("sm_86", 8), ("sm_90", 4), ("gfx942", 4)])
def test_warps_of_a_stages_states(arch: str, warps: int) -> None:
    found = [case for case in stages_aot.aot_cases(arch) if case.name == "state K128 bfloat16:state_kernel"]
    assert [case.call.num_warps for case in found] == [warps]


@pytest.mark.parametrize(
    ("V", "padded"), [(16, 16), (20, 32), (64, 64), (65, 128), (128, 128), (192, 192), (193, 256), (300, 320)]
)
def test_values_are_padded_to_blocks(V: int, padded: int) -> None:
    assert padded_values(V) == padded
