"""What the stages are compiled for ahead of time: both forms of the intra-chunk stage, for every shipped rule."""

from __future__ import annotations

from functools import partial

import torch

from kdacore.types import Device, IntraInputs, Request
from kdacore_triton import configs
from kdacore_triton.aot import AotCase, record
from kdacore_triton.stages import chunk_intra_by_chunk, chunk_intra_by_token

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
    return cases


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
