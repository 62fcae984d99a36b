"""What the chunk backward launches for a request: padded sizes, kernel options, tile sizes.

Three forms, by how exponents inside a chunk stay in range: *levels* (any gate, chunk_backward_prepare
and chunk_backward_grads), *offset* (one constant exponent offset per half chunk, the ``_offset``
kernels), and *scalar* (one decay per head, chunk_backward_prepare and chunk_backward_grads_scalar).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kdacore.ops import OPS
from kdacore.types import Request

from .chunk_forward_choice import EXACT_KEYS
from .gate_families import GATES, beta_kind, has_usable_bound
from .hardware_limits import has_warp_products, shared_memory
from .kernel_options import full_precision, has_narrow_operands, on_nvidia
from .launch import next_power_of_2

LOG2E = math.log2(math.e)
UNBOUNDED_FLOOR = -13.75
"""The log2 decay of a gate without a bound is clamped here, so that one offset serves 16 rows.

exp(g) is then at least 7e-5: far below the resolution of bfloat16 and float16 inputs, the only ones it is used for.
Clamped steps have gradient 0.
"""
WIDE_KEYS = 128
"""The most channels of k for the offset form; wider keys take levels."""
TF32_KEYS = 64
"""Chunk calls of float16 inputs take tf32 operands up to this many channels of k. With more, training would take twice
as long (docs/lab/triton-backward.md) for a precision that bfloat16 inputs do not get either."""
WIDE_SCAN_BYTES = 2112
"""Shared memory for each row of a chunk that the scan takes in two stages, with more than WIDE_KEYS channels of k."""
UNEVEN_VALUES = range(129, 193)
"""Head dims V whose kernels take the forms that need fewer registers: see ``states_by_rows`` and ``diagonal_axis``.

K = 96 with V = 192 spills too much without them. Other head dims keep the machine code that was run on an H200."""
EXACT_CHUNK = 64
"""Rows of a chunk in the forms without an offset."""
SMALL_CHUNK = 32
"""Rows of a chunk with one gate per head.

Products of 64 rows would use warp-group instructions, whose operand addresses ptxas 12.8 (Triton 3.6) loses in that
gradients kernel. Only at K = V = 128 in bfloat16 on sm_90 it does not; EXACT_CHUNK is used there.
"""


@dataclass(frozen=True, slots=True)
class ExponentOffset:
    """One constant exponent offset for half a chunk; see kernels.chunk_backward_prepare_offset_c32."""

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
class ChunkBackwardPlan:
    """Everything about one request's backward that does not depend on values."""

    KP: int
    """K padded to a power of two of at least 16, the width of every workspace tile."""
    VP: int
    C: int
    """Rows of a chunk."""
    slots: int
    """Chunks in the workspace: ``B * NT``, or the bound ``T // C + N`` when packed."""
    offset: ExponentOffset | None
    """None: exponents go level by level."""
    tiles: Tiles
    separate_norm: bool
    """Does a separate launch take the gradients through the l2norm?

    Yes where no program has all channels of a token, and in the offset form where several value heads share a key: one
    pass over their sum costs less than one for each."""
    row_values: int
    """float32 values per chunk and head in ``row_values``; see kernels.chunk_backward_io."""
    work_dtype: torch.dtype
    """dtype of the workspace and, bfloat16 or float32, of the matrix operands."""
    dot: str
    inverse_dot: str
    states_by_rows: bool
    """How the scan loads a state ``[K, V]``; see kernels.chunk_backward_scan.load_state.

    Only where products are a warp's: with warp-group products the scan spills nothing."""
    diagonal_axis: int
    """See kernels.chunk_backward_grads_scalar; both values give the same bits."""
    options: dict[str, Any]
    """Constexprs of the gate, the norms and beta, shared by the chunk-parallel kernels."""


def wants_wide_operands(request: Request) -> bool:
    """Do products take operands wider than bfloat16, in the tiles of float32 inputs?

    Where all gates are fast, each head's part of the gradient of A_log has an error of 2e-3 to 4e-3 with bfloat16
    operands, from five to eight roundings of about equal size. Where a few such parts nearly cancel, that exceeds the
    bound. float16 inputs have the bits that tf32 operands keep.
    """
    return request.dtype == "float32" or (request.dtype == "float16" and EXACT_KEYS < request.K <= TF32_KEYS)


def choose_offset(request: Request) -> ExponentOffset | None:
    """The constant exponent offset of a request; None for the other two forms."""
    if request.scalar_gate or request.K > WIDE_KEYS:
        return None
    bound = request.lower_bound
    if bound is not None and has_usable_bound(request):
        # Slightly below the bound: a step at the bound must not count as clamped after rounding. float32 operands are
        # multiplied as a tf32 number and its remainder, 2^-11 of it: over 32 rows the remainders would underflow.
        return ExponentOffset(16 if wants_wide_operands(request) else 32, bound * LOG2E * 1.0001)
    if request.dtype in ("bfloat16", "float16"):
        return ExponentOffset(16, UNBOUNDED_FLOOR)
    return None


def choose_tiles(KP: int, VP: int, small: bool, offset: ExponentOffset | None, C: int) -> Tiles:
    """Tile sizes by padded head dims. ``small``: operands are bfloat16, or there are few channels of 16-bit inputs.

    The arithmetic of a sequence does not depend on any of these choices: only independent columns are split.
    """
    if small:
        return Tiles(
            prepare_bk=min(KP, 64 if offset is not None and offset.half == 16 else 32),
            prepare_bv=min(VP, 64 if C == EXACT_CHUNK and offset is None else 32),
            prepare_warps=4 if offset is None else 2,
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
        grads_bk=min(KP, 64) if offset is None else KP,
        grads_bv=min(VP, 32),
        grads_warps=8 if offset is not None and KP > 64 else 4,
    )


@lru_cache(maxsize=512)
def plan_backward(request: Request) -> ChunkBackwardPlan:
    """The plan of one request."""
    if OPS[request.op].family == "recurrent" and request.dtype != "float32":
        # See wants_wide_operands; a call this short costs little more in the arithmetic of float32 inputs.
        return plan_backward(replace(request, dtype="float32"))
    KP = max(16, next_power_of_2(request.K))
    if 32 < request.K <= 64 and not request.scalar_gate:
        # With 64 channels ptxas 12.8 (Triton 3.6) loses operand addresses of the gradients kernel, not with 128.
        KP = 128
    VP = max(16, next_power_of_2(request.V))
    native = on_nvidia(request)
    full = full_precision(request)
    narrow = has_narrow_operands(request) and not wants_wide_operands(request)
    offset = choose_offset(request)
    C = EXACT_CHUNK if offset is None else 2 * offset.half
    proven = narrow and KP == VP == 128 and request.device.arch.startswith("sm_90")
    if request.scalar_gate and not proven:
        C = SMALL_CHUNK
    tiles = choose_tiles(KP, VP, not wants_wide_operands(request), offset, C)
    if not native or (KP > WIDE_KEYS and shared_memory(request.device.arch) < WIDE_SCAN_BYTES * C):
        tiles = replace(tiles, scan_stages=1)
    partial_channels = offset is None and (not request.scalar_gate or tiles.grads_bk < KP)
    separate_norm = partial_channels or (offset is not None and request.HV != request.H)
    return ChunkBackwardPlan(
        KP=KP,
        VP=VP,
        C=C,
        slots=request.T // C + request.N if request.packed else request.B * -(-request.T // C),
        offset=offset,
        tiles=tiles,
        separate_norm=request.qk_l2norm and separate_norm,
        row_values=(5 + KP // tiles.grads_bk) * C,
        work_dtype=torch.bfloat16 if narrow else torch.float32,
        dot="bf16" if narrow else full,
        inverse_dot=full,
        states_by_rows=request.V in UNEVEN_VALUES and has_warp_products(request.device.arch),
        diagonal_axis=0 if request.V in UNEVEN_VALUES else 1,
        options={
            "GATE": GATES[request.gate],
            "BETA": beta_kind(request),
            "PACKED": request.packed,
            "ASM": native,
        },
    )
