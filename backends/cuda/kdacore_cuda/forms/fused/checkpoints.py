"""Checkpoints of ``chunk_kda`` at chosen tokens: what the kernels take, and the launch that follows them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Request
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.forms.fused.kernels import TAIL_BLOCKS, TAIL_THREADS, checkpoint_tail_kernel
from kdacore_cuda.kernel_parameters import CHECKPOINT_TAIL, CHUNK_FORWARD, GATES, STEP_TOKENS, TYPES
from kdacore_cuda.request_encoding import chunk_flags, type_code
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.pool_arguments import PoolArguments
from kdacore_cuda.runtime.torch_arguments import address, contiguous

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")


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


def make_checkpoints(request: Request, o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """An array for checkpoints (``request.checkpoint_shape``), None when the request asks for none.

    Uninitialised, except of a pack or where sequences may be padding: no kernel writes the unused
    rows there, so all are zero.
    """
    if not request.checkpoint_every:
        return None
    make = o.new_zeros if request.packed or request.pool_size else o.new_empty
    return make(request.checkpoint_shape, dtype=dtype)


def make_marks(request: Request, inputs: ChunkInputs, o: torch.Tensor, between_steps: bool) -> Marks:
    """The marks of a call, on the device of ``o``. ``between_steps``: its kernels take more than 16
    tokens in a step."""
    if not request.checkpoint_count:
        return NO_MARKS
    states = None
    if needs_tail(request, between_steps):
        shape = (request.checkpoint_count, request.HV, request.K * request.V)
        states = o.new_empty(shape, dtype=torch.float32)
    return Marks(contiguous(inputs.checkpoint_offsets), contiguous(inputs.checkpoint_indices), states)


def needs_tail(request: Request, between_steps: bool) -> bool:
    """Whether :func:`finish_checkpoints` has something to do; ``between_steps`` as of
    :func:`make_marks`."""
    return bool(request.checkpoint_count) and between_steps


@cache
def tail_launcher() -> Launcher:
    """The launch that follows the fused kernel of Hopper."""
    kernel = checkpoint_tail_kernel()
    return Launcher(kernel, CHECKPOINT_TAIL, TAIL_THREADS, shared_bytes(kernel))


def tail_grid(r: Request) -> int:
    """Blocks of that launch."""
    return r.checkpoint_count * r.HV * TAIL_BLOCKS


def tail_sizes(r: Request, g_type: str) -> tuple[float, ...]:
    """The numbers among its parameters. ``g_type``: dtype of the g that kernels are given."""
    return (
        *(r.T, r.N, r.H, r.HV, STEP_TOKENS, r.null_index, r.checkpoint_count, GATES[r.gate], chunk_flags(r)),
        *(TYPES[g_type], type_code(r, "beta"), type_code(r, "dt_bias"), r.lower_bound or 0.0),
    )


def finish_checkpoints(
    request: Request, arch: str, main: tuple[Any, ...], pools: PoolArguments, marks: Marks, g_type: str
) -> None:
    """Bring the states that the fused kernel of Hopper kept in ``marks.states`` to their tokens.

    Args:
        request: the call; K = V = 128.
        arch: the real architecture to load the kernel for.
        main: the parameters of the launch ahead of it.
        pools: where the kernels read and write.
        marks: as that launch took them.
        g_type: dtype of g as that launch took it.

    Raises BackendBuildError or DriverError.
    """
    if marks.states is None:
        return
    named = dict(zip((name for name, _ in CHUNK_FORWARD.fields), main, strict=True))
    sizes = tail_sizes(request, g_type)
    taken = (name for name, _ in CHECKPOINT_TAIL.fields[: -len(sizes)])
    values = (*(named[name] for name in taken), *sizes)
    torch_launch.launch(tail_launcher(), tail_grid(request), arch, pools.o, values)
