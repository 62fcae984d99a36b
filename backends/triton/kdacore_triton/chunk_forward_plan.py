"""What the chunk forward launches for a request: grids, kernel options, sizes of the workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kdacore.types import Request
from kdacore_triton import configs
from kdacore_triton.fixed_launch import FixedLaunch, PlanCache
from kdacore_triton.gate_families import FAMILIES, GATES, gate_family
from kdacore_triton.kernel_options import INTERPRETING, full_precision, has_narrow_operands, on_nvidia
from kdacore_triton.kernels.chunk_forward_prepare import chunk_forward_prepare_kernel
from kdacore_triton.kernels.chunk_forward_scan import chunk_forward_scan_kernel
from kdacore_triton.kernels.chunk_forward_segments import (
    chunk_forward_segment_maps_kernel,
    chunk_forward_segment_starts_kernel,
)
from kdacore_triton.launch import Launcher, cdiv, next_power_of_2

MAX_BOUNDED_ROWS = 32
"""The most rows that one constant exponent offset covers at MIN_BOUND."""

MAX_SEGMENTED = 128
"""The widest head whose segment map fits shared memory."""

_LOG2E = 1.4426950408889634
_PREPARE = Launcher(chunk_forward_prepare_kernel)
_SCAN = Launcher(chunk_forward_scan_kernel)
_SEGMENT_MAPS = Launcher(chunk_forward_segment_maps_kernel)
_SEGMENT_STARTS = Launcher(chunk_forward_segment_starts_kernel)


@dataclass(frozen=True, slots=True)
class SegmentLaunches:
    """The launches before a scan in segments, and the sizes of their outputs; see kernels.chunk_forward_segments."""

    starts_size: int
    maps_size: int
    maps: FixedLaunch
    starts: FixedLaunch


class ChunkForwardPlan:
    """The launches of a request, and the sizes and dtypes of their outputs."""

    def __init__(self, r: Request) -> None:
        self.request = r
        family = gate_family(r)
        half = has_narrow_operands(r)
        heads, T = (configs.MANY, configs.MANY) if r.batch_invariant else (r.N * r.HV, r.T)
        config = configs.get(
            "chunk_forward", r.device.arch, gate=family, K=r.K, V=r.V, half=half, heads=heads, T=T
        )
        C: int = min(config["C"], MAX_BOUNDED_ROWS) if family == "bounded" else config["C"]
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
        self.levels = C if family == "unbounded" else 0
        self.levels_dtype = torch.float16 if dots["DOT"] in ("bf16", "tf32") else torch.float32
        self.prepare = FixedLaunch(
            _PREPARE,
            device,
            (self.records, 1, 1),
            (r.T, NT, r.N, r.H, r.HV, r.scale, bound, exponent_offset(bound, C)),
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
        scan_options = {
            **columns, "BV": block, "C": C, "SCALAR": r.scalar_gate, "DOT": dots["DOT"],
            "STAGES": config["scan_stages"],
        }  # fmt: skip
        launch = (config["scan_warps"], config["scan_stages"])
        # The number of segments may depend on T, but not where they start.
        segment = config["segment"] if BK <= MAX_SEGMENTED and config["segment"] < r.T else 0
        NS = cdiv(r.T, segment) if segment else 1
        starts = (r.T // segment + r.N if r.packed else r.B * NS) if segment else r.N
        self.scan = FixedLaunch(
            _SCAN,
            device,
            (starts * r.HV * (BV // block), 1, 1),
            (r.T, NT, r.HV, r.N, NS),
            {**scan_options, "SEGMENT": segment, "EVERY": r.checkpoint_every},
            *launch,
        )
        self.segments: SegmentLaunches | None = None
        if segment:
            tile = starts * r.HV * BK
            self.segments = SegmentLaunches(
                tile * BV,
                tile * (BV + BK),
                FixedLaunch(
                    _SEGMENT_MAPS,
                    device,
                    (starts * r.HV * (BV // block + cdiv(BK, block)), 1, 1),
                    (r.T, NT, r.HV, r.N, NS),
                    {**scan_options, "SEGMENT": segment},
                    *launch,
                ),
                FixedLaunch(
                    _SEGMENT_STARTS,
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


def exponent_offset(bound: float, rows: int) -> float:
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
def level_masks(C: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0/1 matrices ``[log2(C), C, C]`` that choose the steps (columns) between a row and its reference row per level.

    At level n rows come in blocks of ``2 << n``; the reference row is the first of a block's second half. Rows from
    it on decay from it, rows before it decay up to it. Made once per device, outside of any graph capture.
    """
    row, col = torch.arange(C)[:, None], torch.arange(C)[None, :]
    found = []
    for n in range(C.bit_length() - 1):
        reference = (row >> (n + 1) << (n + 1)) + (1 << n)
        found.append(((col > reference) & (col <= row)) | ((col > row) & (col <= reference)))
    return torch.stack(found).to(device, dtype)


plan_for = PlanCache(ChunkForwardPlan)
