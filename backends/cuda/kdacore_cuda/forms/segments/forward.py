"""Host side of ``chunk_kda`` in segments, for few heads on Hopper: segments of a sequence are
computed side by side.

Four launches: prepare (operands of every chunk), maps (how each segment maps the state at its start
to the state at its end), chain (the state at each segment's start), and output (every segment from
its start). A sequence of one segment needs neither maps nor chain. Nothing is read back from the
device.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.fused.checkpoints import Marks, make_checkpoints, make_marks
from kdacore_cuda.forms.segments import sizes as segment_lengths
from kdacore_cuda.forms.segments.kernels import (
    SegmentsKernel,
    chain_kernel,
    maps_kernel,
    output_begins_early,
    output_blocks,
    output_composes,
    output_is_paired,
    output_kernel,
    prepare_marked_kernel,
    segments_prepare_kernel,
)
from kdacore_cuda.forms.segments.saved import MAP_BYTES, START_BYTES
from kdacore_cuda.forms.segments.sizes import SegmentLengths, chain_blocks
from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, FLAGS, PREPARE_MARKED, SEGMENTS, V_STRIDES
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.launch_order import check_order
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.pool_arguments import PoolArguments, pool_arguments, returned
from kdacore_cuda.runtime.torch_arguments import address, contiguous, token_arguments, torch_dtype

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")

CHUNK_OPERANDS_BYTES = 512 + 3 * 16384 + 8192
"""Bytes of the record that prepare writes for one chunk and value head:
csrc/sm90/chunk_forward/segments/chunk_operands.cuh. Its parameter ``last`` is where the first record begins."""

FIELD = {name: i for i, (name, _) in enumerate(CHUNK_BACKWARD.fields)}
"""Place of each parameter of the launch that prepares chunks."""
TOKEN_FIELDS = tuple(FIELD[name] for name in ("q", "k", "v", "g", "beta"))
STRIDE_FIELDS = slice(FIELD["q_sb"], FIELD["q_sb"] + 15)


class ChunkForwardSegmentsPlan(NamedTuple):
    """What the request alone determines."""

    chunks: chunk_backward.ChunkBackwardPlan
    launches: tuple[tuple[str, Launcher, int], ...]
    """Name, launcher and blocks of each launch."""
    prepare_values: tuple[Any, ...]
    """Parameters of the first launch; those that a call changes are 0."""
    marked: tuple[int, ...]
    """Number of checkpoints at chosen tokens and ``null_index``, which prepare takes first; empty
    without."""
    units: int
    """Chunk slots times value heads."""
    marked_units: int
    """Checkpoints at chosen tokens times value heads."""
    lengths: SegmentLengths
    slots: int
    """Segments of one value head, unused ones of a pack included."""
    stored_segments: int
    """Maps and starting states of all value heads; 0 if no sequence can have more than one segment."""
    keeps: bool
    """Those are kept for a backward, so they lie in a buffer of their own."""
    sizes: tuple[int, ...]
    """The numbers among the other launches' parameters."""
    state_dtype: torch.dtype

    @property
    def records_offset(self) -> int:
        """Byte of the workspace where prepare's operands begin: of chunks cut off at checkpoints, then of all. Before
        them are the states that checkpoints inside chunks start from."""
        return self.marked_units * START_BYTES

    @property
    def operands_offset(self) -> int:
        """Byte of the workspace where the chunks' operands begin."""
        return self.records_offset + self.marked_units * CHUNK_OPERANDS_BYTES

    @property
    def addends_offset(self) -> int:
        """Byte of the workspace where the B of maps begin."""
        return self.operands_offset + self.units * CHUNK_OPERANDS_BYTES

    @property
    def addends_end(self) -> int:
        """The byte behind them, where the workspace ends if maps are kept."""
        return self.addends_offset + self.stored_segments * START_BYTES

    @property
    def maps_offset(self) -> int:
        """Byte of their buffer where maps begin; starting states come behind them."""
        return 0 if self.keeps else self.addends_end

    @property
    def starts_offset(self) -> int:
        """Byte of the same buffer where starting states begin."""
        return self.maps_offset + self.stored_segments * MAP_BYTES

    @property
    def starts_end(self) -> int:
        """The byte behind them, where that buffer ends."""
        return self.starts_offset + self.stored_segments * START_BYTES

    @property
    def kept_bytes(self) -> int:
        """Of the buffer that is kept."""
        return self.starts_end if self.keeps else 0

    @property
    def workspace_bytes(self) -> int:
        return self.addends_end if self.keeps else self.starts_end


def _make_plan(r: Request) -> ChunkForwardSegmentsPlan:
    chunks = chunk_backward.plan_of(r)
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    NT, lengths = chunks.sizes["NT"], segment_lengths.lengths_of(r)
    segments = lengths.segments(NT)
    slots = r.T // (64 * lengths.first) + r.N if r.packed else r.N * segments
    units, marked_units = chunks.sizes["units"], r.checkpoint_count * r.HV
    if marked_units:
        prepare = marked_launcher(prepare_marked_kernel(chunks.float_gate, chunks.bounded))
    else:
        prepare = chunk_backward.launcher(segments_prepare_kernel(chunks.float_gate, chunks.bounded))
    launches = [("prepare", prepare, marked_units + units)]
    flags = chunks.sizes["flags"]
    keeps = chosen(r).saves == "maps" and segments > 1
    per_segment = output_blocks(slots * r.HV, multiprocessors)
    from_zeros = not (r.has("initial_state") or r.pool_size)
    composes = from_zeros and not (r.packed or marked_units) and output_composes(segments, per_segment)
    if segments > 1:
        mapped = slots if r.packed else r.N * (segments - 1)
        launches.append(("maps", launcher(maps_kernel()), 2 * mapped * r.HV))
        if composes:
            if keeps:
                flags |= FLAGS["KEEP_STARTS"]
        else:
            blocks = chain_blocks(items, multiprocessors)
            launches.append(("chain", launcher(chain_kernel(blocks)), blocks * items))
            if output_begins_early(blocks * items, multiprocessors):
                flags |= FLAGS["EARLY_OUTPUT"]
    kernel = output_kernel(per_segment, output_is_paired(items, per_segment, composes), composes)
    launches.append(("output", launcher(kernel), per_segment * slots * r.HV))
    check_order((launcher.kernel.entry for _, launcher, grid in launches if grid), one_segment=segments < 2)
    return ChunkForwardSegmentsPlan(
        chunks=chunks,
        launches=tuple(launches),
        prepare_values=tuple(chunks.sizes.get(name, 0) for name, _ in CHUNK_BACKWARD.fields),
        marked=(r.checkpoint_count, r.null_index) if marked_units else (),
        units=units,
        marked_units=marked_units,
        lengths=lengths,
        slots=slots,
        stored_segments=slots * r.HV if segments > 1 else 0,
        keeps=keeps,
        sizes=(
            *(r.T, r.N, r.HV, NT, *lengths.parameters(segments).values()),
            *(r.checkpoint_every, r.null_index, r.checkpoint_count, flags),
        ),
        state_dtype=torch_dtype(r, r.state_dtype),
    )


plan_of = PlanCache(_make_plan)


@cache
def launcher(kernel: SegmentsKernel) -> Launcher:
    """The launcher of one of the launches after prepare. All take the same parameters."""
    return Launcher(kernel.source, SEGMENTS, kernel.threads, kernel.shared)


@cache
def marked_launcher(kernel: SegmentsKernel) -> Launcher:
    """The launcher of a prepare that also makes records of chunks cut off at checkpoints."""
    return Launcher(kernel.source, PREPARE_MARKED, kernel.threads, kernel.shared)


class SegmentsCall(NamedTuple):
    """The launches of a call, to be made in order, and the memory they need until they are
    queued."""

    launches: tuple[tuple[str, Launcher, int, tuple[Any, ...]], ...]
    """Name, launcher, blocks and parameters of each."""
    outputs: Outputs
    """As kernels write them; :func:`kdacore_cuda.runtime.pool_arguments.returned` has what the caller gets."""
    pools: PoolArguments
    marks: Marks
    workspace: torch.Tensor
    """Bytes: states before checkpoints, the operands of chunks cut off at checkpoints and of all chunks, the B
    of the segments' maps, and ``segments`` unless they are kept."""
    segments: torch.Tensor
    """Bytes: the segments' maps, their starting states."""
    arguments: tuple[Any, ...]
    """Inputs, copies among them."""


def prepare_call(request: Request, inputs: ChunkInputs) -> SegmentsCall:
    """Allocates outputs and workspace of a call and fills in its parameters. Launches nothing.

    Arguments as of :func:`forward`.
    """
    plan = plan_of(request)
    if inputs.g.dtype == torch.float16:
        inputs = inputs._replace(g=inputs.g.float())
    addresses, strides, kept = token_arguments(inputs, False, plan.chunks.strides)
    A_log, bias, cu_seqlens = map(contiguous, (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens))
    pools = pool_arguments(request, inputs, plan.state_dtype)
    o = pools.o
    checkpoints = make_checkpoints(request, o, plan.state_dtype)
    marks = make_marks(request, inputs, o, False)
    workspace = o.new_empty(plan.workspace_bytes, dtype=torch.uint8)
    segments = o.new_empty(plan.kept_bytes, dtype=torch.uint8) if plan.keeps else workspace
    at, given_marks = workspace.data_ptr(), marks.addresses[:2]

    prepare_values = fill_prepare_values(
        plan.prepare_values, addresses, strides, (A_log, bias, cu_seqlens), at + plan.records_offset
    )
    if plan.marked:
        prepare_values = (*plan.marked, *given_marks, *prepare_values)
    other_values: tuple[Any, ...] = (
        *(addresses[2], address(cu_seqlens), o.data_ptr(), address(pools.initial), address(pools.written)),
        *(address(checkpoints), at + plan.operands_offset, at + plan.addends_offset),
        *(segments.data_ptr() + plan.maps_offset, segments.data_ptr() + plan.starts_offset),
        *(*pools.rows, *given_marks, at if plan.marked else 0, *pools.strides),
        *(*strides[V_STRIDES], *plan.sizes),
    )
    launches = tuple(
        (*launch, other_values if i else prepare_values) for i, launch in enumerate(plan.launches)
    )
    return SegmentsCall(
        *(launches, Outputs(o, pools.written, checkpoints), pools, marks, workspace, segments),
        (inputs, kept, A_log, bias, cu_seqlens),
    )


def fill_prepare_values(
    values: tuple[Any, ...],
    addresses: tuple[int, ...],
    strides: tuple[int, ...],
    small: tuple[torch.Tensor | None, ...],
    operands: int,
) -> tuple[Any, ...]:
    """Parameters of prepare.

    Args:
        values: those that the request determines, others 0.
        addresses: of q, k, v, g and beta.
        strides: batch, token and head stride of each.
        small: ``A_log``, ``dt_bias`` and ``cu_seqlens``, contiguous.
        operands: the address of the chunks' operands.
    """
    filled = list(values)
    for field, value in zip(TOKEN_FIELDS, addresses, strict=True):
        filled[field] = value
    filled[STRIDE_FIELDS] = strides
    for name, array in zip(("A_log", "dt_bias", "cu_seqlens"), small, strict=True):
        filled[FIELD[name]] = address(array)
    filled[FIELD["last"]] = operands
    return tuple(filled)


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` on CUDA tensors of a Hopper GPU.

    Args:
        request: bfloat16 q, k and v, K = V = 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        As :func:`kdacore_cuda.forms.chunk_forward.forward`.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    call, plan = prepare_call(request, inputs), plan_of(request)
    o, arch = call.outputs.o, plan.chunks.arch
    for _, launcher, grid, values in call.launches:
        torch_launch.launch(launcher, grid, arch, o, values)
    saved = (call.segments,) if plan.keeps else ()
    return Outputs(*returned(request, inputs, call.pools), call.outputs.checkpoints, saved)
