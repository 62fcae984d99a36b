"""What the chunk backward launches for a request: padded sizes, kernel options, tile sizes. Data, no kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kdacore.ops import OPS
from kdacore.types import Request

from .launch import next_power_of_2
from .plan import EXACT_KEYS, full_precision, has_narrow_operands, on_nvidia

GATES = {"log": 0, "softplus": 1, "sigmoid": 2}
LOG2E = math.log2(math.e)
SAFE_BOUND = -5.0
"""A natural-log bound on one step from which 32 steps fit float32's range twice over (see Anchor)."""
UNBOUNDED_FLOOR = -13.75
"""Where the log2 decay of a gate without a bound is cut off for one anchor to serve 16 rows.

exp(g) then never falls below 7e-5. What a state keeps too much of is that part of it, far below the resolution of
bfloat16 and float16 inputs, which alone are served so; steps that are cut off have gradient 0.
"""
WIDE_KEYS = 128
"""One anchor serves at most so many channels of k; more go level by level."""
TF32_KEYS = 64
"""Chunk calls of float16 inputs take tf32 operands up to so many channels of k. With more, training would take twice
as long (docs/lab/triton-backward.md) for a sum that bfloat16 inputs do not get better either."""
EXACT_CHUNK = 64
"""Rows of a chunk where exponents go level by level instead."""
SMALL_CHUNK = 32
"""Rows of a chunk with one gate a head.

Products of 64 rows would be warp-group ones, whose operand addresses ptxas 12.8 (Triton 3.6) loses in that
gradients kernel; at K = V = 128 in bfloat16 on sm_90 alone it does not, and there
EXACT_CHUNK is used.
"""


@dataclass(frozen=True, slots=True)
class Anchor:
    """One constant exponent anchor for half a chunk; see kernels.backward_prepare_anchored."""

    half: int
    """Rows S of half a chunk."""
    floor: float
    """Lowest log2 decay of one step."""

    @property
    def centre(self) -> float:
        """Integer near half of what S steps at the floor add up to: at most 116."""
        return float(round(-self.floor * self.half / 2))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile widths and launch shapes of the three kernels; see each kernel for what it splits."""

    prepare_bk: int
    prepare_bv: int
    scan_bv: int
    grads_bk: int
    grads_bv: int
    prepare_warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 2
    grads_warps: int = 4
    prepare_regs: int | None = None
    """Registers a thread at most (NVIDIA); None: what the compiler takes."""
    grads_regs: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about one request's backward that does not depend on values."""

    KP: int
    """K padded to a power of two of at least 16, the width of every workspace tile."""
    VP: int
    C: int
    """Rows of a chunk."""
    slots: int
    """Chunks in the workspace: ``B * NT``, or the bound ``T // C + N`` when packed."""
    anchor: Anchor | None
    """None: exponents go level by level."""
    tiles: Tiles
    late_norm: bool
    """Is the l2norm gone back through by a launch of its own? Where no program has all channels of a token, and where
    several value heads share a key under one anchor: once for their sum is less than once for each."""
    row_values: int
    """float32 values of a chunk and head that there is one of a token; see kernels.backward_halves."""
    work_dtype: torch.dtype
    """dtype of the workspace and, bfloat16 or float32, of the matrix operands."""
    dot: str
    inverse_dot: str
    options: dict[str, Any]
    """Constexprs of the gate, the norms and beta, shared by the chunk-parallel kernels."""


def wants_more_bits(request: Request) -> bool:
    """Do products take more than bfloat16 operands, in the tiles of float32 ones?

    Where all gates are fast, each head's part of the gradient of A_log is 2e-3 to 4e-3 off with bfloat16 operands: five
    to eight roundings, none of them larger than the others. Where a few such parts cancel, that is beyond the bound.
    float16 inputs have the bits that tf32 operands keep.
    """
    return request.dtype == "float32" or (request.dtype == "float16" and EXACT_KEYS < request.K <= TF32_KEYS)


def choose_anchor(request: Request) -> Anchor | None:
    """How exponents inside a chunk are anchored."""
    if request.scalar_gate or request.K > WIDE_KEYS:
        return None
    bound = request.lower_bound
    if bound is not None and bound >= SAFE_BOUND and (request.safe_gate or request.gate == "sigmoid"):
        # A hair below the bound: a step at the bound must not count as cut off after rounding. float32 operands are
        # multiplied as a tf32 number and its remainder, 2^-11 of it: over 32 rows the remainders would underflow.
        return Anchor(16 if wants_more_bits(request) else 32, bound * LOG2E * 1.0001)
    if request.dtype in ("bfloat16", "float16"):
        return Anchor(16, UNBOUNDED_FLOOR)
    return None


def choose_tiles(KP: int, VP: int, small: bool, anchor: Anchor | None, C: int) -> Tiles:
    """Tile sizes by padded head dims. ``small``: operands are bfloat16, or there are few channels of 16-bit inputs.

    The arithmetic of a sequence does not depend on any of these choices: only independent columns are split.
    """
    if small:
        return Tiles(
            prepare_bk=min(KP, 64 if anchor is not None and anchor.half == 16 else 32),
            prepare_bv=min(VP, 64 if C == EXACT_CHUNK and anchor is None else 32),
            prepare_warps=4 if anchor is None else 2,
            scan_bv=min(VP, 32 if KP > 128 else 128),
            scan_warps=8 if KP <= 128 and VP >= 128 else 4,
            grads_bk=min(KP, 128),
            grads_bv=min(VP, 128 if KP > 32 else 32),
            grads_warps=8 if KP >= 128 else 4,
        )
    return Tiles(
        prepare_bk=min(KP, 32),
        prepare_bv=min(VP, 32),
        scan_bv=16,
        scan_warps=8 if KP > 128 else 4,
        scan_stages=1,
        grads_bk=min(KP, 64) if anchor is None else KP,
        grads_bv=min(VP, 32),
        grads_warps=8 if anchor is not None and KP > 64 else 4,
    )


@lru_cache(maxsize=512)
def plan_backward(request: Request) -> Plan:
    """The plan of one request."""
    if OPS[request.op].family == "recurrent" and request.dtype != "float32":
        # See wants_more_bits; a call this short costs little more in the arithmetic of float32 inputs.
        return plan_backward(replace(request, dtype="float32"))
    KP = max(16, next_power_of_2(request.K))
    if 32 < request.K <= 64 and not request.scalar_gate:
        # With 64 channels ptxas 12.8 (Triton 3.6) loses operand addresses of the gradients kernel, not with 128.
        KP = 128
    VP = max(16, next_power_of_2(request.V))
    native = on_nvidia(request)
    full = full_precision(request)
    narrow = has_narrow_operands(request) and not wants_more_bits(request)
    anchor = choose_anchor(request)
    C = EXACT_CHUNK if anchor is None else 2 * anchor.half
    proven = narrow and KP == VP == 128 and request.device.arch.startswith("sm_90")
    if request.scalar_gate and not proven:
        C = SMALL_CHUNK
    tiles = choose_tiles(KP, VP, not wants_more_bits(request), anchor, C)
    if not native:
        tiles = replace(tiles, scan_stages=1)  # AMD's shared memory is 64 KB
    partial_channels = anchor is None and (not request.scalar_gate or tiles.grads_bk < KP)
    late_norm = partial_channels or (anchor is not None and request.HV != request.H)
    return Plan(
        KP=KP,
        VP=VP,
        C=C,
        slots=request.T // C + request.N if request.packed else request.B * -(-request.T // C),
        anchor=anchor,
        tiles=tiles,
        late_norm=request.qk_l2norm and late_norm,
        row_values=(5 + KP // tiles.grads_bk) * C,
        work_dtype=torch.bfloat16 if narrow else torch.float32,
        dot="bf16" if narrow else full,
        inverse_dot=full,
        options={
            "GATE": GATES[request.gate],
            "HAS_A": request.has("A_log"),
            "HAS_BIAS": request.has("dt_bias"),
            "BETA": (2 if request.neg_eigval else 1) if request.beta_sigmoid else 0,
            "PACKED": request.packed,
            "ASM": native,
        },
    )
