"""The numbers that kernels of ``chunk_kda`` take, of every form."""

from __future__ import annotations

from typing import Any

from kdacore.types import Request
from kdacore_cuda import request_encoding as encoding
from kdacore_cuda.fitted_head_dims import blocks_of
from kdacore_cuda.forms.launches import ROWS, STRIDES
from kdacore_cuda.kernel_parameters import GATES, TYPES
from kdacore_cuda.runtime.plan_cache import FamilyCache

CHUNK, HALF, QUARTER = 64, 32, 16
LOG2E = 1.4426950408889634
UNBOUNDED_FLOOR = -13.75
"""The lowest log2 decay of one token with an unbounded gate, so that one exponent anchor serves a
quarter of a chunk.

exp(g) is then at least 7e-5. A state that should have decayed further keeps that part of itself,
far below what bfloat16 resolves. Tokens whose decay was raised to the floor have gradient 0.
"""


def g_type(r: Request) -> str:
    """The dtype of the g that kernels are given: float16 is widened."""
    dtype = r.spec("g").dtype
    return "float32" if dtype == "float16" else dtype


def takes_float_gate(r: Request) -> bool:
    """Whether g is given to kernels as float32, not bfloat16."""
    return encoding.type_code(r, "g") != TYPES["bfloat16"]


def call_numbers(r: Request) -> dict[str, Any]:
    """Those of the call itself, with the strides of contiguous arrays."""
    common, T = _family_numbers(r), r.T
    return {
        **common,
        "q_sb": T * common["q_st"],
        "k_sb": T * common["k_st"],
        "v_sb": T * common["v_st"],
        "g_sb": T * common["g_st"],
        "beta_sb": T * common["beta_st"],
        "T": T,
        "N": r.N,
        "marks": r.checkpoint_count,
    }


def chunk_slots(r: Request) -> int:
    """Chunks of one value head, unused slots of a pack included."""
    return r.T // CHUNK + r.N if r.packed else r.B * -(-r.T // CHUNK)


def chunk_numbers(r: Request) -> dict[str, Any]:
    """Those of launches that compute chunk by chunk: :func:`call_numbers`, and how the call divides into chunks."""
    NT = -(-r.T // CHUNK)
    factor, shift = encoding.division(NT or 1)
    chunks = {"units": chunk_slots(r) * r.HV, "NT": NT, "chunks_factor": factor, "chunks_shift": shift}
    return call_numbers(r) | chunks


def _numbers_of_family(r: Request) -> dict[str, Any]:
    """Those that do not depend on lengths."""
    bounded, (hv_factor, hv_shift) = encoding.has_bounded_gate(r), encoding.division(r.HV or 1)
    # Slightly below the bound: after rounding, a decay at the bound must not count as below the
    # floor.
    floor = (r.lower_bound or 0.0) * LOG2E * 1.0001 if bounded else UNBOUNDED_FLOOR
    return {
        "H": r.H,
        "HV": r.HV,
        "K": r.K,
        "V": r.V,
        "value_blocks": blocks_of(r),
        "hv_factor": hv_factor,
        "hv_shift": hv_shift,
        "ckpt_every": r.checkpoint_every,
        "null_index": r.null_index,
        "gate": GATES[r.gate],
        "flags": encoding.chunk_flags(r),
        "beta_type": encoding.type_code(r, "beta"),
        "bias_type": encoding.type_code(r, "dt_bias"),
        "scale": r.scale,
        "lower_bound": r.lower_bound or 0.0,
        "floor": floor,
        "centre": float(round(-floor * (HALF if bounded else QUARTER) / 2)),
        **dict(zip(STRIDES, encoding.contiguous_token_strides(r), strict=True)),
        **dict.fromkeys(ROWS, r.HV * r.K * r.V),
    }


_family_numbers = FamilyCache(_numbers_of_family)
gates_of: FamilyCache[tuple[bool, bool]] = FamilyCache(
    lambda r: (takes_float_gate(r), encoding.has_bounded_gate(r))
)
"""``gates_of(request)``: whether g is given to kernels as float32, and whether the gate is bounded."""


def flags_of(r: Request) -> int:
    """:func:`kdacore_cuda.request_encoding.chunk_flags`."""
    return int(_family_numbers(r)["flags"])
