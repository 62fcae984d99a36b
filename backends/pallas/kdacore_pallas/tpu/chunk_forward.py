"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward by the kernel."""

from __future__ import annotations

from typing import Any

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.tpu import chunk_forward_kernel, plan
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.schedule import chunk_schedule
from kdacore_pallas.xla import state_pool

Array = Any


def forward(
    request: Request, inputs: ChunkInputs, hb: int, launch: Launch, keep_starts: bool = False
) -> Outputs:
    """Outputs of the op by one kernel; a grid step has ``hb`` q/k heads.

    The pool arguments of a call have been resolved (:mod:`kdacore_pallas.xla.state_pool`): the kernel
    reads and writes states ``[N, ...]``.

    ``keep_starts``: ``saved`` holds the state that each chunk starts from, float32 ``[B, NC, HV, V, K]``, for
    :func:`kdacore_pallas.tpu.chunk_backward.backward`; of a pack, the state that each block of rows starts from. Else
    it is empty.
    """
    want = ("o", *("final",) * request.output_final_state, *("starts",) * keep_starts)
    outs = _run(request, inputs, hb, launch, want)
    saved = (outs["starts"],) if keep_starts else ()
    return Outputs(outs["o"].reshape(inputs.v.shape), outs.get("final"), saved=saved)


def last_states(request: Request, inputs: ChunkInputs, hb: int, launch: Launch) -> Array:
    """``[N, ...]`` last states of the op, by a kernel that writes nothing else."""
    return _run(request, inputs, hb, launch, ("final",))["final"]


def _run(
    request: Request, inputs: ChunkInputs, hb: int, launch: Launch, want: tuple[str, ...]
) -> dict[str, Array]:
    """What the kernel writes of ``want``."""
    no_slot = state_pool.no_slot(inputs)
    x = plan.make_chunk_grid(request, hb, launch.together, rows_without_slot=no_slot is not None)
    schedule, options = chunk_schedule(x, inputs.cu_seqlens, no_slot), kernel_options(request)
    return chunk_forward_kernel.chunk_forward(request, inputs, x, options, schedule, launch, want)
