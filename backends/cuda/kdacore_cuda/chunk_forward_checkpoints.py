"""Checkpoints of ``chunk_kda`` at chosen tokens: what the kernels take, and the launch that follows them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Request
from kdacore_cuda import torch_launch
from kdacore_cuda.chunk_forward_kernels import TAIL_BLOCKS, TAIL_SHARED, TAIL_THREADS, checkpoint_tail_kernel
from kdacore_cuda.kernel_parameters import CHECKPOINT_TAIL, CHUNK_FORWARD, GATES, STEP_TOKENS
from kdacore_cuda.launch import Launcher
from kdacore_cuda.pool_arguments import PoolArguments
from kdacore_cuda.request_encoding import chunk_flags, type_code
from kdacore_cuda.torch_arguments import address, contiguous


class Marks(NamedTuple):
    """Offsets and rows of a call's checkpoints, and memory for the states at the starts of steps."""

    offsets: torch.Tensor | None
    rows: torch.Tensor | None
    states: torch.Tensor | None
    """Float32 ``[C, HV, K * V]``; None where no checkpoint lies between two steps."""

    @property
    def addresses(self) -> tuple[int, int, int]:
        """0 for an absent array."""
        return address(self.offsets), address(self.rows), address(self.states)


NO_MARKS = Marks(None, None, None)


def make_marks(request: Request, inputs: ChunkInputs, o: torch.Tensor, between_steps: bool) -> Marks:
    """The marks of a call, on the device of ``o``. ``between_steps``: its kernels take more than 16
    tokens in a step."""
    if not request.checkpoint_count:
        return NO_MARKS
    states = None
    if between_steps:
        shape = (request.checkpoint_count, request.HV, request.K * request.V)
        states = o.new_empty(shape, dtype=torch.float32)
    return Marks(contiguous(inputs.checkpoint_offsets), contiguous(inputs.checkpoint_indices), states)


@cache
def tail_launcher() -> Launcher:
    """The launch that follows the fused kernel of Hopper."""
    return Launcher(checkpoint_tail_kernel(), CHECKPOINT_TAIL, TAIL_THREADS, TAIL_SHARED)


def tail_sizes(request: Request, gate_type: int) -> tuple[Any, ...]:
    """The last parameters of :data:`kdacore_cuda.kernel_parameters.CHECKPOINT_TAIL`. ``gate_type``: of g as
    kernels take it."""
    r = request
    return (
        *(r.T, r.N, r.H, r.HV, STEP_TOKENS, r.null_index, r.checkpoint_count, GATES[r.gate], chunk_flags(r)),
        *(gate_type, type_code(r, "beta"), type_code(r, "dt_bias"), r.lower_bound or 0.0),
    )


def tail_grid(request: Request) -> int:
    """Blocks of the launch."""
    return request.checkpoint_count * request.HV * TAIL_BLOCKS


def finish_checkpoints(
    request: Request, arch: str, main: tuple[Any, ...], pools: PoolArguments, marks: Marks, gate_type: int
) -> None:
    """Bring the states that the fused kernel of Hopper kept in ``marks.states`` to their tokens.

    Args:
        request: the call; K = V = 128.
        arch: the real architecture to load the kernel for.
        main: the parameters of the launch ahead of it.
        pools: where the kernels read and write.
        marks: as that launch took them.
        gate_type: of g as that launch took it.

    Raises BackendBuildError or DriverError.
    """
    if marks.states is None:
        return
    named = dict(zip((name for name, _ in CHUNK_FORWARD.fields), main, strict=True))
    sizes = tail_sizes(request, gate_type)
    taken = (name for name, _ in CHECKPOINT_TAIL.fields[: -len(sizes)])
    torch_launch.launch(
        tail_launcher(), tail_grid(request), arch, pools.o, (*(named[n] for n in taken), *sizes)
    )
