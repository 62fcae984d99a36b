"""The chunk forward: ``chunk_kda`` and ``chunk_gated_delta_rule`` in two launches; the host reads nothing back.

``chunk_forward_prepare`` does all work that needs no state, one program per chunk and value head, and
writes a record for each. ``chunk_forward_scan`` carries the state over the records and writes the
output. With few heads and many tokens the scan runs in segments (two more launches, see
kernels/chunk_forward_segments.py). A record is contiguous, with K padded to a power of two (``KP``),
V to one of at most 64 or a multiple of 64 (``VP``), and zeros in rows past the sequence. It holds in
this order::

    w   [C, KP]   X (beta k 2^gc)
    qg  [C, KP]   scale q 2^gc
    kg  [C, KP]   k 2^(gc_last - gc)
    ut  [VP, C]   (X (beta v))^T
    aqk [C, C]    scale q_i . k_j 2^(gc_i - gc_j), zero above the diagonal

``gc`` is the log2 decay summed from the chunk's first row, and X is the inverse of
``I + tril(beta_i k_i . k_j 2^(gc_i - gc_j), -1)``. A second array holds 2^gc_last in float32: ``[KP]`` per
record, or one number for a scalar gate.

Chunk i of packed sequence n owns slot ``cu_seqlens[n] // C + n + i``, otherwise ``n * ceil(T / C) + i``;
the record of value head ``hv`` is number ``slot * HV + hv``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_triton.chunk_forward_plan import (
    ChunkForwardPlan,
    SegmentLaunches,
    StateLaunches,
    level_masks,
    plan_for,
    pool_strides,
)
from kdacore_triton.kernel_options import dense
from kdacore_triton.stand_ins import staged, written_back


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """Run the chunked forward; see ``ChunkInputs`` and ``Outputs`` for shapes and dtypes.

    Nothing syncs with the device, so the call can be captured in a CUDA graph once it has run outside of one.
    ``saved`` is empty: the backward recomputes.
    """
    plan = plan_for(request)
    q, k, v, g, beta, A_log, dt_bias = (dense(x) for x in inputs[:7])
    cu_seqlens = dense(inputs.cu_seqlens)
    if plan.upcast:
        q, k, v = q.float(), k.float(), v.float()
    device = v.device
    records = torch.empty(plan.records * plan.record_size, dtype=plan.record_dtype, device=device)
    decay = torch.empty(plan.records * plan.decay_size, dtype=torch.float32, device=device)
    out = inputs.out
    o = torch.empty_like(v) if out is None else staged(out, v.dtype)
    checkpoints = None
    if request.checkpoint_every:
        # Some rows may stay unused: behind those of a pack, and those of a sequence that is padding.
        make = torch.zeros if request.packed or request.state_indices_ndim else torch.empty
        checkpoints = make(request.checkpoint_shape, dtype=plan.state_dtype, device=device)
    levels = level_masks(plan.levels, plan.levels_dtype, device) if plan.levels else None
    tail = (o,) if plan.zeroes_tail else ()
    plan.prepare(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, levels, records, decay, *tail)
    work = _Work(records, decay, cu_seqlens, o, checkpoints)
    if plan.plain is None:
        final = _scan_pools(plan, inputs, (k, g, A_log, dt_bias), work)
    else:
        final = _scan(plan, plan.plain, dense(inputs.initial_state), work)
    if out is not None:
        o = written_back(out, o)
    elif plan.upcast:
        o = o.to(torch.bfloat16)
    if plan.round_state and checkpoints is not None:
        checkpoints = checkpoints.to(torch.bfloat16)
    return Outputs(o, final, checkpoints)


class _Work(NamedTuple):
    """What the prepare kernel wrote, and what the scan is to write."""

    records: torch.Tensor
    decay: torch.Tensor
    cu_seqlens: Any
    o: torch.Tensor
    checkpoints: torch.Tensor | None


def _scan(plan: ChunkForwardPlan, launches: StateLaunches, initial: Any, work: _Work) -> torch.Tensor | None:
    """Write ``o`` and the checkpoints; returns the final states, if they were asked for."""
    r = plan.request
    records, decay, cu_seqlens, o, checkpoints = work
    final = starts = None
    if r.output_final_state:
        final = torch.empty(r.state_shape, dtype=plan.state_dtype, device=o.device)
    if launches.segments is not None:
        starts = _segment_starts(launches.segments, work, initial)
    launches.scan(records, decay, o, initial, starts, final, checkpoints, cu_seqlens)
    if final is not None and plan.round_state:
        final = final.to(torch.bfloat16)
    return final


def _scan_pools(
    plan: ChunkForwardPlan, x: ChunkInputs, keys: tuple[Any, ...], work: _Work
) -> torch.Tensor | None:
    """:func:`_scan` with states in rows of pools, which are read and written where they are.

    ``keys``: k, g, A_log and dt_bias as the kernels take them.
    """
    r, initial = plan.request, x.initial_state
    records, decay, cu_seqlens, o, checkpoints = work
    pool = getattr(x, r.written_pool) if r.inplace_state else None
    target = pool
    if pool is None and r.output_final_state:
        target = torch.empty(r.state_shape, dtype=plan.state_dtype, device=o.device)
    elif plan.round_state and pool is not None:
        target = staged(pool, torch.float32)
    rows = (x.state_indices, x.has_initial_state, x.write_indices, x.checkpoint_offsets, x.checkpoint_indices)
    indices, filled, _, offsets, kept = rows = tuple([dense(a) for a in rows])
    launches = plan.launches_for(pool_strides(r, initial, target))
    starts = mids = None
    if launches.segments is not None:
        starts = _segment_starts(launches.segments, work, initial, (indices, filled))
    if launches.checkpoints is not None:
        mids = torch.empty(launches.mids_size, dtype=torch.float32, device=o.device)
        behind = (*keys, cu_seqlens, records, mids, target)
        # The scan writes the caller's arrays: a kernel behind it that cannot be built has to say so before.
        launches.checkpoints.build(*behind, numbers=(indices, offsets, kept))
    launches.scan(records, decay, o, initial, starts, target, checkpoints, cu_seqlens, mids, numbers=rows)
    if launches.checkpoints is not None:
        launches.checkpoints(*behind, numbers=(indices, offsets, kept))
    if pool is None:
        return target.to(torch.bfloat16) if target is not None and plan.round_state else target
    final = written_back(pool, target)
    return final if r.output_final_state else None


def _segment_starts(
    segments: SegmentLaunches, work: _Work, initial: Any, rows: tuple[Any, ...] = ()
) -> torch.Tensor:
    """The state at the start of every segment, as the scan reads it. ``rows``: of a pool, as the kernels take them."""
    records, decay, cu_seqlens, *_ = work
    starts = torch.empty(segments.starts_size, dtype=torch.float32, device=decay.device)
    maps = torch.empty(segments.maps_size, dtype=torch.float32, device=decay.device)
    segments.maps(records, decay, initial, maps, cu_seqlens, numbers=rows)
    segments.starts(maps, initial, starts, cu_seqlens, numbers=rows)
    return starts
