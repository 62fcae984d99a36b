"""Kernels compile without a GPU and hold what they should; what their keys depend on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from disassembly import disassemble

from kdacore import config
from kdacore.errors import BackendBuildError
from kdacore_cuda.architectures import PACKAGED_ARCHS
from kdacore_cuda.build.compiler import CompiledKernel, arch_problem, compile_kernel, compile_text
from kdacore_cuda.build.kernel_source import EVERY_LANE, nvrtc_options, source_key
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel

KERNELS = {
    "bounded": chunk_forward_kernel(128, 2, True, False).source,
    "unbounded": chunk_forward_kernel(128, 2, False, False).source,
    "few heads": chunk_forward_kernel(128, 4, True, False).source,
    "head dim 64": chunk_forward_kernel(64, 1, True, False).source,
    "recurrent": recurrent_kernel(128, False, "float32", RecurrentMode.ONE_TOKEN).source,
    "recurrent V first": recurrent_kernel(128, True, "float32", RecurrentMode.ONE_TOKEN).source,
    "recurrent head gate": recurrent_kernel(128, True, "float32", RecurrentMode.ONE_TOKEN_HEAD_GATE).source,
}


@pytest.fixture(scope="module")
def built() -> dict[str, CompiledKernel]:
    return {name: compile_kernel(kernel, "sm_90a") for name, kernel in KERNELS.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_warpgroup_products_overlap(built: dict[str, CompiledKernel], name: str) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    assert "serialized" not in built[name].log
    assert "setmaxnreg ignored" not in built[name].log


@pytest.mark.parametrize("name", KERNELS)
def test_entry_is_present(built: dict[str, CompiledKernel], name: str) -> None:
    assert KERNELS[name].entry.encode() + b"\0" in built[name].cubin


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("bounded", "HGMMA"), ("few heads", "HGMMA"), ("head dim 64", "HGMMA"), ("unbounded", "HGMMA")],
)
def test_matrix_instructions(
    built: dict[str, CompiledKernel], tmp_path: Path, name: str, instruction: str
) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(built[name].cubin)
    text = disassemble(path)
    assert instruction in text
    loop = text[text.index(instruction) : text.rindex(instruction)]
    assert "MEMBAR.ALL.GPU" not in loop  # a cluster-scope release inside the chain costs more than the chain


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_100f", "sm_120"])
def test_other_architectures(arch: str) -> None:
    assert compile_kernel(chunk_forward_kernel(128, 1, True, False, arch).source, arch).cubin
    assert compile_kernel(recurrent_kernel(64, True, "bfloat16", RecurrentMode.GENERAL).source, arch).cubin


def test_clusters_compile_for_sm100() -> None:
    assert compile_kernel(chunk_forward_kernel(64, 2, True, True, "sm_100f").source, "sm_100f").cubin


def test_error_carries_the_log() -> None:
    broken = 'extern "C" __global__ void f() { this_is_not_declared(); }'
    with pytest.raises(BackendBuildError, match="this_is_not_declared") as caught:
        compile_text(broken, "broken", ("-arch=sm_90a",), {})
    assert caught.value.what.startswith("broken")


def test_an_empty_log_writes_to_nobody_s_memory() -> None:
    """Python has one object for each byte, which the bindings would write into: b" " was zero in the whole process."""
    done = compile_text("__global__ void f() {}", "f", ("--gpu-architecture=sm_80",), {})
    assert not done.log
    assert [bytes([n])[0] for n in range(256)] == list(range(256))


def test_virtual_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="sm_"):
        nvrtc_options(KERNELS["recurrent"], "compute_90")


def test_key_depends_on_everything() -> None:
    kernel = KERNELS["recurrent"]
    other = dataclasses.replace(kernel, defines=(*kernel.defines, ("EXTRA", 1)))
    keys = {
        source_key(kernel, "sm_90a"),
        source_key(kernel, "sm_100f"),
        source_key(other, "sm_90a"),
    }
    assert len(keys) == 3


@pytest.mark.parametrize("arch", ["bogus", "", "sm_", "compute_90", "sm_90z", "sm_999", "sm_75"])
def test_architectures_that_cannot_be_built(arch: str) -> None:
    assert arch_problem(arch)


@pytest.mark.parametrize("arch", [*PACKAGED_ARCHS, "sm_80", "sm_86", "sm_120"])
def test_architectures_that_can_be_built(arch: str) -> None:
    assert arch_problem(arch) is None


def test_every_lane_may_arrive_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """For racecheck; such a kernel has a key of its own."""
    kernel = KERNELS["bounded"]
    plain = source_key(kernel, "sm_90a")
    monkeypatch.setattr(config, "_config", config.parse({EVERY_LANE: "1"}))
    assert "-DEVERY_LANE=1" in nvrtc_options(kernel, "sm_90a")
    assert source_key(kernel, "sm_90a") != plain
