"""Cases of the chunk backward to compile ahead of time: training steps, most of them at K = V = 128 in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Device, OutputGrads, Request, TensorSpec
from kdacore_triton.aot import MODEL_DIMS, AotCase, record
from kdacore_triton.chunk_backward import backward
from kdacore_triton.gate_families import EXAMPLE_OPTIONS
from kdacore_triton.verifiers import compiler

_BF16, _F32 = torch.bfloat16, torch.float32


class _Kind(NamedTuple):
    """A training step to compile."""

    gate: str
    K: int = 128
    V: int = 128
    dtype: torch.dtype = _BF16


_MODELS = (*(_Kind("scalar", K, V) for K, V in MODEL_DIMS), *(_Kind("bounded", K, V) for K, V in MODEL_DIMS))
_COMPILED = {
    "sm_80": (_Kind("unbounded"), *_MODELS),
    "sm_86": _MODELS,
    "sm_90": (
        *(_Kind(gate) for gate in ("bounded", "unbounded")),
        *(_Kind("bounded", K, K) for K in (64, 256)),
        _Kind("bounded", dtype=_F32),
        *_MODELS,
    ),
    "gfx942": (_Kind("scalar"),),
}
"""What an architecture compiles, else a bounded gate at K = V = 128: all of them everywhere would take minutes."""
_GRADS = tuple(f"chunk_backward_grads{variant}_kernel" for variant in ("", "_offset", "_scalar"))
_PREPARE = tuple(f"chunk_backward_prepare{variant}_kernel" for variant in ("", "_offset_c32", "_offset_c64"))
_MATRIX_UNIT = {
    _Kind("bounded", dtype=_F32): _GRADS,
    _Kind("bounded", 256, 256): (*_GRADS, *_PREPARE),
    _Kind("bounded", 256, 512): (*_GRADS, *_PREPARE),
    **{_Kind("scalar", K, V): () for K, V in MODEL_DIMS},
}
"""Kernels that must use Hopper's warp-group instructions, where these are not the scan and the gradients."""
_SPILLS: dict[_Kind, dict[str, int]] = {
    _Kind("bounded"): {
        "chunk_backward_prepare_offset_c64_kernel": 128,
        "chunk_backward_grads_offset_kernel": 420,
    },
    _Kind("unbounded"): {
        "chunk_backward_prepare_offset_c32_kernel": 120,
        "chunk_backward_grads_offset_kernel": 40,
        "chunk_backward_scan_kernel": 20,
    },
    _Kind("scalar"): {"chunk_backward_grads_scalar_kernel": 830},
    _Kind("bounded", 64, 64): {
        "chunk_backward_prepare_offset_c64_kernel": 128,
        "chunk_backward_grads_offset_kernel": 330,
    },
    _Kind("bounded", 256, 256): {
        "chunk_backward_prepare_kernel": 55,
        "chunk_backward_scan_kernel": 105,
        "chunk_backward_grads_kernel": 750,
    },
    _Kind("bounded", 256, 512): {
        "chunk_backward_prepare_kernel": 95,
        "chunk_backward_scan_kernel": 105,
        "chunk_backward_grads_kernel": 750,
    },
    _Kind("bounded", 96, 192): {
        "chunk_backward_prepare_offset_c64_kernel": 128,
        "chunk_backward_scan_kernel": 15,
        "chunk_backward_grads_offset_kernel": 420,
    },
    _Kind("scalar", 256, 512): {
        "chunk_backward_scan_kernel": 210,
        "chunk_backward_grads_scalar_kernel": 245,
    },
    _Kind("scalar", 96, 192): {
        "chunk_backward_scan_kernel": 41,
        "chunk_backward_grads_scalar_kernel": 240,
    },
    _Kind("bounded", dtype=_F32): {
        "chunk_backward_prepare_offset_c32_kernel": 340,
        "chunk_backward_grads_offset_kernel": 430,
        "chunk_backward_scan_kernel": 3,
    },
}
"""20 % above the spills that Triton 3.7 or 3.9 produces, on the architecture with the most. The gradients of half a
chunk need more registers than a program has, and a chunk's operands more than a warp has; most spills stay in the L1
cache. Wide heads and float32 are not tuned."""


def aot_cases(arch: str) -> list[AotCase]:
    """The large launches of one backward for each kind."""
    cases = []
    for kind in _COMPILED.get(arch, (_Kind("bounded"),)):
        call = _meta_call(arch, *kind)
        if compiler(call[0]):
            continue
        cases += record(
            f"chunk backward {kind.gate} {_size(kind)} {str(kind.dtype)[6:]}",
            partial(backward, *call),
            matrix_unit=_MATRIX_UNIT.get(kind, (*_GRADS, "chunk_backward_scan_kernel")),
            products=(*_GRADS, *_PREPARE, "chunk_backward_scan_kernel"),
            max_spills=_SPILLS[kind],
            slow=True,
        )
    return [case for case in cases if ":sum_" not in case.name]


def _size(kind: _Kind) -> str:
    return f"K{kind.K}" if kind.K == kind.V else f"K{kind.K} V{kind.V}"


def _meta_call(
    arch: str, gate: str, K: int = 128, V: int = 128, dtype: torch.dtype = _BF16
) -> tuple[Request, ChunkInputs, tuple[Any, ...], OutputGrads]:
    """A grouped call with everything fused and the gradient of a final state, on ``meta`` tensors."""
    B, T, H, HV = 1, 1024, 16, 32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    scalar = gate == "scalar"
    tail = () if scalar else (K,)
    x = ChunkInputs(
        q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, HV, V),
        g=empty(B, T, HV, *tail), beta=empty(B, T, HV),
        A_log=empty(HV, dtype=f32), dt_bias=empty(HV, *tail, dtype=f32),
        initial_state=empty(B, HV, K, V, dtype=f32),
    )  # fmt: skip
    given = tuple(
        (name, TensorSpec(tuple(t.shape), str(t.dtype)[6:]))
        for name, t in zip(ChunkInputs._fields, x, strict=True)
        if t is not None
    )
    request = Request(
        op="chunk_gated_delta_rule" if scalar else "chunk_kda", kind="torch", device=Device("cuda", 0, arch),
        tensors=given, B=B, T=T, H=H, HV=HV, K=K, V=V, N=B, dtype=str(dtype)[6:], state_dtype="float32",
        scale=K**-0.5, qk_l2norm=True, beta_sigmoid=True, output_final_state=True, needs_grad=True,
        **EXAMPLE_OPTIONS[gate],
    )  # fmt: skip
    return request, x, (), OutputGrads(empty(B, T, HV, V), empty(B, HV, K, V, dtype=f32))
