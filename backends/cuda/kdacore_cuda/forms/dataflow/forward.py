"""Host side of ``chunk_kda`` in two launches that run side by side on Hopper, for sequences and heads
fewer than multiprocessors but too many for segments.

The first launch computes the operands of every chunk, chunk after chunk of all sequences; the second
walks each sequence and value head on multiprocessors of its own, as soon as its next chunk's operands
are there. Flags in the workspace say so. Nothing is read back from the device.
"""

from __future__ import annotations

import secrets
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.dataflow.kernels import (
    WALK_BLOCKS,
    WALK_SHARED,
    WALK_THREADS,
    prepare_units_kernel,
    walk_kernel,
)
from kdacore_cuda.forms.segments.forward import CHUNK_OPERANDS_BYTES, FIELD, STRIDE_FIELDS, TOKEN_FIELDS
from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, V_STRIDES, WALK
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

UNIT_FLAGS_BYTES = 8 * WALK_BLOCKS
"""Bytes of the flags of one chunk and value head: one for each block that walks it."""
LAUNCH_NUMBERS = count(secrets.randbits(62))
"""A different number for every call, which uninitialised memory does not hold by chance. Flags in
device memory count as raised when they hold it."""


class ChunkForwardDataflowPlan(NamedTuple):
    """What the request alone determines."""

    chunks: chunk_backward.ChunkBackwardPlan
    prepare: Launcher
    prepare_grid: int
    walk_grid: int
    prepare_values: tuple[Any, ...]
    """Parameters of the first launch; those that a call changes are 0."""
    walk_sizes: tuple[int, ...]
    """The numbers among the second launch's parameters."""
    state_dtype: torch.dtype

    @property
    def flags_offset(self) -> int:
        """Byte of the workspace where flags begin; the chunks' operands come first."""
        return int(self.chunks.sizes["units"]) * CHUNK_OPERANDS_BYTES

    @property
    def workspace_bytes(self) -> int:
        return self.flags_offset + int(self.chunks.sizes["units"]) * UNIT_FLAGS_BYTES


def _make_plan(r: Request) -> ChunkForwardDataflowPlan:
    chunks = chunk_backward.plan_of(r)
    kernel = prepare_units_kernel(chunks.float_gate, chunks.bounded)
    check_order((kernel.source.entry, walk_launcher().kernel.entry))
    return ChunkForwardDataflowPlan(
        chunks=chunks,
        prepare=chunk_backward.launcher(kernel),
        prepare_grid=chunks.grid(kernel, r.device.index),
        walk_grid=WALK_BLOCKS * r.N * r.HV,
        prepare_values=tuple(chunks.sizes.get(name, 0) for name, _ in CHUNK_BACKWARD.fields),
        walk_sizes=(r.T, r.N, r.HV, chunks.sizes["NT"], r.checkpoint_every, chunks.sizes["flags"]),
        state_dtype=torch_dtype(r, r.state_dtype),
    )


plan_of = PlanCache(_make_plan)


@cache
def walk_launcher() -> Launcher:
    """The launcher of the second launch."""
    return Launcher(walk_kernel(), WALK, WALK_THREADS, WALK_SHARED)


class DataflowCall(NamedTuple):
    """The two launches of a call, to be made in order, and the memory they need until they are
    queued."""

    launches: tuple[tuple[str, Launcher, int, tuple[Any, ...]], ...]
    """Name, launcher, blocks and parameters of each."""
    outputs: Outputs
    """As kernels write them; :func:`kdacore_cuda.runtime.pool_arguments.returned` has what the caller gets."""
    pools: PoolArguments
    workspace: torch.Tensor
    """Bytes: the chunks' operands, their flags."""
    kept: tuple[Any, ...]
    """Inputs, copies among them."""


def prepare_call(request: Request, inputs: ChunkInputs) -> DataflowCall:
    """Allocates outputs and workspace of a call and fills in its parameters. Launches nothing.

    Arguments as of :func:`forward`.
    """
    plan = plan_of(request)
    if inputs.g.dtype == torch.float16:
        inputs = inputs._replace(g=inputs.g.float())
    addresses, strides, kept = token_arguments(inputs, False, plan.chunks.strides)
    A_log, bias, h0 = map(contiguous, (inputs.A_log, inputs.dt_bias, inputs.initial_state))
    pools = pool_arguments(request, inputs, plan.state_dtype)
    o, ht = pools.o, pools.written
    every = request.checkpoint_every
    checkpoints = o.new_empty(request.checkpoint_shape, dtype=plan.state_dtype) if every else None
    workspace = o.new_empty(plan.workspace_bytes, dtype=torch.uint8)
    operands, number = workspace.data_ptr(), next(LAUNCH_NUMBERS)
    ready = operands + plan.flags_offset

    values = list(plan.prepare_values)
    for field, value in zip(TOKEN_FIELDS, addresses, strict=True):
        values[field] = value
    values[STRIDE_FIELDS] = strides
    named = {"A_log": address(A_log), "dt_bias": address(bias), "last": operands}
    named |= {"ready": ready, "launch": number}
    for name, value in named.items():
        values[FIELD[name]] = value
    walk_values = (
        *(addresses[2], o.data_ptr(), address(h0), address(ht), address(checkpoints)),
        *(operands, ready, number, *strides[V_STRIDES], *plan.walk_sizes),
    )
    launches = (
        ("prepare", plan.prepare, plan.prepare_grid, tuple(values)),
        ("walk", walk_launcher(), plan.walk_grid, walk_values),
    )
    outputs, kept = Outputs(o, ht, checkpoints), (inputs, kept, A_log, bias, h0)
    return DataflowCall(launches, outputs, pools, workspace, kept)


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` without gradients on CUDA tensors of a Hopper GPU.

    Args:
        request: bfloat16 q, k and v, K = V = 128, as :func:`kdacore_cuda.choice.dataflow_serves` says.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        As :func:`kdacore_cuda.forms.chunk_forward.forward`.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    call = prepare_call(request, inputs)
    o, arch = call.outputs.o, plan_of(request).chunks.arch
    for _, launcher, grid, values in call.launches:
        torch_launch.launch(launcher, grid, arch, o, values)
    return Outputs(*returned(request, inputs, call.pools), call.outputs.checkpoints)
