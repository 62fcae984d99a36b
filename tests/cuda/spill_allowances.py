"""What kernels may spill, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.choice import RecurrentMode


class Allowance(NamedTuple):
    """Bytes of spill stores a thread that kernels like these may have. Every other kernel has none."""

    spills: int
    arch: str
    path: str
    macros: Mapping[str, int | None]
    """What the kernels are compiled with, as far as it matters; None: without."""
    why: str

    def covers(self, kernel: KernelSource, arch: str) -> bool:
        given = dict(kernel.defines)
        return (arch, kernel.path) == (self.arch, self.path) and all(
            given.get(name) == value for name, value in self.macros.items()
        )


_OF_ANY_CALL = (
    "two blocks of 256 threads leave 128 registers, 64 of them for the state, with what a sequence of several tokens "
    "needs between two of them, of any dtypes and strides; not timed"
)
_MARKS = "where the next checkpoint lies, beside all that walks hold; what is needed once a chunk"

ALLOWED = (
    Allowance(
        116,
        "sm_90a",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 1, "MODE": RecurrentMode.CONTIGUOUS},
        "four blocks a multiprocessor leave 128 registers; the loop over tokens keeps part of the state in the L1",
    ),
    Allowance(
        4,
        "sm_90a",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 64, "V_FIRST": 0, "STATE_BF16": 0, "MODE": RecurrentMode.ONE_TOKEN_HEAD_GATE},
        "six blocks of 128 threads leave 80 registers",
    ),
    Allowance(
        16,
        "sm_90a",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": RecurrentMode.GENERAL, "RECORDS": 1},
        "two blocks of 256 threads leave 128 registers",
    ),
    *(
        Allowance(
            12,
            arch,
            "common/recurrent/recurrent.cu",
            {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": RecurrentMode.CONTIGUOUS, "RECORDS": 1},
            "three blocks of 128 threads leave 168 registers",
        )
        for arch in ("sm_90a", "sm_120")
    ),
    Allowance(
        32,
        "sm_100f",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": RecurrentMode.GENERAL},
        "two blocks of 256 threads leave 128 registers; compiled only",
    ),
    Allowance(
        528,
        "sm_100f",
        "common/chunk_forward/chunk_forward.cu",
        {"K_DIM": 128, "CLUSTER": 1},
        "one block carries all 128 columns of a state, 32 a warp, in 168 registers; compiled only",
    ),
    Allowance(
        12,
        "sm_90a",
        "sm90/gated_delta/chunk_records_beside.cu",
        {},
        "two units of 256 threads leave 128 registers; what is needed once a unit",
    ),
    *(
        Allowance(spills, "sm_90a", f"sm90/gated_delta/{name}.cu", {"MARKS": 1} | macros, _MARKS)
        for name, macros, spills in (
            ("walk_records", {"WARPGROUPS": 1}, 8),
            ("walk_records_beside", {}, 8),
            ("walk_first_segments", {}, 16),
            ("walk_later_segments", {}, 8),
        )
    ),
    Allowance(
        56,
        "sm_90a",
        "sm90/chunk_backward/grads.cu",
        {"BOUNDED": 1, "NARROW": None},
        "16 warps leave 128 registers, 104 of them accumulators and operands while pairs are summed",
    ),
    Allowance(
        180,
        "sm_90a",
        "sm90/chunk_backward/grads.cu",
        {"BOUNDED": 1, "NARROW": 1},
        "the same, beside sums that go on from one block of values to the next",
    ),
    Allowance(
        120,
        "sm_90a",
        "sm90/chunk_backward/grads.cu",
        {"BOUNDED": 0},
        "as above, with an anchor for each quarter of a chunk, and decays kept in shared memory",
    ),
    Allowance(
        12,
        "sm_90a",
        "sm90/chunk_forward/dataflow/walk.cu",
        {},
        "232 registers hold the state, its bfloat16 copy, two sums, u and decays; three words, while products run",
    ),
    Allowance(
        4,
        "sm_90a",
        "sm90/chunk_forward/chunk_forward.cu",
        {"CLUSTER": 2, "BOUNDED": 1, "G_FLOAT": 1, "MANY_SHORT": 0, "NARROW": None},
        "the warps that prepare slices hold a float32 g in twice the registers; not timed",
    ),
    *(
        Allowance(
            8,
            arch,
            "common/chunk_forward/chunk_forward.cu",
            {"K_DIM": 64, "BOUNDED": 0},
            "twelve warps leave 168 registers; steps of the usual and the rare gates; not timed",
        )
        for arch in ("sm_90a", "sm_100f")
    ),
    Allowance(
        192,
        "sm_80",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 1, "MODE": RecurrentMode.CONTIGUOUS},
        "as for sm_90a; compiled only",
    ),
    Allowance(
        64,
        "sm_120",
        "common/recurrent/recurrent.cu",
        {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": RecurrentMode.GENERAL},
        "as for sm_100f; compiled only",
    ),
    *(
        Allowance(
            8,
            "sm_120",
            "common/recurrent/recurrent.cu",
            {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": 0, "MODE": mode},
            "three blocks of 256 threads leave 80 registers; rows of the pools; compiled only",
        )
        for mode in (RecurrentMode.ONE_TOKEN, RecurrentMode.ONE_TOKEN_HEAD_GATE)
    ),
    Allowance(
        52,
        "sm_80",
        "common/stages/intra.cu",
        {"HALF_F16": 0},
        "four blocks of 128 threads leave 128 registers; without the later architectures' bfloat16 conversions; "
        "compiled only",
    ),
    Allowance(
        80,
        "sm_90a",
        "sm90/gated_delta/unit_grads.cu",
        {"NARROW": None, "HALF_F16": None, "SIZE": None},
        "two warpgroups of 216 registers leave 72 for the warps that load and finish gates",
    ),
    Allowance(
        84,
        "sm_90a",
        "sm90/gated_delta/unit_grads.cu",
        {"HALF_F16": 1},
        "as above",
    ),
    Allowance(
        112,
        "sm_90a",
        "sm90/gated_delta/unit_grads.cu",
        {"NARROW": 1},
        "as above, with the head dims of the call",
    ),
    Allowance(
        8,
        "sm_120",
        "common/stages/intra.cu",
        {"K_DIM": 64},
        "four blocks of 128 threads leave 128 registers; compiled only",
    ),
    Allowance(
        16,
        "sm_120",
        "common/stages/recompute.cu",
        {"K_DIM": 128},
        "three blocks of 128 threads leave 168 registers; compiled only",
    ),
    *(
        Allowance(
            spills,
            arch,
            "common/decode/decode.cu",
            {
                "K_DIM": K,
                "V_FIRST": v_first,
                "STATE_BF16": dtype == "bf16",
                "STATE_F16": 1 if dtype == "f16" else None,
                "RECORDS": None,
                "MODE": RecurrentMode.GENERAL,
            },
            _OF_ANY_CALL if arch == "sm_90a" else _OF_ANY_CALL + "; compiled only",
        )
        for arch, K, v_first, by_dtype in (
            ("sm_80", 64, 0, {"f32": 12, "f16": 8}),
            ("sm_80", 128, 0, {"f32": 164, "bf16": 288, "f16": 176}),
            ("sm_80", 128, 1, {"f32": 124, "bf16": 60, "f16": 76}),
            ("sm_90a", 64, 0, {"f16": 36}),
            ("sm_90a", 128, 0, {"f32": 72, "bf16": 424, "f16": 236}),
            ("sm_90a", 128, 1, {"f32": 192, "bf16": 112, "f16": 88}),
            ("sm_100f", 64, 0, {"f32": 36, "bf16": 24, "f16": 24}),
            ("sm_100f", 128, 0, {"f32": 188, "bf16": 264, "f16": 264}),
            ("sm_100f", 128, 1, {"f32": 120, "bf16": 156, "f16": 156}),
            ("sm_120", 64, 0, {"f32": 64, "bf16": 12, "f16": 12}),
            ("sm_120", 128, 0, {"f32": 220, "bf16": 268, "f16": 268}),
            ("sm_120", 128, 1, {"f32": 120, "bf16": 180, "f16": 180}),
        )
        for dtype, spills in by_dtype.items()
    ),
    *(
        Allowance(
            spills,
            arch,
            "common/decode/decode.cu",
            {"K_DIM": 128, "V_FIRST": 0, "STATE_BF16": dtype == "bf16", "STATE_F16": f16, "MODE": mode},
            "two blocks of 256 threads leave 128 registers, 64 of them for the state; compiled only",
        )
        for arch, dtype, f16, spills in (
            ("sm_80", "f32", None, 16),
            ("sm_120", "bf16", None, 8),
            ("sm_120", "f16", 1, 8),
        )
        for mode in (RecurrentMode.ONE_TOKEN, RecurrentMode.ONE_TOKEN_HEAD_GATE)
    ),
    *(
        Allowance(
            spills,
            arch,
            "common/decode/decode.cu",
            {"V_FIRST": v_first, "STATE_BF16": dtype == "bf16", "RECORDS": 1},
            _OF_ANY_CALL + "; and where the records of its sequence are",
        )
        for arch, v_first, by_dtype in (
            ("sm_80", 0, {"f32": 296, "bf16": 564}),
            ("sm_80", 1, {"f32": 308, "bf16": 276}),
            ("sm_90a", 0, {"f32": 120, "bf16": 372}),
            ("sm_90a", 1, {"f32": 248, "bf16": 340}),
            ("sm_100f", 0, {"f32": 264, "bf16": 396}),
            ("sm_100f", 1, {"f32": 260, "bf16": 416}),
            ("sm_120", 0, {"f32": 276, "bf16": 492}),
            ("sm_120", 1, {"f32": 272, "bf16": 548}),
        )
        for dtype, spills in by_dtype.items()
    ),
    *(
        Allowance(
            spills,
            arch,
            "common/decode/decode_tokens.cu",
            {"COLUMNS": columns, "V_FIRST": v_first, "STATE_BF16": dtype == "bf16"},
            "three blocks of 128 threads leave 168 registers, 128 of them for the state of a whole head; most of it is "
            "for sequences of more than four tokens or records; not timed",
        )
        for arch, columns, v_first, by_dtype in (
            ("sm_90a", 128, 0, {"f32": 4, "bf16": 68}),
            ("sm_90a", 128, 1, {"bf16": 48}),
            ("sm_100f", 128, 0, {"bf16": 36}),
            ("sm_100f", 128, 1, {"bf16": 52}),
        )
        for dtype, spills in by_dtype.items()
    ),
    Allowance(
        8,
        "sm_90a",
        "common/decode/decode_head.cu",
        {"V_FIRST": 1, "MIN_BLOCKS": 5, "MODE": RecurrentMode.ONE_TOKEN_HEAD_GATE},
        "five blocks of 128 threads leave 102 registers",
    ),
    Allowance(
        12,
        "sm_100f",
        "common/decode/decode_head.cu",
        {"MIN_BLOCKS": 4},
        "four blocks of 128 threads leave 128 registers; compiled only",
    ),
    Allowance(
        20,
        "sm_90a",
        "sm90/chunk_forward/chunk_forward.cu",
        {"CLUSTER": 2, "NARROW": 1},
        "the head dims of the call, beside 120 registers of the warps that prepare slices",
    ),
    Allowance(
        20,
        "sm_90a",
        "sm90/chunk_backward/scan_outputs.cu",
        {"WARPGROUPS": 2, "NARROW": 1},
        "the head dims of the call, where two warpgroups leave 232 registers",
    ),
)
WIDE = 32
"""An allowance further than this above all that it covers is to be lowered."""


def allowed(kernel: KernelSource, arch: str) -> int:
    """The allowance of one kernel; no two may cover it."""
    (only,) = [a.spills for a in ALLOWED if a.covers(kernel, arch)] or [0]
    return only
