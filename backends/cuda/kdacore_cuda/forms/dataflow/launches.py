"""The launches of the dataflow form as data. They run side by side on Hopper, for sequences and heads fewer than
multiprocessors but too many for segments.

The first launch computes the operands of every chunk, chunk after chunk of all sequences; the second
walks each sequence and value head on multiprocessors of its own, as soon as its next chunk's operands
are there. Flags in the workspace say so.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Request
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, gates_of
from kdacore_cuda.forms.dataflow import kernels
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, arguments_of, made_once
from kdacore_cuda.forms.segments.workspace import CHUNK_OPERANDS_BYTES
from kdacore_cuda.kernel_parameters import WALK
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import LAUNCH, NOTHING, Launch, Program, Value

UNIT_FLAGS_BYTES = 8 * kernels.WALK_BLOCKS
"""Bytes of the flags of one chunk and value head: one for each block that walks it."""


def launches_of(r: Request) -> Launches:
    """The launches of a call that this form serves (:func:`kdacore_cuda.choice.dataflow_serves`)."""
    numbers, items = chunk_numbers(r), r.N * r.HV
    units, gates = numbers["units"], gates_of(r)
    numbers |= {
        "prepare_blocks": kernels.prepare_blocks(units, items, multiprocessors_of(r)),
        "walk_blocks": kernels.WALK_BLOCKS * items,
        "flags_at": units * CHUNK_OPERANDS_BYTES,
    }
    size = units * (CHUNK_OPERANDS_BYTES + UNIT_FLAGS_BYTES)
    return Launches(_program(numbers, *gates), numbers, arch_of(r), {"workspace": size})


@made_once
def _program(numbers: Iterable[str], float_gate: bool, bounded: bool) -> Program:
    flags: dict[str, Value] = {"ready": ("workspace", "flags_at"), "launch": LAUNCH}
    walk = arguments_of(WALK) | flags | {"chunk_operands": "workspace"}
    prepare = kernels.prepare_units_kernel(float_gate, bounded)
    steps = (
        Launch("prepare", prepare, "prepare_blocks", {"h0": NOTHING, "last": "workspace", **flags}),
        Launch("walk", kernels.walk_kernel(), "walk_blocks", walk),
    )
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))
