"""A chunk op on a slice of a row that continues on other ranks, on torch tensors. Buffers of the launches before the
ranks' exchange are used again by those after it; maps and starting states also for a backward, unless rows are packed.
Nothing is read back from the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Outputs, Request, SliceForward
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.gated_delta.forward import GATED_DELTA
from kdacore_cuda.forms.launches import Launches, Layout
from kdacore_cuda.forms.slices.by_op import forward_launches
from kdacore_cuda.forms.slices.halves import GIVEN
from kdacore_cuda.forms.torch_forward import readable
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache

_launches = PlanCache(forward_launches)


class Pending(NamedTuple):
    """What the second half of a slice's forward, or of its backward, needs of the first."""

    arrays: dict[str, Any]
    """Arguments as kernels read them, and the buffers."""
    layout: Layout | None

    @classmethod
    def of(cls, r: Request, inputs: ChunkInputs, begin: Launches) -> Pending:
        """For the launches of the first half."""
        op = GATED_DELTA if r.scalar_gate else chunk_forward.CHUNK
        given, layout = readable(op, r, inputs, rows_apart=False)
        arrays = {name: getattr(given, name) for name in GIVEN}
        return cls(arrays | torch_launch.new_buffers(inputs.v, begin.buffers), layout)

    def run(self, launches: Launches, like: torch.Tensor, **more: Any) -> None:
        """Make launches of these arrays and of ``more``, on ``like``'s device. Raises BackendBuildError or
        DriverError."""
        packed = launches.program.pack_numbers(launches.with_layout(self.layout))
        torch_launch.run(launches.program, packed, launches.arch, like, self.arrays | more)


def begin(request: Request, inputs: ChunkInputs, leaving: torch.Tensor | None) -> SliceForward:
    """What the slice's tokens do to the state of the sequence that the last of them belongs to.

    Args:
        request: bfloat16 q, k and v, K = V = 128; as :class:`kdacore.types.SliceFunctions` says.
        inputs: its arrays.
        leaving: not used: it is the sequence whose last offset is T.

    Returns:
        M and C ``[G, HV, 128, 128]``; of a slice whose last token is padding, the unit matrix and
        zeros.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    made, like = _launches(request), inputs.v
    M, C = (like.new_empty((made.results, request.HV, 128, 128), dtype=torch.float32) for _ in range(2))
    pending = Pending.of(request, inputs, made.begin)
    pending.run(made.begin, like, M=M, C=C)
    return SliceForward(M, C, None if made.finish is None else pending)


def finish(request: Request, inputs: ChunkInputs, pending: Pending | None, starts: torch.Tensor) -> Outputs:
    """The results of the slice.

    Args:
        request: as of :func:`begin`.
        inputs: as of :func:`begin`.
        pending: what it left.
        starts: ``[N, HV, 128, 128]`` float32, K first: the state each sequence's local part starts
            from.

    Returns:
        As the forward of a whole call. Where a backward may follow and rows are not packed,
        ``saved`` has the maps and starting states of all segments, 128 KiB for each segment and head (17 MB
        for 65,536 tokens of 16 heads). For a pack it is empty: the forward makes no map of the last segment
        of a sequence, which the backward needs.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, made, like, starts = request, _launches(request), inputs.v, starts.contiguous()
    if pending is None or made.finish is None:
        return chunk_forward.forward(r, inputs._replace(initial_state=starts))
    o = like.new_empty((r.B, r.T, r.HV, r.V))
    final = starts.new_empty(starts.shape) if r.output_final_state else None
    checkpoints = starts.new_empty(r.checkpoint_shape) if r.checkpoint_every else None
    pending.run(made.finish, like, o=o, final_state=final, checkpoints=checkpoints, starts=starts)
    saved = (pending.arrays["saved"],) if r.needs_grad and not r.packed else ()
    return Outputs(o, final, checkpoints, saved)
