"""What the chunk backward launches for a request: padded sizes, kernel options, tile sizes. Data, no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kdacore.types import Request

from .launch import next_power_of_2

C = 64
"""Rows of a chunk in every backward kernel."""

GATES = {"log": 0, "softplus": 1, "sigmoid": 2}
SAFE_BOUND = -5.0
"""A natural-log bound on one step from which 16 steps still fit float32 around one anchor."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about one request's backward that does not depend on values."""

    KP: int
    """K padded to a power of two of at least 16, the width of every workspace tile."""
    VP: int
    slots: int
    """Chunks in the workspace: ``B * NT``, or the bound ``T // C + N`` when packed."""
    tiles: Tiles
    row_values: int
    """float32 values of a chunk and head that there is one of a token; see kernels.backward_halves."""
    work_dtype: torch.dtype
    """dtype of the workspace and, bfloat16 or float32, of the matrix operands."""
    dot: str
    inverse_dot: str
    bounded: bool
    """Every log decay lies in ``[SAFE_BOUND, 0]``."""
    gate: dict[str, Any]
    """Constexprs of the gate, the norms and beta, shared by the chunk-parallel kernels."""


def bounded_gate(request: Request) -> bool:
    """Do the contract or the gate's own form keep every log decay within ``[SAFE_BOUND, 0]``?"""
    bound = request.lower_bound
    if bound is None or bound < SAFE_BOUND:
        return False
    return request.safe_gate or request.gate == "sigmoid"


def choose_tiles(KP: int, VP: int, narrow: bool, programs: int) -> Tiles:
    """Tile sizes by padded head dims, operand width and the number of sequence-heads.

    The arithmetic of a sequence does not depend on any of these choices: only independent columns are split.
    """
    if narrow:
        return Tiles(
            prepare_bk=min(KP, 32),
            prepare_bv=min(VP, 64),
            scan_bv=min(VP, 32 if KP > 128 else 128),
            scan_warps=8 if KP <= 128 and VP >= 128 else 4,
            grads_bk=min(KP, 128),
            grads_bv=min(VP, 128),
            grads_warps=8 if KP >= 128 else 4,
        )
    return Tiles(
        prepare_bk=min(KP, 32),
        prepare_bv=min(VP, 32),
        scan_bv=16,
        scan_warps=8 if KP > 128 else 4,
        scan_stages=1,
        grads_bk=min(KP, 64),
        grads_bv=min(VP, 32),
    )


@lru_cache(maxsize=512)
def plan_backward(request: Request, interpreting: bool) -> Plan:
    """The plan of one request. ``interpreting``: kernels run in Triton's interpreter, which needs exact dots."""
    KP = max(16, next_power_of_2(request.K))
    VP = max(16, next_power_of_2(request.V))
    native = not interpreting and torch.version.cuda is not None
    narrow = request.dtype in ("bfloat16", "float16") and not interpreting
    slots = request.T // C + request.N if request.packed else request.B * -(-request.T // C)
    gate = {
        "GATE": GATES[request.gate],
        "HAS_A": request.has("A_log"),
        "HAS_BIAS": request.has("dt_bias"),
        "L2NORM": request.qk_l2norm,
        "BETA": (2 if request.neg_eigval else 1) if request.beta_sigmoid else 0,
        "PACKED": request.packed,
        "ASM": native,
    }
    tiles = choose_tiles(KP, VP, narrow, request.N * request.HV)
    return Plan(
        KP=KP,
        VP=VP,
        slots=slots,
        tiles=tiles,
        row_values=(5 + KP // tiles.grads_bk) * C,
        work_dtype=torch.bfloat16 if narrow else torch.float32,
        dot="ieee" if interpreting else ("bf16" if narrow else "tf32x3"),
        bounded=bounded_gate(request),
        inverse_dot="ieee" if interpreting else ("tf32" if narrow else "tf32x3"),
        gate=gate,
    )
