"""What each packaged kernel spills, as `kdacore build` wrote it down, against what is allowed and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kdacore_cuda import build, prebuilt, variants
from kdacore_cuda.build import KernelSource


class Allowance(NamedTuple):
    """Bytes of spill stores a thread that kernels like these may have. Every other kernel has none."""

    spills: int
    arch: str
    path: str
    macros: dict[str, int]
    """What the kernels are compiled with, as far as it matters."""
    why: str

    def covers(self, kernel: KernelSource, arch: str) -> bool:
        given = dict(kernel.defines)
        return (arch, kernel.path) == (self.arch, self.path) and all(
            given.get(name) == value for name, value in self.macros.items()
        )


ALLOWED = (
    Allowance(
        180,
        "sm_90a",
        "common/decode.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 1, "MODE": variants.DECODE_PLAIN},
        "four blocks a multiprocessor leave 128 registers; the loop over tokens keeps part of the state in the L1",
    ),
    Allowance(
        40,
        "sm_90a",
        "common/decode.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": variants.DECODE_PLAIN},
        "three blocks of 256 threads leave 80 registers; addresses of the next token",
    ),
    Allowance(
        56,
        "sm_100f",
        "common/decode.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": variants.DECODE_PLAIN},
        "as for sm_90a; compiled only",
    ),
    Allowance(
        8,
        "sm_100f",
        "common/decode.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": variants.DECODE_ANY},
        "two blocks of 256 threads leave 128 registers; compiled only",
    ),
    Allowance(
        572,
        "sm_100f",
        "common/prefill.cu",
        {"K_DIM": 128, "CLUSTER": 1},
        "one block carries all 128 columns of a state, 32 a warp, in 168 registers; compiled only",
    ),
    Allowance(
        40,
        "sm_90a",
        "sm90/backward/grads.cu",
        {"SAFE": 1},
        "16 warps leave 128 registers, 88 of them accumulators and operands while pairs are summed",
    ),
    Allowance(
        88,
        "sm_90a",
        "sm90/backward/grads.cu",
        {"SAFE": 0},
        "as above, with an anchor for each quarter of a chunk",
    ),
)
WIDE = 32
"""An allowance further than this above all that it covers is to be lowered."""


def rows() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())["cubins"]
    return found


def packaged() -> Iterator[tuple[KernelSource, str, dict[str, Any]]]:
    """Every packaged kernel, its architecture, and its row."""
    found = rows()
    for arch in prebuilt.PACKAGED_ARCHS:
        for kernel in variants.packaged_kernels(arch):
            yield kernel, arch, found[f"{kernel.name}.{arch}"]


def allowed(kernel: KernelSource, arch: str) -> int:
    """The allowance of one kernel; no two may cover it."""
    (only,) = [a.spills for a in ALLOWED if a.covers(kernel, arch)] or [0]
    return only


def test_every_kernel_keeps_to_its_allowance() -> None:
    over = {
        f"{kernel.name}.{arch}": (row["spills"], allowed(kernel, arch))
        for kernel, arch, row in packaged()
        if row["spills"] > allowed(kernel, arch)
    }
    assert not over, "spilled, allowed"


@pytest.mark.parametrize("allowance", ALLOWED, ids=lambda a: f"{a.path} {a.arch} {a.macros}")
def test_no_allowance_is_wide(allowance: Allowance) -> None:
    spilled = [row["spills"] for kernel, arch, row in packaged() if allowance.covers(kernel, arch)]
    assert any(spilled), "nothing that it covers spills"
    assert allowance.spills - WIDE <= max(spilled)


def test_every_row_says_registers_and_spills() -> None:
    for kernel, arch, row in packaged():
        assert 0 < row["registers"] <= 255, (kernel.name, arch)
        assert row["spills"] >= 0, (kernel.name, arch)
        assert row["stack"] >= 0, (kernel.name, arch)


@pytest.mark.parametrize("kernel", [variants.decode_kernel(128, False, True, variants.DECODE_PLAIN)])
def test_rows_say_what_the_compiler_says_today(kernel: KernelSource) -> None:
    row = rows()[f"{kernel.name}.sm_90a"]
    if row["nvrtc"] != build.nvrtc_version():
        pytest.skip(f"the cubins were built with NVRTC {row['nvrtc']}")
    usage = build.compile_kernel(kernel, "sm_90a").usage()
    assert {name: row[name] for name in usage._fields} == usage._asdict()
