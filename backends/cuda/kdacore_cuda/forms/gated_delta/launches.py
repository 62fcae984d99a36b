"""The launches of ``chunk_gated_delta_rule`` as data: records of all chunks, then a walk over each sequence and value
head."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Request
from kdacore_cuda.forms.backward.kernels import walk_warpgroups
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import records_kernel, walk_kernel
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, arguments_of, made_once
from kdacore_cuda.kernel_parameters import GATED_DELTA
from kdacore_cuda.request_encoding import division, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import Launch, Program

RECORD_BYTES = 2 * 64 * 64 * 2 + 3 * 4 * 20 * 4 + 16 + 4 * 64 * 4
"""Of a chunk and value head: ``ChunkRecord`` of csrc/sm90/gated_delta/record.cuh."""


def launches_of(r: Request) -> Launches:
    """The launches of a call; bfloat16 q, k and v, K = V = 128."""
    slots, items = chunk_slots(r), r.N * r.HV
    warpgroups = walk_warpgroups(items, multiprocessors_of(r))
    numbers = chunk_numbers(r) | {
        "g_type": type_code(r, "g"),
        "record_blocks": slots * r.H,
        "walk_blocks": 2 // warpgroups * items,
    }
    for name, divisor in (("h", r.H), ("group", r.HV // r.H)):
        numbers[f"{name}_factor"], numbers[f"{name}_shift"] = division(divisor)
    size = slots * r.HV * RECORD_BYTES
    return Launches(_program(numbers, warpgroups), numbers, arch_of(r), {"workspace": size})


@made_once
def _program(numbers: Iterable[str], warpgroups: int) -> Program:
    fields = arguments_of(GATED_DELTA) | {"records": "workspace"}
    steps = (
        Launch("records", records_kernel(), "record_blocks", fields),
        Launch("walk", walk_kernel(warpgroups), "walk_blocks", fields),
    )
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))
