"""Backward of ``chunk_kda`` and ``chunk_gated_delta_rule``: every gradient from the inputs alone.

Three launches (prepare, scan, grads) and one small reduction for each parameter that needs it. A
grouped call adds one reduction each for q and k, as does the l2norm where gradients are computed in
blocks of channels. The host reads nothing back, so a call can be captured in a CUDA graph. Sums over
chunks and heads run in one fixed order, without atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, RecurrentInputs, Request

from .chunk_backward_plan import ChunkBackwardPlan, plan_backward
from .kernels.chunk_backward_gate import bias_unit
from .kernels.chunk_backward_grads import chunk_backward_grads_kernel
from .kernels.chunk_backward_grads_offset import chunk_backward_grads_offset_kernel
from .kernels.chunk_backward_grads_scalar import chunk_backward_grads_scalar_kernel
from .kernels.chunk_backward_prepare import chunk_backward_prepare_kernel
from .kernels.chunk_backward_prepare_offset_c32 import chunk_backward_prepare_offset_c32_kernel
from .kernels.chunk_backward_prepare_offset_c64 import chunk_backward_prepare_offset_c64_kernel
from .kernels.chunk_backward_reduce import sum_group_kernel, sum_slots_kernel
from .kernels.chunk_backward_scan import chunk_backward_scan_kernel
from .kernels.groups import Gradients, Inputs, OffsetOperands, PreparedTiles, ScannedTiles
from .launch import Launcher, cdiv

_prepare = Launcher(chunk_backward_prepare_kernel)
_prepare_offset_c32 = Launcher(chunk_backward_prepare_offset_c32_kernel, prefer_l1=True)
_prepare_offset_c64 = Launcher(chunk_backward_prepare_offset_c64_kernel, prefer_l1=True)
_scan = Launcher(chunk_backward_scan_kernel)
_grads = Launcher(chunk_backward_grads_kernel)
_grads_offset = Launcher(chunk_backward_grads_offset_kernel, prefer_l1=True)
_grads_scalar = Launcher(chunk_backward_grads_scalar_kernel)
_sum_slots = Launcher(sum_slots_kernel)
_sum_group = Launcher(sum_group_kernel)

Work = dict[str, torch.Tensor]
"""The workspace: chunk-major tiles by name; each kernel's docstring has their shapes."""


def backward(
    request: Request, inputs: ChunkInputs | RecurrentInputs, saved: tuple[Any, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of ``o`` and ``final_state`` with respect to every differentiable input.

    Args:
        request: the call the forward served.
        inputs: its arrays, torch tensors on one device; a recurrent call without a pool has the same gradients.
        saved: not needed; everything is recomputed.
        grads: ``o`` ``[B, T, HV, V]`` and ``final_state`` (the call's state shape), either may be None.

    Returns:
        Gradients shaped and typed like their inputs, None where the input is None. ``initial_state`` and
        ``dt_bias`` keep the shape they were given in.
    """
    plan = plan_backward(request)
    # Both kinds of inputs begin with the arrays of a chunk call.
    x = ChunkInputs(*(None if a is None else a.contiguous() for a in inputs[:9]))
    do = grads.o
    do = torch.zeros_like(x.v) if do is None else do.contiguous()
    d_final = None if grads.final_state is None else grads.final_state.contiguous()
    work = _run_prepare(request, plan, x)
    d_initial = _run_scan(request, plan, x, work, do, d_final)
    return _run_grads(request, plan, x, work, do, d_initial)


def _sizes(request: Request, plan: ChunkBackwardPlan) -> tuple[int, int, int]:
    """The sizes by which kernels locate a chunk's rows: T, NT, N."""
    return request.T, cdiv(request.T, plan.C), request.N


def _inputs(x: ChunkInputs) -> Inputs:
    """The arrays of the call that the chunk-parallel kernels read."""
    return Inputs(x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens)


def _registers(limit: int | None) -> dict[str, int]:
    """The launch option that limits registers, if there is a limit."""
    return {} if limit is None else {"maxnreg": limit}


def _run_prepare(request: Request, plan: ChunkBackwardPlan, x: ChunkInputs) -> Work:
    """Launch the prepare kernel into a fresh workspace."""
    r, p, t = request, plan, plan.tiles

    def tile(*shape: int, dtype: torch.dtype = p.work_dtype) -> torch.Tensor:
        return x.q.new_empty((p.slots, r.HV, *shape), dtype=dtype)

    work = {"Aqk": tile(p.C, p.C), "inv": tile(p.C, p.C)}
    work |= {name: tile(p.C, p.KP) for name in ("qg", "kg", "w")}
    work["uT"] = tile(p.VP, p.C)
    if p.offset is not None:
        work |= {name: tile(p.C, p.KP) for name in ("zq", "zb", "yk", "sk")}
    shape = () if r.scalar_gate else (p.KP,) if p.offset is None else (3, p.KP)
    work["last"] = tile(*shape, dtype=torch.float32)
    work["row_values"] = tile(p.row_values, dtype=torch.float32)

    arrays = (*_inputs(x), *work.values())
    scalars = (r.scale, float(r.lower_bound or 0.0))
    sizes = (*_sizes(r, p), r.H, r.HV, r.K, r.V)
    grid = (p.slots * r.HV, 1, 1)
    options = {
        **p.options, "KP": p.KP, "VP": p.VP, "BK": t.prepare_bk, "BV": t.prepare_bv, "ROWS": p.row_values,
        "L2NORM": r.qk_l2norm, "DOT": p.dot, "INV_DOT": p.inverse_dot, "num_warps": t.prepare_warps,
        **_registers(t.prepare_regs),
    }  # fmt: skip
    if p.offset is None:
        chunk = {"C": p.C, "LEVELS": p.C.bit_length() - 1}
        _prepare(grid, *arrays, *scalars, *sizes, SCALAR_GATE=r.scalar_gate, **chunk, **options)
    else:
        offset = (p.offset.floor, p.offset.centre)
        launch = _prepare_offset_c64 if p.offset.half == 32 else _prepare_offset_c32
        launch(grid, *arrays, *scalars, *offset, *sizes, **options)
    return work


def _run_scan(
    request: Request,
    plan: ChunkBackwardPlan,
    x: ChunkInputs,
    work: Work,
    do: torch.Tensor,
    d_final: torch.Tensor | None,
) -> torch.Tensor | None:
    """Launch both scans: uT becomes v_new; hT, dhT and drT join the workspace. Returns the initial state's gradient."""
    r, p, t = request, plan, plan.tiles
    for name, shape in (("hT", (p.VP, p.KP)), ("dhT", (p.VP, p.KP)), ("drT", (p.VP, p.C))):
        work[name] = x.q.new_empty((p.slots, r.HV, *shape), dtype=p.work_dtype)
    d_initial = None if x.initial_state is None else torch.empty_like(x.initial_state)
    last = work["last"]
    _scan(
        (2 * (p.VP // t.scan_bv) * r.N * r.HV, 1, 1),
        *(work[n] for n in PreparedTiles._fields), last, do,
        *(work[n] for n in ("hT", "dhT", "drT")), x.initial_state, d_final, d_initial, x.cu_seqlens,
        r.T, cdiv(r.T, p.C), r.HV, r.K, r.V,
        KP=p.KP, VP=p.VP, BV=t.scan_bv, C=p.C, LAST=last[0, 0].numel(), SCALAR_GATE=r.scalar_gate, PACKED=r.packed,
        V_FIRST=r.state_v_first, BY_ROWS=p.states_by_rows, DOT=p.dot, num_warps=t.scan_warps, num_stages=t.scan_stages,
    )  # fmt: skip
    for name in ("w", "kg", "qg"):
        del work[name]
    return d_initial


def _run_grads(
    request: Request,
    plan: ChunkBackwardPlan,
    x: ChunkInputs,
    work: Work,
    do: torch.Tensor,
    d_initial: torch.Tensor | None,
) -> InputGrads:
    """Launch the gradients kernel and the reductions after it."""
    r, p, t = request, plan, plan.tiles
    grouped = r.HV != r.H
    dv, dg, dbeta = torch.empty_like(x.v), torch.empty_like(x.g), torch.empty_like(x.beta)
    # The component along q or k, which the norm removes, may be most of the gradient: 16 bits would not do.
    parts = torch.float32 if p.separate_norm else p.work_dtype
    if grouped or (p.separate_norm and x.q.dtype != parts):
        dq, dk = (x.q.new_empty((r.B * r.T, r.HV, r.K), dtype=parts) for _ in range(2))
    else:
        dq, dk = torch.empty_like(x.q), torch.empty_like(x.k)
    width = 1 if r.scalar_gate else p.KP
    dA_part = None if x.A_log is None else _partial(r, plan, x.q, 1)
    dbias_part = None if x.dt_bias is None else _partial(r, plan, x.q, width)

    arrays = _inputs(x)
    scanned = ScannedTiles(hT=work["hT"], dhT=work["dhT"], vT=work["uT"], drT=work["drT"])
    outputs = Gradients(dq, dk, dv, dg, dbeta, dA_part, dbias_part)
    scalars = (r.scale, float(r.lower_bound or 0.0))
    grid = ((p.slots + r.packed) * r.HV, 1, 1)  # the slot without a chunk: see kernels.pack_tail
    options = {
        **p.options, "KP": p.KP, "VP": p.VP, "BV": t.grads_bv, "ROWS": p.row_values, "DOT": p.dot,
        "num_warps": t.grads_warps, **_registers(t.grads_regs),
    }  # fmt: skip
    if p.offset is not None:
        operands = tuple(work[n] for n in OffsetOperands._fields)
        _grads_offset(
            grid, *arrays, do, *operands, work["row_values"], *scanned, *outputs, *scalars,
            p.offset.floor, p.offset.centre, *_sizes(r, p), r.H, r.HV, r.K, r.V,
            S=p.offset.half, L2NORM=r.qk_l2norm and not p.separate_norm, **options,
        )  # fmt: skip
    else:
        pairs = () if r.scalar_gate else (work["Aqk"], work["inv"])
        launch = _grads_scalar if r.scalar_gate else _grads
        if r.scalar_gate:
            options |= {"C": p.C, "DIAGONAL_AXIS": p.diagonal_axis}
        launch(
            grid, *arrays, do, work["row_values"], *scanned, *pairs, *outputs, *scalars,
            *_sizes(r, p), r.H, r.HV, r.K, r.V,
            BK=t.grads_bk, L2NORM=r.qk_l2norm, **options,
        )  # fmt: skip
    if grouped or p.separate_norm:
        dq, dk = (_sum_groups(r, p, a, part, x.cu_seqlens) for a, part in ((x.q, dq), (x.k, dk)))
    dA = dbias = None
    if x.A_log is not None:
        dA = _sum_chunks(r, p, dA_part, x.A_log, 1, 1)
    if x.dt_bias is not None:
        dbias = _sum_chunks(
            r, p, dbias_part, x.dt_bias, x.dt_bias.numel() // r.HV, width, bias_unit(p.options["GATE"])
        )
    return InputGrads(dq, dk, dv, dg, dbeta, dA, dbias, d_initial)


def _partial(request: Request, plan: ChunkBackwardPlan, like: torch.Tensor, width: int) -> torch.Tensor:
    """One float32 partial sum a chunk and head. Unused slots of a pack are never written: zero."""
    make = like.new_zeros if request.packed else like.new_empty
    return make((plan.slots, request.HV, width), dtype=torch.float32)


def _sum_chunks(
    request: Request,
    plan: ChunkBackwardPlan,
    part: torch.Tensor | None,
    like: torch.Tensor,
    columns: int,
    width: int,
    unit: float = 1.0,
) -> torch.Tensor:
    """Sum partials, which are times ``unit``, over the chunks into a tensor shaped and typed like the parameter."""
    out = torch.empty_like(like)
    _sum_slots(
        (request.HV, 1, 1),
        part,
        out,
        plan.slots,
        request.HV,
        columns,
        KP=width,
        ROWS=64,
        UNIT=unit,
        num_warps=4,
    )
    return out


def _sum_groups(
    request: Request, plan: ChunkBackwardPlan, x: torch.Tensor, part: torch.Tensor, cu_seqlens: Any
) -> torch.Tensor:
    """Sum the value heads of each group; with ``separate_norm``, take the sum through the l2norm."""
    in_place = part.shape == x.shape and part.dtype == x.dtype
    out, rows = part if in_place else torch.empty_like(x), 2048 // plan.KP
    _sum_group(
        (cdiv(request.B * request.T, rows), request.H, 1),
        x, part, out, cu_seqlens if plan.separate_norm else None,
        request.B * request.T, request.H, request.HV, request.K,
        request.N if request.packed and plan.separate_norm else None,
        KP=plan.KP, ROWS=rows, GROUP=request.HV // request.H, L2NORM=plan.separate_norm, num_warps=4,
    )  # fmt: skip
    return out
