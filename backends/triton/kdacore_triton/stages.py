"""The five stage ops, each callable and replaceable by itself (contract, section 6).

Intermediates keep the dtype of what they are made from; in Triton's interpreter, whose 16-bit arithmetic is not
right, they are float32. Nothing syncs with the device.
"""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import (
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    ChunkStateOutputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    RecomputeOutputs,
    Request,
)
from kdacore_triton import configs
from kdacore_triton.chunk_forward_plan import level_masks
from kdacore_triton.gate_families import GATES
from kdacore_triton.kernel_options import INTERPRETING, dense, on_nvidia
from kdacore_triton.kernels.stage_chunk_gate import chunk_gate_kernel
from kdacore_triton.kernels.stage_chunk_intra import (
    SPAN,
    intra_diagonal_kernel,
    intra_merge_kernel,
    intra_token_kernel,
)
from kdacore_triton.kernels.stage_chunk_output import output_kernel
from kdacore_triton.kernels.stage_chunk_state import state_kernel
from kdacore_triton.kernels.stage_recompute_w_u import recompute_kernel
from kdacore_triton.launch import Launcher, cdiv, next_power_of_2

_GATE = Launcher(chunk_gate_kernel)
_INTRA_TOKEN = Launcher(intra_token_kernel)
_INTRA_DIAGONAL = Launcher(intra_diagonal_kernel)
_INTRA_MERGE = Launcher(intra_merge_kernel)
_RECOMPUTE = Launcher(recompute_kernel)
_STATE = Launcher(state_kernel)
_OUTPUT = Launcher(output_kernel)


def chunk_gate(request: Request, inputs: ChunkGateInputs) -> torch.Tensor:
    """``gc [B, T, HV, K]`` float32; see :func:`kdacore.stages.kda_chunk_gate`."""
    g, A_log, dt_bias, cu_seqlens = (dense(x) for x in inputs[:4])
    gc = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    block = min(_padded(request.K), 128)
    _GATE(
        (_slots(request) * request.HV, cdiv(request.K, block), 1),
        g, A_log, dt_bias, cu_seqlens, gc, request.T, request.num_chunks, request.N, request.HV,
        request.lower_bound or 0.0,
        K=request.K, BK=block, C=request.chunk_size, GATE=GATES[request.gate], PACKED=request.packed,
        num_warps=4,
    )  # fmt: skip
    return gc


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk``, ``Akk`` ``[B, T, HV, C]``, by the form that measurement chose for this shape."""
    form = chunk_intra_by_token if _intra_config(request)["form"] == "token" else chunk_intra_by_chunk
    return form(request, inputs)


def chunk_intra_by_token(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """Token-parallel: pairs within blocks of 16 rows by one program per token, the rest on the matrix unit."""
    r, config = request, _intra_config(request)
    q, k, gc, beta, cu_seqlens = (dense(x) for x in inputs[:5])
    result = _intra_outputs(r, q)
    heads = min(config["heads"], next_power_of_2(r.HV))
    low = _diagonal_blocks(r, q)
    _INTRA_TOKEN(
        (r.B * r.T * cdiv(r.HV, heads), 1, 1),
        q, k, gc, beta, cu_seqlens, result.Aqk, low, r.T, r.N, r.H, r.HV, r.scale,
        K=r.K, KP=_padded(r.K), BH=heads, C=r.chunk_size, PACKED=r.packed,
        ASM=on_nvidia(r), num_warps=config["token_warps"],
    )  # fmt: skip
    _merge_intra(r, (q, k, gc, beta, cu_seqlens, low, *result), False, config)
    return result


def chunk_intra_by_chunk(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """Sub-chunk: every pair on the matrix unit."""
    r, config = request, _intra_config(request)
    q, k, gc, beta, cu_seqlens = (dense(x) for x in inputs[:5])
    result = _intra_outputs(r, q)
    inverses = result.Akk if r.chunk_size == SPAN.value else _diagonal_blocks(r, q)
    half = _HALF.get(r.dtype)
    _INTRA_DIAGONAL(
        (_slots(r) * (r.chunk_size // SPAN.value) * r.HV, 1, 1),
        q, k, gc, beta, cu_seqlens, _span_levels(r, q), result.Aqk, inverses,
        r.T, r.num_chunks, r.N, r.H, r.HV, r.scale,
        K=r.K, KP=_padded(r.K), BK=min(_padded(r.K), config["diagonal_BK"]), C=r.chunk_size, PACKED=r.packed,
        DOT=_dot(r, half), INV_DOT=_dot(r, "tf32" if half else None), ASM=on_nvidia(r),
        num_warps=config["diagonal_warps"], num_stages=config["diagonal_stages"],
    )  # fmt: skip
    if r.chunk_size > SPAN.value:
        _merge_intra(r, (q, k, gc, beta, cu_seqlens, inverses, *result), True, config)
    return result


_HALF = {"float16": "fp16", "bfloat16": "bf16"}


def _intra_config(r: Request) -> configs.Config:
    return configs.get("chunk_intra", r.device.arch, K=r.K, C=r.chunk_size, dtype=r.dtype)


def _intra_outputs(r: Request, q: torch.Tensor) -> IntraOutputs:
    shape = (r.B, r.T, r.HV, r.chunk_size)
    dtype = _intermediate(q.dtype)
    return IntraOutputs(*(torch.empty(shape, dtype=dtype, device=q.device) for _ in range(2)))


def _diagonal_blocks(r: Request, q: torch.Tensor) -> torch.Tensor:
    return torch.empty((r.B, r.T, r.HV, SPAN.value), dtype=torch.float32, device=q.device)


def _span_levels(r: Request, q: torch.Tensor) -> torch.Tensor:
    dtype = torch.float16 if r.dtype in _HALF and not INTERPRETING else torch.float32
    return level_masks(SPAN.value, dtype, q.device)


def _merge_intra(r: Request, tensors: tuple[Any, ...], inverted: bool, config: configs.Config) -> None:
    half = _HALF.get(r.dtype)
    _INTRA_MERGE(
        (_slots(r) * r.HV, 1, 1),
        *tensors, r.T, r.num_chunks, r.N, r.H, r.HV, r.scale,
        K=r.K, KP=_padded(r.K), BK=min(_padded(r.K), config["merge_BK"]), C=r.chunk_size, INVERTED=inverted,
        PACKED=r.packed, DOT=_dot(r, half), INV_DOT=_dot(r, "tf32" if half else None), ASM=on_nvidia(r),
        num_warps=config["merge_warps"], num_stages=config["merge_stages"],
    )  # fmt: skip


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` and, with q, ``qg``: see :func:`kdacore.stages.kda_recompute_w_u`."""
    r = request
    k, v, beta, gc, Akk, q, cu_seqlens = (dense(x) for x in inputs[:7])
    dtype = _intermediate(_wider(k.dtype, v.dtype))
    wide, tall = (r.B, r.T, r.HV, r.K), (r.B, r.T, r.HV, r.V)
    w, kg = (torch.empty(wide, dtype=dtype, device=k.device) for _ in range(2))
    u = torch.empty(tall, dtype=dtype, device=k.device)
    qg = None if q is None else torch.empty(wide, dtype=dtype, device=k.device)
    KP, VP = _padded(r.K), _padded(r.V)
    _RECOMPUTE(
        (_slots(r) * r.HV, 1, 1),
        q, k, v, beta, gc, Akk, cu_seqlens, w, u, kg, qg, r.T, r.num_chunks, r.N, r.H, r.HV,
        K=r.K, V=r.V, KP=KP, VP=VP, BK=min(KP, VP, 64), C=r.chunk_size, PACKED=r.packed,
        DOT=_dot(r, _product(k, v, Akk)), ASM=on_nvidia(r), num_warps=4,
    )  # fmt: skip
    return RecomputeOutputs(w, u, kg, qg)


def chunk_state(request: Request, inputs: ChunkStateInputs) -> ChunkStateOutputs:
    """``h``, ``v_new`` and the final state: see :func:`kdacore.stages.delta_rule_chunk_state`."""
    r = request
    kg, w, u, gc, initial, cu_seqlens = (dense(x) for x in inputs[:6])
    make = torch.zeros if r.packed else torch.empty  # packed: the last chunks of the bound stay unused
    h = make(
        (r.B, r.num_chunks, r.HV, r.K, r.V), dtype=_intermediate(_wider(w.dtype, kg.dtype)), device=w.device
    )
    v_new = torch.empty(u.shape, dtype=_intermediate(u.dtype), device=u.device)
    state_dtype = getattr(torch, r.state_dtype)
    final = torch.empty(r.state_shape, dtype=_intermediate(state_dtype), device=w.device)
    KP, BV = _padded(r.K), min(_padded(r.V), 64)
    _STATE(
        (r.N * r.HV, cdiv(r.V, BV), 1),
        kg, w, u, gc, initial, cu_seqlens, h, v_new, final, r.T, r.num_chunks, r.HV,
        K=r.K, V=r.V, KP=KP, BV=BV, C=r.chunk_size, V_FIRST=r.state_v_first, PACKED=r.packed,
        DOT=_dot(r, _product(kg, w, u)), ASM=on_nvidia(r), num_warps=_state_warps(r, KP, BV),
    )  # fmt: skip
    return ChunkStateOutputs(h, v_new, final.to(state_dtype))


def chunk_output(request: Request, inputs: ChunkOutputInputs) -> torch.Tensor:
    """``o [B, T, HV, V]`` in the dtype of v_new: see :func:`kdacore.stages.kda_chunk_output`."""
    r = request
    q, v_new, gc, Aqk, h, cu_seqlens = (dense(x) for x in inputs[:6])
    o = torch.empty((r.B, r.T, r.HV, r.V), dtype=_intermediate(v_new.dtype), device=q.device)
    KP, BV = _padded(r.K), min(_padded(r.V), 64)
    _OUTPUT(
        (_slots(r) * r.HV, cdiv(r.V, BV), 1),
        q, v_new, gc, Aqk, h, cu_seqlens, o, r.T, r.num_chunks, r.N, r.H, r.HV, r.scale,
        K=r.K, V=r.V, KP=KP, BV=BV, BK=min(KP, 64), C=r.chunk_size, PACKED=r.packed,
        DOT=_dot(r, _product(q, v_new, Aqk, h)), ASM=on_nvidia(r), num_warps=4,
    )  # fmt: skip
    return o.to(v_new.dtype)


def _state_warps(r: Request, KP: int, BV: int) -> int:
    """Warps of a program of the states. A state of 64 x 128 fits the registers of four, but for sm_86: there Triton 3.9
    spilled in the loop."""
    return 8 if KP > 128 or (KP == 128 and BV == 64 and r.device.arch == "sm_86") else 4


def _padded(dim: int) -> int:
    return max(16, next_power_of_2(dim))


def _slots(r: Request) -> int:
    """Chunk slots, used or not."""
    return r.num_chunks if r.packed else r.B * r.num_chunks


def _intermediate(dtype: torch.dtype) -> torch.dtype:
    """The dtype to store results in: what was asked for, float32 in the interpreter."""
    return torch.float32 if INTERPRETING else dtype


def _wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a == b else torch.float32


def _product(*operands: torch.Tensor) -> str | None:
    """How to multiply: bf16 when all are; tf32 with float16 (states may leave its range); None for float32."""
    kinds = {x.dtype for x in operands}
    if kinds == {torch.bfloat16}:
        return "bf16"
    return None if torch.float32 in kinds else "tf32"


def _dot(r: Request, half: str | None) -> str:
    """The kernels' DOT: ``half``, or full float32 for None; always that in the interpreter and, for tf32, on AMD."""
    if INTERPRETING or (half in (None, "tf32") and not on_nvidia(r)):
        return "ieee"
    return half or "tf32x3"
