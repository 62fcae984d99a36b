"""What each packaged kernel spills, as `kdacore build` wrote it down, against what is allowed and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from spill_allowances import ALLOWED, WIDE, Allowance, allowed

from kdacore_cuda.architectures import PACKAGED_ARCHS
from kdacore_cuda.build.compiler import compile_kernel, nvrtc_version
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.packaged_cubins import FOLDER
from kdacore_cuda.build.packaged_files import MANIFEST
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel


def rows() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / MANIFEST).read_text())["cubins"]
    return found


def packaged() -> Iterator[tuple[KernelSource, str, dict[str, Any]]]:
    """Every packaged kernel, its architecture, and its row."""
    found = rows()
    for arch in PACKAGED_ARCHS:
        for kernel in packaged_kernels(arch):
            yield kernel, arch, found[f"{kernel.name}.{arch}"]


def test_every_kernel_keeps_to_its_allowance() -> None:
    over = {
        f"{kernel.name}.{arch}": (row["spills"], allowed(kernel, arch))
        for kernel, arch, row in packaged()
        if row["spills"] > allowed(kernel, arch)
    }
    assert not over, "spilled, allowed"


PACKAGED = [a for a in ALLOWED if a.arch in PACKAGED_ARCHS]


@pytest.mark.parametrize("allowance", PACKAGED, ids=lambda a: f"{a.path} {a.arch} {a.macros}")
def test_no_allowance_is_wide(allowance: Allowance) -> None:
    spilled = [row["spills"] for kernel, arch, row in packaged() if allowance.covers(kernel, arch)]
    assert any(spilled), "nothing that it covers spills"
    assert allowance.spills - WIDE <= max(spilled)


def test_every_row_says_registers_and_spills() -> None:
    for kernel, arch, row in packaged():
        assert 0 < row["registers"] <= 255, (kernel.name, arch)
        assert row["spills"] >= 0, (kernel.name, arch)
        assert row["stack"] >= 0, (kernel.name, arch)


@pytest.mark.parametrize(
    "kernel",
    [recurrent_kernel(128, False, "bfloat16", RecurrentMode.CONTIGUOUS).source],
)
def test_rows_say_what_the_compiler_says_today(kernel: KernelSource) -> None:
    row = rows()[f"{kernel.name}.sm_90a"]
    if row["nvrtc"] != nvrtc_version():
        pytest.skip(f"the cubins were built with NVRTC {row['nvrtc']}")
    usage = compile_kernel(kernel, "sm_90a").usage()
    assert {name: row[name] for name in usage._fields} == usage._asdict()
