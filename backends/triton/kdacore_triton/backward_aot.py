"""What the chunk backward is compiled for ahead of time: a training step at K = V = 128 in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kdacore.types import ChunkInputs, Device, OutputGrads, Request, TensorSpec
from kdacore_triton.aot import AotCase, record
from kdacore_triton.chunk_backward import backward

_GATES: dict[str, dict[str, Any]] = {
    "bounded": {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True},
    "unbounded": {"gate": "softplus"},
    "scalar": {"gate": "softplus", "scalar_gate": True},
}
_COMPILED = {"sm_80": "unbounded", "gfx942": "scalar"}
"""The kind of gate that an architecture compiles, else bounded: all of them everywhere would take minutes."""
_SPILLS = 1_000
"""Half a chunk's gradients are more than a program's registers hold; most of that stays in the L1."""


def aot_cases(arch: str) -> list[AotCase]:
    """The three large launches of one backward."""
    gate = _COMPILED.get(arch, "bounded")
    every = record(
        f"chunk backward {gate} K128 bfloat16",
        partial(backward, *_meta_call(arch, gate)),
        matrix_unit=("anchored_grads_kernel", "scan_kernel"),
        max_spills=_SPILLS,
        slow=True,
    )
    return [case for case in every if ":sum_" not in case.name]


def _meta_call(
    arch: str, gate: str, K: int = 128
) -> tuple[Request, ChunkInputs, tuple[Any, ...], OutputGrads]:
    """A grouped call with everything fused and the gradient of a final state. No memory behind it."""
    B, T, H, HV = 1, 1024, 16, 32

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    scalar = gate == "scalar"
    tail = () if scalar else (K,)
    x = ChunkInputs(
        q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, HV, K),
        g=empty(B, T, HV, *tail), beta=empty(B, T, HV),
        A_log=empty(HV, dtype=f32), dt_bias=empty(HV, *tail, dtype=f32),
        initial_state=empty(B, HV, K, K, dtype=f32),
    )  # fmt: skip
    given = tuple(
        (name, TensorSpec(tuple(t.shape), str(t.dtype)[6:]))
        for name, t in zip(ChunkInputs._fields, x, strict=True)
        if t is not None
    )
    request = Request(
        op="chunk_gated_delta_rule" if scalar else "chunk_kda", kind="torch", device=Device("cuda", 0, arch),
        tensors=given, B=B, T=T, H=H, HV=HV, K=K, V=K, N=B, dtype="bfloat16", state_dtype="float32",
        scale=K**-0.5, qk_l2norm=True, beta_sigmoid=True, output_final_state=True, needs_grad=True,
        **_GATES[gate],
    )  # fmt: skip
    return request, x, (), OutputGrads(empty(B, T, HV, K), empty(B, HV, K, K, dtype=f32))
