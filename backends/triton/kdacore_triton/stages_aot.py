"""Cases of the stages to compile ahead of time: both forms of the intra-chunk stage, by rule, and the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kdacore.types import (
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    Device,
    IntraInputs,
    RecomputeInputs,
    Request,
)
from kdacore_triton import configs
from kdacore_triton.aot import AotCase, record
from kdacore_triton.stages import (
    chunk_gate,
    chunk_intra_by_chunk,
    chunk_intra_by_token,
    chunk_output,
    chunk_state,
    recompute_w_u,
)

_SPILLS = {"float16": 0, "float32": 256}
"""float32 products are three tf32 ones each, and overflow one warp's registers a little."""


def aot_cases(arch: str) -> list[AotCase]:
    """Chunks of 64, at the head size and dtype that each rule is for."""
    cases = []
    for choice in configs.shipped_for(arch):
        if choice.kernel != "chunk_intra":
            continue
        dtype = choice.when.get("dtype", "float16")
        call = _meta_call(arch, 64 if "K" in choice.when else 128, dtype)
        for name, form in (("token", chunk_intra_by_token), ("chunk", chunk_intra_by_chunk)):
            with configs.override("chunk_intra", {**choice.config, "form": name}):
                cases += record(
                    f"intra {name} K{call[0].K} {dtype}",
                    partial(form, *call),
                    max_spills=_SPILLS[dtype],
                    slow=(name, call[0].K, dtype) != ("chunk", 128, "float16"),
                )
    return cases + _other_stages(arch)


_OTHERS = {"sm_90": ((128, "bfloat16"), (64, "bfloat16"), (256, "bfloat16"), (128, "float32"))}
"""Head size and dtype that an architecture compiles the other stages for, else the first of these."""
_DOTS = ("recompute_kernel", "state_kernel", "output_kernel")
_OTHER_SPILLS: dict[tuple[int, str], dict[str, int]] = {
    (128, "bfloat16"): {"state_kernel": 68, "recompute_kernel": 150},
    (256, "bfloat16"): {"recompute_kernel": 4, "state_kernel": 100},
    (128, "float32"): {"recompute_kernel": 40, "state_kernel": 1000, "output_kernel": 20},
}
"""20 % above the spills that Triton 3.9 produces, on the architecture with the most. A state and its operands fill the
registers, and the three tf32 products for one of float32 exceed them."""


def _other_stages(arch: str) -> list[AotCase]:
    """Gate, w and u, states and outputs."""
    cases = []
    for K, dtype in _OTHERS.get(arch, _OTHERS["sm_90"][:1]):
        for name, run in _meta_runs(arch, K, dtype).items():
            cases += record(
                f"{name} K{K} {dtype}",
                run,
                matrix_unit=_DOTS if arch == "sm_90" else (),
                products=_DOTS,
                max_spills=_OTHER_SPILLS.get((K, dtype), {}),
                slow=True,
            )
    return cases


def _meta_runs(arch: str, K: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """A grouped call of each stage, on ``meta`` tensors."""
    B, T, H, HV, C = 2, 1024, 16, 32, 64
    own: torch.dtype = getattr(torch, dtype)
    f32 = torch.float32

    def empty(*shape: int, dtype: torch.dtype = own) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    r = Request(
        op="kda_chunk_gate", kind="torch", device=Device("cuda", 0, arch), B=B, T=T, H=H, HV=HV, K=K, V=K, N=B,
        dtype=dtype, state_dtype="float32", scale=K**-0.5, gate="sigmoid", lower_bound=-5.0, output_final_state=True,
    )  # fmt: skip
    q, v, A = empty(B, T, H, K), empty(B, T, HV, K), empty(B, T, HV, C)
    gc, beta = empty(B, T, HV, K, dtype=f32), empty(B, T, HV, dtype=f32)
    h0 = empty(B, HV, K, K, dtype=f32)
    gate = ChunkGateInputs(v, empty(HV, dtype=f32), empty(HV, K, dtype=f32))
    return {
        "gate": partial(chunk_gate, r, gate),
        "recompute": partial(recompute_w_u, r, RecomputeInputs(q, v, beta, gc, A, q)),
        "state": partial(chunk_state, r, ChunkStateInputs(v, v, v, gc, h0)),
        "output": partial(chunk_output, r, ChunkOutputInputs(q, v, gc, A, empty(B, T // C, HV, K, K))),
    }


def _meta_call(arch: str, K: int, dtype: str) -> tuple[Request, IntraInputs]:
    B, T, H = 2, 1024, 16
    half: torch.dtype = getattr(torch, dtype)

    def empty(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    request = Request(
        op="kda_chunk_intra", kind="torch", device=Device("cuda", 0, arch), B=B, T=T, H=H, HV=H, K=K, V=K, N=B,
        dtype=dtype, state_dtype="float32", scale=K**-0.5,
    )  # fmt: skip
    gc, beta = empty(B, T, H, K, dtype=torch.float32), empty(B, T, H, dtype=torch.float32)
    return request, IntraInputs(empty(B, T, H, K), empty(B, T, H, K), gc, beta)
