"""Every kernel compiles for every architecture it is for, and multiplies on the matrix unit it should."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from disassembly import disassemble
from launch_order import waits_before_it_writes, waits_first, waits_last
from spill_allowances import allowed

from kdacore_cuda.architectures import HEAD_DIMS, HOPPER, PACKAGED_ARCHS
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import CSRC, KernelSource
from kdacore_cuda.build.packaged_cubins import CUBINS, FOLDER, row_name
from kdacore_cuda.choice import cluster_sizes
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.stages.kernels import intra_kernel, recompute_kernel

PORTABLE = ("sm_80", "sm_120")
"""Compiled where they are needed: nothing is packaged for them."""
WARP, WARPGROUP = "HMMA", "HGMMA"
EXHAUSTIVE = pytest.mark.exhaustive


def products(kernel: KernelSource) -> set[str]:
    """The matrix instructions a kernel has to have: none, a warp's, a warpgroup's, or both."""
    folder, _, name = kernel.path.rpartition("/")
    if folder in ("common/recurrent", "common/decode") or name in (
        "sums.cu",
        "gate_sums.cu",
        "groups.cu",
        "checkpoint_tail.cu",
    ):
        return set()
    if folder.startswith("common/"):
        return {WARP, WARPGROUP} if dict(kernel.defines).get("WARPGROUP") else {WARP}
    if name == "prepare.cu":  # that of segments, and the backward's
        return {WARP, WARPGROUP} if folder.endswith("segments") else {WARP}
    if name == "prepare_marked.cu":
        return {WARP, WARPGROUP} if dict(kernel.defines)["BOUNDED"] else {WARP}
    # Hopper's own. The triangles of a chunk, 16 or 32 rows high, are a warp's work; scans of prepared chunks have none.
    alone = {
        WARP: (
            *("prepare_units.cu", "chain.cu", "segment_chain.cu", "recompute_hopper.cu"),
            *("transition.cu", "slice_starts.cu", "slice_gradient.cu", "slice_chain.cu"),
        ),
        WARPGROUP: (
            *("scan.cu", "scan_outputs.cu", "maps.cu", "segment_maps.cu", "output.cu", "walk.cu"),
            *("walk_records.cu", "walk_records_beside.cu", "walk_records_keeping.cu", "walk_backward.cu"),
            *("walk_first_segments.cu", "walk_to_checkpoints.cu"),
            *("walk_later_segments.cu", "walk_outer_segments.cu", "walk_inner_segments.cu"),
        ),
    }
    return next(({unit} for unit, names in alone.items() if name in names), {WARP, WARPGROUP})


def found(code: str) -> set[str]:
    return set(re.findall(rf"\b({WARP}|{WARPGROUP})\b", code))


def packaged() -> Iterator[tuple[KernelSource, str]]:
    for arch in PACKAGED_ARCHS:
        for kernel in packaged_kernels(arch):
            yield kernel, arch


def test_every_packaged_cubin_has_its_entry() -> None:
    rows = CUBINS.rows()
    for kernel, arch in packaged():
        cubin = (FOLDER / rows[row_name(kernel, arch)]["file"]).read_bytes()
        assert b"\0" + kernel.entry.encode() + b"\0" in cubin, kernel.name


def test_every_source_is_packaged_for_hopper() -> None:
    """A kernel that nothing packages would be compiled by no test here."""
    sources = {str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cu")}
    assert {kernel.path for kernel, arch in packaged() if arch == HOPPER} == sources


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("kernel", "arch"),
    [pytest.param(k, a, id=f"{k.name}.{a}") for k, a in packaged()],
)
def test_packaged_kernels_use_the_matrix_unit_and_wait_for_their_inputs(
    kernel: KernelSource, arch: str
) -> None:
    row = CUBINS.rows()[row_name(kernel, arch)]
    code = disassemble(FOLDER / row["file"])
    assert found(code) == products(kernel)
    # Walks beside another launch begin after every block of that one has waited, and wait for its end.
    # Output loads at once what was there before the launch ahead of it let it begin, maps the call's values.
    orders = {
        **dict.fromkeys(("walk", "walk_records_beside"), waits_last),
        **dict.fromkeys(
            ("output", "maps", "walk_later_segments", "walk_inner_segments"), waits_before_it_writes
        ),
    }
    order = orders.get(kernel.entry, waits_first)
    assert order(code)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        pytest.param(k, a, id=f"{k.name}.{a}")
        for k, a in packaged()
        if k.path == "sm90/chunk_forward/chunk_forward.cu"
    ],
)
def test_pairs_of_warps_meet_in_one_place(kernel: KernelSource, arch: str) -> None:
    """compute-sanitizer reports a named barrier that its two warps reach in two places, as where one of them had a way
    of its own for halves without tokens. A pair of slice warps meets twice for a bias, and twice in a step; a pair of
    solvers twice. Short sequences store the first bias ahead of their loop. With helpers for clusters of two there are
    such pairs of either kind of blocks, and those of a helper meet for a bias once ahead of their loop and in it."""
    code = disassemble(FOLDER / CUBINS.rows()[row_name(kernel, arch)]["file"])
    found = len(re.findall(r"\bBAR\.SYNC\S* \w+, 0x40\b", code))
    macros = dict(kernel.defines)
    helped = 6 if macros["CLUSTER"] == 2 and macros.get("HELPERS") else 0
    assert found == (8 if macros["MANY_SHORT"] else 6) + helped


WAITS = {"output.cu": 5, "maps.cu": 3, "walk_later_segments.cu": 4, "walk_inner_segments.cu": 2}
"""Of a kernel whose roles wait each for themselves. Output: all threads where no launch chains segments; blocks without
a segment; warps with the state; producers, before they load maps, and behind records, which were there before the
launch ahead let this one begin. Maps: blocks without a segment; warps with the state; producers, behind values.
Later and inner segments: blocks without one; warps with the state; producers read what was there before. Later ones of
a slice also: all threads where no launch chains segments; producers, before they clear rows."""


def test_every_kernel_waits_for_its_inputs() -> None:
    """The sources; what the compiler makes of them is looked at above."""
    for path in CSRC.rglob("*.cu"):
        assert path.read_text().count("wait_for_inputs();") == WAITS.get(path.name, 1), path.name


def check_portable(kernel: KernelSource, arch: str, folder: Path) -> None:
    built = compile_kernel(kernel, arch)
    assert b"\0" + kernel.entry.encode() + b"\0" in built.cubin
    assert built.usage().spills <= allowed(kernel, arch)
    path = folder / "kernel.cubin"
    path.write_bytes(built.cubin)
    assert found(disassemble(path)) == products(kernel)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("arch", PORTABLE)
@pytest.mark.parametrize(
    "kernel",
    [
        intra_kernel(128, False).source,
        recompute_kernel(64, 64, False).source,
        chunk_forward_kernel(64, 1, False, False, PORTABLE[0]).source,
    ],
    ids=lambda kernel: kernel.name[:24],
)
def test_portable_kernels(kernel: KernelSource, arch: str, tmp_path: Path) -> None:
    check_portable(kernel, arch, tmp_path)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("kernel", "arch"),
    [pytest.param(k, a, id=f"{k.name}.{a}") for a in PORTABLE for k in packaged_kernels(a)],
)
def test_every_portable_kernel(kernel: KernelSource, arch: str, tmp_path: Path) -> None:
    check_portable(kernel, arch, tmp_path)


FLOAT_GATE = [
    pytest.param(
        chunk_forward_kernel(K, cluster, bounded, True, arch).source,
        arch,
        id=f"K{K} x{cluster} bounded{bounded:d} {arch}",
    )
    for arch in (*PORTABLE, "sm_100f")
    for K, bounded in itertools.product(HEAD_DIMS, (False, True))
    for cluster in cluster_sizes(K, arch)
]


@EXHAUSTIVE
@pytest.mark.parametrize(("kernel", "arch"), FLOAT_GATE)
def test_chunk_forward_with_a_float32_gate_elsewhere(kernel: KernelSource, arch: str) -> None:
    """Not packaged there: compiled at the first call."""
    assert b"\0chunk_forward\0" in compile_kernel(kernel, arch).cubin


@EXHAUSTIVE
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f", *PORTABLE])
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64)])
@pytest.mark.parametrize("float16", [False, True])
def test_stages_whose_head_dims_differ(K: int, V: int, float16: bool, arch: str) -> None:
    assert compile_kernel(recompute_kernel(K, V, float16).source, arch).cubin
