"""``chunk_kda`` without gradients for few heads on Hopper: sequences cut into segments that are scanned side by side.

Four launches: prepare (operands of every chunk), maps (how each segment changes the state), chain (the state at each
segment's start) and output (every segment from its start). Nothing is read back. One segment needs neither maps nor
chain.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import backward, runtime
from kdacore_cuda.arrays import Plans, flat, pointer, rows
from kdacore_cuda.backward_kernels import prepare_kernel
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import CHUNK_BACKWARD, SEGMENTS
from kdacore_cuda.segment_kernels import (
    SegmentKernel,
    chain_blocks,
    chain_kernel,
    maps_kernel,
    output_kernel,
    output_parts,
    segment_chunks,
)

_ORDER = (("last", 512), ("kg", 16384), ("w", 16384), ("u", 16384), ("qg", 16384), ("aqk", 8192))
RECORD = {name: (sum(n for _, n in _ORDER[:i]), size) for i, (name, size) in enumerate(_ORDER)}
"""First byte and bytes of each matrix of a record; csrc/sm90/chunk_forward/segments/chunk_operands.cuh."""
RECORD_BYTES = sum(size for _, size in _ORDER)
MAP_BYTES, START_BYTES = 128 * 1024, 64 * 1024

_AT = {name: i for i, (name, _) in enumerate(CHUNK_BACKWARD.fields)}
_INPUTS = tuple(_AT[name] for name in ("q", "k", "v", "g", "beta"))
_STRIDES = slice(_AT["q_sb"], _AT["q_sb"] + 15)


class Plan(NamedTuple):
    """What depends on the request alone."""

    chunks: backward.Plan
    steps: tuple[tuple[str, Launcher, int], ...]
    """Name, launcher and blocks of each launch."""
    prepare_values: tuple[Any, ...]
    """Parameters of the first; what a call changes is 0."""
    units: int
    segment: int
    """Chunks of one."""
    slots: int
    """Of segments; a place in maps and starts is one of a value head."""
    places: int
    """0 if no sequence can have more than one segment."""
    sizes: tuple[int, ...]
    """Parameters of the other launches: those that are numbers."""
    state_dtype: torch.dtype

    @property
    def to_maps(self) -> int:
        """Where maps begin in a call's work; records come first."""
        return self.units * RECORD_BYTES

    @property
    def to_starts(self) -> int:
        """Where starts begin, which come last."""
        return self.to_maps + self.places * MAP_BYTES

    @property
    def work_bytes(self) -> int:
        return self.to_starts + self.places * START_BYTES


def _make_plan(r: Request) -> Plan:
    chunks = backward.plan_of(r)
    NT, segment = chunks.sizes["NT"], segment_chunks(r.N * r.HV)
    segments = -(-NT // segment)
    slots = r.T // (64 * segment) + r.N if r.packed else r.N * segments
    units, processors = chunks.sizes["units"], runtime.processors(r.device.index)
    prepare = backward.launcher(prepare_kernel(chunks.float_gate, chunks.safe, records=True))
    steps = [("prepare", prepare, units)]
    if segments > 1:
        with_map = slots if r.packed else r.N * (segments - 1)
        steps.append(("maps", launcher(maps_kernel()), 2 * with_map * r.HV))
        blocks = chain_blocks(r.N * r.HV, processors)
        steps.append(("chain", launcher(chain_kernel(blocks)), blocks * r.N * r.HV))
    parts = output_parts(slots * r.HV, processors)
    steps.append(("output", launcher(output_kernel(parts)), parts * slots * r.HV))
    return Plan(
        chunks=chunks,
        steps=tuple(steps),
        prepare_values=tuple(chunks.sizes.get(name, 0) for name, _ in CHUNK_BACKWARD.fields),
        units=units,
        segment=segment,
        slots=slots,
        places=slots * r.HV if segments > 1 else 0,
        sizes=(r.T, r.N, r.HV, NT, segment, segments, r.checkpoint_every, chunks.sizes["flags"]),
        state_dtype=getattr(torch, r.state_dtype),
    )


plan_of = Plans(_make_plan)


@cache
def launcher(kernel: SegmentKernel) -> Launcher:
    """The launcher of one of the launches after prepare; all take the same parameters."""
    return Launcher(kernel.source, SEGMENTS, kernel.threads, kernel.shared)


class Call(NamedTuple):
    """A call's launches, ready to be made in order, and what they need to live until then."""

    steps: tuple[tuple[str, Launcher, int, tuple[Any, ...]], ...]
    """Name, launcher, blocks and parameters of each."""
    outputs: Outputs
    work: torch.Tensor
    """Bytes: records, maps and starts one after another."""
    kept: tuple[Any, ...]


def prepare_call(request: Request, inputs: ChunkInputs) -> Call:
    """Outputs and workspace of a call, nothing launched."""
    plan = plan_of(request)
    if inputs.g.dtype == torch.float16:
        inputs = inputs._replace(g=inputs.g.float())
    pointers, strides, kept = rows(inputs, False, plan.chunks.strides)
    A_log, bias, cu_seqlens = flat(inputs.A_log), flat(inputs.dt_bias), flat(inputs.cu_seqlens)
    h0 = flat(inputs.initial_state)
    o = inputs.v.new_empty((request.B, request.T, request.HV, request.V))
    ht = o.new_empty(request.state_shape, dtype=plan.state_dtype) if request.output_final_state else None
    ckpt = checkpoints(request, o, plan.state_dtype)
    work = o.new_empty(plan.work_bytes, dtype=torch.uint8)
    records = work.data_ptr()

    values = list(plan.prepare_values)
    for at, x in zip(_INPUTS, pointers, strict=True):
        values[at] = x
    values[_STRIDES] = strides
    values[_AT["A_log"]], values[_AT["dt_bias"]] = pointer(A_log), pointer(bias)
    values[_AT["cu_seqlens"]] = pointer(cu_seqlens)
    for name, (first, _) in RECORD.items():
        values[_AT[name]] = records + first

    others: tuple[Any, ...] = (
        *(pointer(cu_seqlens), o.data_ptr(), pointer(h0), pointer(ht), pointer(ckpt)),
        *(records, records + plan.to_maps, records + plan.to_starts),
        *plan.sizes,
    )
    steps = tuple((*step, others if i else tuple(values)) for i, step in enumerate(plan.steps))
    return Call(steps, Outputs(o, ht, ckpt), work, (inputs, kept, A_log, bias, cu_seqlens, h0))


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` without gradients on CUDA tensors, bfloat16 q, k, v, K = V = 128.

    Sizes as in the contract; see :class:`kdacore.types.ChunkInputs`. Raises BackendBuildError or DriverError.
    """
    call = prepare_call(request, inputs)
    o, arch = call.outputs.o, plan_of(request).chunks.arch
    for _, launch, grid, values in call.steps:
        runtime.launch(launch, grid, arch, o, values)
    return call.outputs


def checkpoints(request: Request, o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The array for checkpoints, None when not asked for. The unused rows of a pack are zero."""
    if not request.checkpoint_every:
        return None
    make = o.new_zeros if request.packed else o.new_empty
    return make(request.checkpoint_shape, dtype=dtype)
