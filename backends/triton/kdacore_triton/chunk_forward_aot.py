"""Cases of the chunk forward to compile ahead of time: a call for every rule of the shipped configurations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from kdacore.types import ChunkInputs, Device, Request, TensorSpec
from kdacore_triton import chunk_forward_slices, configs
from kdacore_triton.aot import MODEL_DIMS, AotCase, record
from kdacore_triton.chunk_forward import forward
from kdacore_triton.gate_families import EXAMPLE_OPTIONS
from kdacore_triton.verifiers import compiler

_SPILLS = 320
"""prepare holds whole rows in one warp's registers and spills some (144 on sm_90, 203 on sm_100): measured faster
than fewer rows or more warps."""
_SERVER_SPILLS = {8: 640}
"""Allowed spills by number of heads, as a server calls it: 8 heads take chunks of 32, whose prepare spills 442 on
sm_90 with Triton 3.9."""
_UNTUNED_SPILLS = 20_000
"""float32 and wide heads: right, but not tuned; their registers overflow by far."""


def aot_cases(arch: str) -> list[AotCase]:
    """Every kind of gate, at the head size and dtype that each rule is for."""
    cases = []
    for choice in configs.shipped_for(arch):
        if choice.kernel != "chunk_forward":
            continue
        low, high = choice.when.get("K", (None, None))
        K = 256 if low else high or 128
        dtype = torch.float32 if choice.when.get("half") is False else torch.bfloat16
        only = choice.when.get("gate")
        for gate in [only] if only else EXAMPLE_OPTIONS:
            segment = f" in {choice.config['segment']}s" if choice.config["segment"] else ""
            name = f"chunk forward {gate} K{K} {str(dtype)[6:]} C{choice.config['C']}{segment}"
            call = _meta_call(arch, gate, K, dtype)
            if compiler(call[0]):
                continue
            tuned = K == 128 and dtype == torch.bfloat16 and choice.config["C"] == 16 and gate != "scalar"
            with configs.override("chunk_forward", choice.config):
                cases += record(
                    name,
                    partial(forward, *call),
                    matrix_unit=("chunk_forward_scan_kernel",) if tuned else (),
                    max_spills=_SPILLS if tuned else _UNTUNED_SPILLS,
                    slow=not tuned,
                )
    for (K, V), gate, dtype in product(MODEL_DIMS, EXAMPLE_OPTIONS, (torch.bfloat16, torch.float32)):
        call = _meta_call(arch, gate, K, dtype, V=V)
        if not compiler(call[0]):
            name = f"chunk forward {gate} K{K} V{V} {str(dtype)[6:]}"
            cases += record(name, partial(forward, *call), max_spills=_UNTUNED_SPILLS, slow=True)
    for gate, heads in (("bounded", 12), ("scalar", 12), ("scalar", 32)):
        cases += record(
            f"chunk forward {gate} H{heads} of a slice",
            partial(_slice, *_meta_call(arch, gate, 128, torch.bfloat16, heads)),
            max_spills=_SPILLS if gate != "scalar" else _UNTUNED_SPILLS,
            slow=(gate, heads) != ("scalar", 12),
        )
    call = _meta_call(arch, "scalar", 128, torch.float16)  # its products take tf32 operands
    name = "chunk forward scalar K128 float16"
    cases += record(name, partial(forward, *call), max_spills=_UNTUNED_SPILLS, slow=True)
    for gate, heads in (("bounded", 12), ("bounded", 64), ("bounded", 8), ("scalar", 12)):
        call = _server_call(*_meta_call(arch, gate, 128, torch.bfloat16, heads))
        name = f"chunk forward {gate} H{heads} as a server calls it"
        spills = _SERVER_SPILLS.get(heads, _SPILLS) if gate != "scalar" else _UNTUNED_SPILLS
        cases += record(
            name, partial(forward, *call), max_spills=spills, slow=(gate, heads) != ("bounded", 12)
        )
    return cases


def _slice(request: Request, x: ChunkInputs) -> None:
    """The same call on a slice that continues on other ranks."""
    pending = chunk_forward_slices.begin(request, x, None).pending
    chunk_forward_slices.finish(request, x, pending, torch.empty(request.state_shape, device="meta"))


def _server_call(request: Request, x: ChunkInputs) -> tuple[Request, ChunkInputs]:
    """The same call as a server makes it: a pack, states in a pool, a checkpoint, an output that is there."""

    def numbers(dtype: torch.dtype = torch.int32, size: int = 1) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    pool = torch.empty(32, *request.state_shape[1:], device="meta")
    x = x._replace(
        initial_state=pool, cu_seqlens=numbers(size=2), state_indices=numbers(), has_initial_state=numbers(torch.bool),
        write_indices=numbers(), write_pool=pool, checkpoint_offsets=numbers(), checkpoint_indices=numbers(),
        out=torch.empty_like(x.v),
    )  # fmt: skip
    given = zip(ChunkInputs._fields, x, strict=True)
    tensors = tuple((n, TensorSpec(tuple(t.shape), str(t.dtype)[6:])) for n, t in given if t is not None)
    request = replace(
        request, packed=True, tensors=tensors, pool_size=32, state_indices_ndim=1, inplace_state=True, null_index=0,
        write_indices_ndim=1, write_pool_size=32, checkpoint_count=1,
    )  # fmt: skip
    return request, x


def _meta_call(
    arch: str, gate: str, K: int, dtype: torch.dtype, H: int = 32, V: int | None = None
) -> tuple[Request, ChunkInputs]:
    """A call with everything fused, long enough for segments, on ``meta`` tensors. V is K unless given."""
    B, T, V = 1, 4096, V or K

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scalar = gate == "scalar"
    x = ChunkInputs(
        q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, H, V),
        g=empty(B, T, H) if scalar else empty(B, T, H, K), beta=empty(B, T, H),
        A_log=empty(H, dtype=torch.float32),
        dt_bias=empty(*((H,) if scalar else (H, K)), dtype=torch.float32),
    )  # fmt: skip
    request = Request(
        op="chunk_gated_delta_rule" if scalar else "chunk_kda", kind="torch", device=Device("cuda", 0, arch),
        B=B, T=T, H=H, HV=H, K=K, V=V, N=B, dtype=str(dtype)[6:], state_dtype="float32", scale=K**-0.5,
        qk_l2norm=True, beta_sigmoid=True, output_final_state=True, **EXAMPLE_OPTIONS[gate],
    )  # fmt: skip
    return request, x
