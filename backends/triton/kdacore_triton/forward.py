"""``chunk_kda`` and ``chunk_gated_delta_rule``, forward: two launches and nothing read on the host.

``prepare`` does all that needs no state, one program per chunk and value head, and leaves a record of bytes for each;
``scan`` walks the state over the records and writes the output; few heads and many tokens are scanned in segments
(``kernels/segments.py``, two launches more). A record, contiguous, head dims padded to powers of
two (``BK``, ``BV``) and rows beyond the sequence zero, holds in this order::

    w   [C, BK]   X (beta k 2^gc)
    qg  [C, BK]   scale q 2^gc
    kg  [C, BK]   k 2^(gc_last - gc)
    ut  [BV, C]   (X (beta v))^T
    aqk [C, C]    scale q_i . k_j 2^(gc_i - gc_j), zero above the diagonal

``gc`` is the log2 decay summed from the chunk's first row, X the inverse of I + tril(beta_i k_i . k_j 2^(gc_i - gc_j),
-1). Beside the records, in float32: 2^gc_last, ``[BK]`` each, or one number for a scalar gate.

Chunk i of packed sequence n owns slot ``cu_seqlens[n] // C + n + i``, otherwise ``n * ceil(T / C) + i``; the record of
value head ``hv`` is number ``slot * HV + hv``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_triton import configs
from kdacore_triton.kernels.prepare import prepare_kernel
from kdacore_triton.kernels.scan import scan_kernel
from kdacore_triton.kernels.segments import carry_kernel, transfer_kernel
from kdacore_triton.launch import Launcher, cdiv, next_power_of_2
from kdacore_triton.plan import (
    GATES,
    INTERPRETING,
    FixedLaunch,
    Plans,
    dense,
    full_precision,
    has_narrow_operands,
    on_nvidia,
)

FAMILIES = {"bounded": 0, "dyadic": 1, "scalar": 2}
"""The prepare kernel's FAMILY constexpr."""

MIN_BOUND = -5.0
"""The lowest log decay per step that constant anchors cover."""

MAX_BOUNDED = 32
"""The most rows that one constant anchor covers at MIN_BOUND."""

MAX_SEGMENTED = 128
"""The widest head whose transfer map fits shared memory."""

_LOG2E = 1.4426950408889634
_PREPARE = Launcher(prepare_kernel)
_SCAN = Launcher(scan_kernel)
_TRANSFER = Launcher(transfer_kernel)
_CARRY = Launcher(carry_kernel)


@dataclass(frozen=True, slots=True)
class Segments:
    """The launches before a scan in segments, and the sizes of what they write; see kernels.segments."""

    starts_size: int
    maps_size: int
    transfer: FixedLaunch
    carry: FixedLaunch


class Plan:
    """The launches of a request, and what they write."""

    def __init__(self, r: Request) -> None:
        self.request = r
        family = gate_family(r)
        half = has_narrow_operands(r)
        config = configs.get(
            "chunk_forward", r.device.arch, gate=family, K=r.K, V=r.V, half=half, heads=r.N * r.HV, T=r.T
        )
        C: int = min(config["C"], MAX_BOUNDED) if family == "bounded" else config["C"]
        BK, BV = max(16, next_power_of_2(r.K)), max(16, next_power_of_2(r.V))
        NT = cdiv(r.T, C)
        slots = r.T // C + r.N if r.packed else r.B * NT
        self.upcast = INTERPRETING and r.dtype == "bfloat16"
        self.round_state = INTERPRETING and r.state_dtype == "bfloat16"
        self.record_dtype = torch.bfloat16 if half else torch.float32
        self.records = slots * r.HV
        self.record_size = C * (3 * BK + BV + C)
        self.decay_size = 1 if r.scalar_gate else BK
        self.state_dtype = torch.float32 if self.round_state else getattr(torch, r.state_dtype)
        device = -1 if INTERPRETING else r.device.index
        bound = r.lower_bound or 0.0
        dots = dot_precision(r, half)
        shared = {"K": r.K, "V": r.V, "BK": BK, "C": C}
        self.levels = C if family == "dyadic" else 0
        self.levels_dtype = torch.float16 if dots["DOT"] in ("bf16", "tf32") else torch.float32
        self.prepare = FixedLaunch(
            _PREPARE,
            device,
            (self.records, 1, 1),
            (r.T, NT, r.N, r.H, r.HV, r.scale, bound, anchor(bound, C)),
            {
                **shared, "BV": BV, "BU": min(config["BU"], BV),
                "LEVELS": C.bit_length() - 1, "FAMILY": FAMILIES[family], "GATE": GATES[r.gate],
                "L2NORM": r.qk_l2norm, "BETA_SIGMOID": r.beta_sigmoid,
                "BETA_FACTOR": 2.0 if r.neg_eigval else 1.0, "PACKED": r.packed, **dots, "ASM": on_nvidia(r),
            },
            config["prepare_warps"],
        )  # fmt: skip
        block = min(config["BV"], BV)
        columns = {
            "K": r.K, "V": r.V, "BK": BK, "BVP": BV, "V_FIRST": r.state_v_first, "PACKED": r.packed,
        }  # fmt: skip
        walk = {
            **columns, "BV": block, "C": C, "SCALAR": r.scalar_gate, "DOT": dots["DOT"],
            "STAGES": config["scan_stages"],
        }  # fmt: skip
        launch = (config["scan_warps"], config["scan_stages"])
        # Where segments start may not depend on T; whether there is more than one may.
        segment = config["segment"] if BK <= MAX_SEGMENTED and config["segment"] < r.T else 0
        NS = cdiv(r.T, segment) if segment else 1
        starts = (r.T // segment + r.N if r.packed else r.B * NS) if segment else r.N
        self.scan = FixedLaunch(
            _SCAN,
            device,
            (starts * r.HV * (BV // block), 1, 1),
            (r.T, NT, r.HV, r.N, NS),
            {**walk, "SEGMENT": segment, "EVERY": r.checkpoint_every},
            *launch,
        )
        self.segments: Segments | None = None
        if segment:
            tile = starts * r.HV * BK
            self.segments = Segments(
                tile * BV,
                tile * (BV + BK),
                FixedLaunch(
                    _TRANSFER,
                    device,
                    (starts * r.HV * (BV // block + cdiv(BK, block)), 1, 1),
                    (r.T, NT, r.HV, r.N, NS),
                    {**walk, "SEGMENT": segment},
                    *launch,
                ),
                FixedLaunch(
                    _CARRY,
                    device,
                    (r.N * r.HV * (BV // 16), 1, 1),
                    (r.T, r.HV, NS),
                    {
                        **columns,
                        "BV": 16,
                        "SEGMENT": segment,
                        "DOT": dots["DOT"],
                        "FULL": "tf32x3" if on_nvidia(r) else "ieee",
                    },
                    8,
                    2,
                ),
            )


def gate_family(r: Request) -> str:
    """How a request's gates are kept in range: ``bounded``, ``dyadic`` (no usable bound) or ``scalar``."""
    if r.scalar_gate:
        return "scalar"
    promised = r.gate == "sigmoid" or r.safe_gate
    return "bounded" if promised and r.lower_bound is not None and r.lower_bound >= MIN_BOUND else "dyadic"


def anchor(bound: float, rows: int) -> float:
    """Half of ``rows`` steps at the bound, in log2, rounded so that scaling by it is exact."""
    return float(math.ceil(rows / 2 * -bound * _LOG2E))


def dot_precision(r: Request, half: bool) -> dict[str, Any]:
    """How products round: bfloat16 operands for most 16-bit inputs (float16 lacks the range), else tf32 or float32.

    The triangular inverse takes float16 operands when the keys are normalised in the kernel: its entries are then at
    most 2 in size. Otherwise tf32, with the same mantissa and float32's range.
    """
    full = full_precision(r)
    if not half:
        return {"DOT": full, "INV_DOT": full}
    return {"DOT": "bf16", "INV_DOT": "fp16" if r.qk_l2norm else full}


@cache
def level_steps(C: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0/1 matrices ``[log2(C), C, C]``: whose steps (columns) lie between a row and its anchor at each level.

    At level n rows come in blocks of ``2 << n``; the anchor is the first row of a block's right half. Rows there decay
    from it, rows before it decay up to it. Made once per device, outside of any graph capture.
    """
    row, col = torch.arange(C)[:, None], torch.arange(C)[None, :]
    found = []
    for n in range(C.bit_length() - 1):
        anchor = (row >> (n + 1) << (n + 1)) + (1 << n)
        found.append(((col > anchor) & (col <= row)) | ((col > row) & (col <= anchor)))
    return torch.stack(found).to(device, dtype)


plan_for = Plans(Plan)


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
    levels = level_steps(plan.levels, plan.levels_dtype, device) if plan.levels else None
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
    segments: Segments, records: Any, decay: torch.Tensor, initial: Any, cu_seqlens: Any
) -> torch.Tensor:
    """The state at the start of every segment, as the scan reads it."""
    starts = torch.empty(segments.starts_size, dtype=torch.float32, device=decay.device)
    maps = torch.empty(segments.maps_size, dtype=torch.float32, device=decay.device)
    segments.transfer(records, decay, initial, maps, cu_seqlens)
    segments.carry(maps, initial, starts, cu_seqlens)
    return starts
