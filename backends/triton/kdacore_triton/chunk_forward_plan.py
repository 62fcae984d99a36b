"""What the chunk forward launches for a request: grids, kernel options, sizes of the workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import Request
from kdacore_triton.chunk_forward_choice import config_of, keeps_float16, segment_of
from kdacore_triton.fixed_launch import FixedLaunch, PlanCache
from kdacore_triton.gate_families import FAMILIES, GATES, beta_kind, gate_family
from kdacore_triton.hardware_limits import shared_memory
from kdacore_triton.kernel_options import INTERPRETING, full_precision, has_narrow_operands, on_nvidia
from kdacore_triton.kernels.chunk_forward_checkpoints import chunk_forward_checkpoints_kernel
from kdacore_triton.kernels.chunk_forward_prepare import chunk_forward_prepare_kernel
from kdacore_triton.kernels.chunk_forward_scan import chunk_forward_scan_kernel
from kdacore_triton.kernels.chunk_forward_segments import (
    chunk_forward_segment_maps_kernel,
    chunk_forward_segment_starts_kernel,
    chunk_forward_slice_transition_kernel,
)
from kdacore_triton.kernels.groups import CellStrides
from kdacore_triton.launch import Launcher, cdiv, next_power_of_2

MAX_BOUNDED_ROWS = 32
"""The most rows that one constant exponent offset covers at MIN_BOUND."""

SLICE_SEGMENT = 2048
"""Tokens of a segment of a slice that continues on other ranks, where a whole call would have none."""

VALUE_STEP = 64
"""Wider v is padded to a multiple of this."""

CHECKPOINT_ROWS = 16
"""Checkpoints at chosen tokens lie a multiple of this behind their sequence's start: in chunks of as many rows, at a
chunk's start."""

_LOG2E = 1.4426950408889634
_PREPARE = Launcher(chunk_forward_prepare_kernel)
_SCAN = Launcher(chunk_forward_scan_kernel)
_SEGMENT_MAPS = Launcher(chunk_forward_segment_maps_kernel)
_SEGMENT_STARTS = Launcher(chunk_forward_segment_starts_kernel)
_TRANSITION = Launcher(chunk_forward_slice_transition_kernel)
_CHECKPOINTS = Launcher(chunk_forward_checkpoints_kernel)
_MAX_STRIDES = 64
"""Sets of pool strides that are kept for one request."""


class StateStrides(NamedTuple):
    """Strides over rows, heads, K and V of the states that are read and written; zeros where there are none."""

    source: tuple[int, int, int, int]
    target: tuple[int, int, int, int]


NO_POOL = StateStrides((0, 0, 0, 0), (0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class SegmentLaunches:
    """The launches before a scan in segments, and the sizes of their outputs; see kernels.chunk_forward_segments."""

    starts_size: int
    maps_size: int
    maps: FixedLaunch
    starts: FixedLaunch


@dataclass(frozen=True, slots=True)
class StateLaunches:
    """The launches that read or write states."""

    scan: FixedLaunch
    segments: SegmentLaunches | None
    checkpoints: FixedLaunch | None
    """Only where a checkpoint at a chosen token may lie inside a chunk."""
    mids_size: int
    """float32 values that the scan stores for the launch that writes the checkpoints."""
    transition: FixedLaunch | None = None
    """Launch that computes the transition of a slice that continues on other ranks."""


class ChunkForwardPlan:
    """The launches of a request, and the sizes and dtypes of their outputs."""

    def __init__(self, r: Request) -> None:
        self.request = r
        self.family = gate_family(r)
        half = has_narrow_operands(r) and not keeps_float16(r)
        self.config = config = config_of(r, INTERPRETING)
        C: int = min(config["C"], MAX_BOUNDED_ROWS) if self.family == "bounded" else config["C"]
        KP, VP = max(16, next_power_of_2(r.K)), padded_values(r.V)
        NT = cdiv(r.T, C)
        slots = r.T // C + r.N if r.packed else r.B * NT
        self.C, self.KP, self.VP, self.NT = C, KP, VP, NT
        self.upcast = INTERPRETING and r.dtype == "bfloat16"
        self.round_state = INTERPRETING and r.state_dtype == "bfloat16"
        self.record_dtype = torch.bfloat16 if half else torch.float32
        self.records = slots * r.HV
        self.record_size = C * (3 * KP + VP + C)
        self.decay_size = 1 if r.scalar_gate else KP
        self.state_dtype = torch.float32 if self.round_state else getattr(torch, r.state_dtype)
        self.device = -1 if INTERPRETING else r.device.index
        self.bound = r.lower_bound or 0.0
        self.dots = dot_precision(r, half)
        self.levels = C if self.family == "unbounded" else 0
        self.levels_dtype = torch.float16 if self.dots["DOT"] in ("bf16", "tf32") else torch.float32
        self.zeroes_tail = r.packed and not r.has("out")
        """Does prepare set rows behind the pack to zero? It then takes the output as its last tensor."""
        self.prepare = FixedLaunch(
            _PREPARE,
            self.device,
            (self.records + (r.HV if self.zeroes_tail else 0), 1, 1),
            (
                *(() if self.zeroes_tail else (None,)),
                *(r.T, NT, r.N, r.H, r.HV, r.scale, self.bound, exponent_offset(self.bound, C)),
            ),
            {
                "K": r.K, "V": r.V, "KP": KP, "VP": VP, "BV": math.gcd(config["prepare_BV"], VP), "C": C,
                "LEVELS": C.bit_length() - 1, "FAMILY": FAMILIES[self.family], "GATE": GATES[r.gate],
                "L2NORM": r.qk_l2norm, "BETA": beta_kind(r), "PACKED": r.packed, **self.dots, "ASM": on_nvidia(r),
            },
            config["prepare_warps"],
        )  # fmt: skip
        self.pooled = bool(r.inplace_state or r.state_indices_ndim or r.has("has_initial_state"))
        """Are states read or written by rows? Then :meth:`launches_for` has the launches, by strides."""
        self.plain = None if self.pooled else self._state_launches(NO_POOL)
        self._by_strides: dict[StateStrides, StateLaunches] = {}

    def launches_for(self, strides: StateStrides) -> StateLaunches:
        """The launches of a call with pools of these strides."""
        found = self._by_strides.get(strides)
        if found is None:
            if len(self._by_strides) >= _MAX_STRIDES:
                self._by_strides.clear()
            found = self._by_strides[strides] = self._state_launches(strides)
        return found

    def slice_launches(self) -> StateLaunches:
        """The launches of a slice that continues on other ranks: always in segments. K is at most
        :data:`kdacore_triton.chunk_forward_choice.MAX_SEGMENTED`."""
        return self._state_launches(NO_POOL, of_slice=True)

    def _state_launches(self, strides: StateStrides, of_slice: bool = False) -> StateLaunches:
        r, config, C, KP, VP, NT = self.request, self.config, self.C, self.KP, self.VP, self.NT
        block = math.gcd(config["scan_BV"], VP)
        columns = {
            "K": r.K, "V": r.V, "KP": KP, "VP": VP, "V_FIRST": r.state_v_first, "PACKED": r.packed,
        }  # fmt: skip
        scan_options = {
            **columns, "BV": block, "C": C, "SCALAR_GATE": r.scalar_gate, "DOT": self.dots["DOT"],
            "STAGES": config["scan_stages"],
        }  # fmt: skip
        segment = segment_of(r, config)
        if of_slice:
            segment = config["segment"] or SLICE_SEGMENT
        NS = cdiv(r.T, segment) if segment else 1
        starts = (r.T // segment + r.N if r.packed else r.B * NS) if segment else r.N
        sizes = (r.T, NT, r.HV, r.N, NS)
        null = r.null_index if r.null_index >= 0 else None
        read, written, kept = (strides.source[:2], strides.target[:2], r.checkpoint_count) if self.pooled else (
            (None, None), (None, None), None
        )  # fmt: skip
        pool = {"POOL": CellStrides(*strides.source[2:], *strides.target[2:]) if self.pooled else None}
        launch = (config["scan_warps"], config["scan_stages"])
        scan = FixedLaunch(
            _SCAN,
            self.device,
            (starts * r.HV * (VP // block), 1, 1),
            (*_absent(6, self.pooled), *sizes, *read, *written, kept, null),
            {
                **scan_options, "SEGMENT": segment, "EVERY": r.checkpoint_every, **pool,
                "INPLACE": r.inplace_state,
            },
            *launch,
        )  # fmt: skip
        segments = None
        if segment:
            tile = starts * r.HV * KP
            segments = SegmentLaunches(
                tile * VP,
                tile * (VP + KP),
                FixedLaunch(
                    _SEGMENT_MAPS,
                    self.device,
                    (starts * r.HV * (VP // block + cdiv(KP, block)), 1, 1),
                    (*_absent(2, self.pooled), *sizes, *read, null),
                    {**scan_options, "SEGMENT": segment, **pool, "OF_SLICE": of_slice},
                    *launch,
                ),
                FixedLaunch(
                    _SEGMENT_STARTS,
                    self.device,
                    (r.N * r.HV * (VP // 16), 1, 1),
                    (*_absent(2, self.pooled), r.T, r.HV, NS, *read, null),
                    {
                        **columns,
                        "BV": 16,
                        "SEGMENT": segment,
                        "DOT": self.dots["DOT"],
                        "FULL": "tf32x3" if on_nvidia(r) else "ieee",
                        **pool,
                        "OF_SLICE": of_slice,
                    },
                    *_starts_launch(r.device.arch),
                ),
            )
        if of_slice:
            return StateLaunches(scan, segments, None, 0, self._transition(segment, NS))
        if not r.checkpoint_count or C == CHECKPOINT_ROWS:
            return StateLaunches(scan, segments, None, 0)
        wide = min(VP, 32)
        checkpoints = FixedLaunch(
            _CHECKPOINTS,
            self.device,
            (r.checkpoint_count * r.HV * (VP // wide), 1, 1),
            (r.T, NT, r.N, r.H, r.HV, self.bound, *written, null),
            {
                "K": r.K, "V": r.V, "KP": KP, "VP": VP, "BV": wide, "C": C, "FAMILY": FAMILIES[self.family],
                "GATE": GATES[r.gate], "L2NORM": r.qk_l2norm, "PACKED": r.packed,
                "DOT": full_precision(r), "ASM": on_nvidia(r), **pool,
            },
            4,
        )  # fmt: skip
        return StateLaunches(scan, segments, checkpoints, r.checkpoint_count * r.HV * VP * KP)

    def _transition(self, segment: int, NS: int) -> FixedLaunch:
        r, KP, VP = self.request, self.KP, self.VP
        return FixedLaunch(
            _TRANSITION,
            self.device,
            ((1 if r.packed else r.B) * r.HV * (VP + KP) // 16, 1, 1),
            (r.T, r.HV, NS),
            {
                "K": r.K, "V": r.V, "KP": KP, "VP": VP, "BV": 16, "SEGMENT": segment, "PACKED": r.packed,
                "DOT": self.dots["DOT"], "FULL": "tf32x3" if on_nvidia(r) else "ieee",
            },
            *_starts_launch(r.device.arch),
        )  # fmt: skip


def _starts_launch(arch: str) -> tuple[int, int]:
    """Warps and stages of the launches that apply maps of segments: two stages of the map's two parts, 64 KB, where
    shared memory holds them and a state besides."""
    return 8, 2 if shared_memory(arch) > 72 * 1024 else 1


def padded_values(V: int) -> int:
    """Channels of v in a record: a power of two up to 64, then a multiple of 64. Blocks of v are powers of two that
    divide it."""
    return max(16, next_power_of_2(V)) if V <= VALUE_STEP else cdiv(V, VALUE_STEP) * VALUE_STEP


def _absent(tensors: int, pooled: bool) -> tuple[None, ...]:
    """None for each tensor that only calls with pools pass: a launch then looks at none of them."""
    return () if pooled else (None,) * tensors


def pool_strides(r: Request, source: torch.Tensor | None, target: torch.Tensor | None) -> StateStrides:
    """The strides of the states that a call reads and writes."""
    return StateStrides(_state_strides(r, source), _state_strides(r, target))


def _state_strides(r: Request, states: torch.Tensor | None) -> tuple[int, int, int, int]:
    if states is None:
        return (0, 0, 0, 0)
    row, head, a, b = states.stride()
    return (row, head, b, a) if r.state_v_first else (row, head, a, b)


def exponent_offset(bound: float, rows: int) -> float:
    """Half of ``rows`` steps at the bound, in log2, rounded so that scaling by it is exact."""
    return float(math.ceil(rows / 2 * -bound * _LOG2E))


def dot_precision(r: Request, half: bool) -> dict[str, Any]:
    """How products round: bfloat16 operands where ``half`` (float16 lacks the range), else tf32 or float32.

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
