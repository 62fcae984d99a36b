"""How much of a state a program of the decode kernel takes at once, and with how many warps. No torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from kdacore.types import Request
from kdacore_triton import configs

MAX_TILE = 128 * 256
"""Elements of the largest tile: 64 registers a thread of 16 warps."""


TWO_PROGRAMS = 128
"""Registers a thread with which two programs of eight warps fit a multiprocessor: one loads while the other computes.

Results do not depend on it. With several tokens too much would be spilled.
"""


@dataclass(frozen=True)
class Tile:
    """``BV`` columns of a state."""

    BV: int
    num_warps: int
    max_registers: int = 0
    """Of a thread; 0: as many as the compiler likes."""

    def options(self, request: Request) -> dict[str, int]:
        """What the compiler is told beside the warps."""
        limited = self.max_registers and request.device.arch.startswith("sm_")
        return {"maxnreg": self.max_registers} if limited else {}


def padded(n: int) -> int:
    """The smallest power of two not below ``n``."""
    return 1 << (n - 1).bit_length()


def state_class(r: Request) -> str:
    """The dtype of states that configurations are chosen by: float16 is as wide as bfloat16."""
    return "float32" if r.state_dtype == "float32" else "bfloat16"


def recurrent_config(r: Request) -> configs.Config:
    """The configuration of the recurrent kernel without records.

    It does not depend on the number of tokens: more tokens may change no bit of an earlier output.
    """
    return configs.get(
        "recurrent",
        r.device.arch,
        K=r.K,
        V=r.V,
        rows=configs.MANY if r.batch_invariant else r.N * r.HV,
        state=state_class(r),
        v_first=r.state_v_first,
    )


def decode_tile(r: Request) -> Tile:
    """The tile of a request.

    The recurrent ops take what the kernel without records takes: the order in which sums are added up depends on it,
    and states that are replayed have the bits of those that are written. The fused ops take whole heads, since the norm
    is over all of v, as far as registers suffice.
    """
    if r.op.startswith("fused_recurrent"):
        config = recurrent_config(r)
        return Tile(min(config["BV"], padded(r.V)), config["num_warps"])
    KP = padded(r.K)
    BV = min(padded(r.V), MAX_TILE // KP)
    num_warps = max(1, min(16, KP * BV // 2048))
    return Tile(BV, num_warps, TWO_PROGRAMS if num_warps == 8 and r.T == 1 and not r.packed else 0)


def commit_tile(r: Request) -> Tile:
    """The tile of ``commit_records``, whose programs share nothing: columns enough for rows of 64 bytes and more."""
    KP = padded(r.K)
    BV = min(padded(r.V), max(16, 4096 // KP))
    return Tile(BV, max(1, min(4, KP * BV // 2048)))
