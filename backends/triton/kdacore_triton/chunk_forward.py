"""The chunk forward: ``chunk_kda`` and ``chunk_gated_delta_rule`` in two launches; the host reads nothing back.

``chunk_forward_prepare`` does all work that needs no state, one program per chunk and value head, and
writes a record for each. ``chunk_forward_scan`` carries the state over the records and writes the
output. With few heads and many tokens the scan runs in segments (two more launches, see
kernels/chunk_forward_segments.py). A record is contiguous, with head dims padded to powers of two
(``BK``, ``BV``) and zeros in rows past the sequence, and holds in this order::

    w   [C, BK]   X (beta k 2^gc)
    qg  [C, BK]   scale q 2^gc
    kg  [C, BK]   k 2^(gc_last - gc)
    ut  [BV, C]   (X (beta v))^T
    aqk [C, C]    scale q_i . k_j 2^(gc_i - gc_j), zero above the diagonal

``gc`` is the log2 decay summed from the chunk's first row, and X is the inverse of
``I + tril(beta_i k_i . k_j 2^(gc_i - gc_j), -1)``. A second array holds 2^gc_last in float32: ``[BK]`` per
record, or one number for a scalar gate.

Chunk i of packed sequence n owns slot ``cu_seqlens[n] // C + n + i``, otherwise ``n * ceil(T / C) + i``;
the record of value head ``hv`` is number ``slot * HV + hv``.
"""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_triton.chunk_forward_plan import SegmentLaunches, level_masks, plan_for
from kdacore_triton.kernel_options import dense


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """Run the chunked forward; see ``ChunkInputs`` and ``Outputs`` for shapes and dtypes.

    Nothing syncs with the device, so the call can be captured in a CUDA graph once it has run outside of one.
    ``saved`` is empty: the backward recomputes.
    """
    plan = plan_for(request)
    q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens = (dense(x) for x in inputs[:9])
    if plan.upcast:
        q, k, v = q.float(), k.float(), v.float()
    device = v.device
    records = torch.empty(plan.records * plan.record_size, dtype=plan.record_dtype, device=device)
    decay = torch.empty(plan.records * plan.decay_size, dtype=torch.float32, device=device)
    o = torch.empty_like(v)
    final = checkpoints = None
    if request.output_final_state:
        final = torch.empty(request.state_shape, dtype=plan.state_dtype, device=device)
    if request.checkpoint_every:
        make = torch.zeros if request.packed else torch.empty  # packed: some rows may stay unused
        checkpoints = make(request.checkpoint_shape, dtype=plan.state_dtype, device=device)
    levels = level_masks(plan.levels, plan.levels_dtype, device) if plan.levels else None
    plan.prepare(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, levels, records, decay)
    starts = None
    if plan.segments is not None:
        starts = _segment_starts(plan.segments, records, decay, initial, cu_seqlens)
    plan.scan(records, decay, o, initial, starts, final, checkpoints, cu_seqlens)
    if plan.upcast:
        o = o.to(torch.bfloat16)
    if plan.round_state:
        final, checkpoints = (None if x is None else x.to(torch.bfloat16) for x in (final, checkpoints))
    return Outputs(o, final, checkpoints)


def _segment_starts(
    segments: SegmentLaunches, records: Any, decay: torch.Tensor, initial: Any, cu_seqlens: Any
) -> torch.Tensor:
    """The state at the start of every segment, as the scan reads it."""
    starts = torch.empty(segments.starts_size, dtype=torch.float32, device=decay.device)
    maps = torch.empty(segments.maps_size, dtype=torch.float32, device=decay.device)
    segments.maps(records, decay, initial, maps, cu_seqlens)
    segments.starts(maps, initial, starts, cu_seqlens)
    return starts
