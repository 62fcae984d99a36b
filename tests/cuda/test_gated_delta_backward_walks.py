"""The walks of the gated delta rule's backward, emulated, each against its model."""

from __future__ import annotations

from typing import Any

import chunk_backward_model as chunk_model
import gated_delta_model as model
import numpy as np
import pytest
import torch
from chunk_backward_calls import filled, worst
from chunk_backward_model import F64
from cuda_calls import MODEL, Draw, error, request_of
from single_launches import launch_kernel

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import backward_walk_kernel
from kdacore_cuda.request_encoding import division
from kdacore_reference.oracle import to_float64

pytestmark = pytest.mark.usefixtures("poison")
NAN, OP = float("nan"), "chunk_gated_delta_rule"
BOUND = 3.5e-3
"""Relative, of each chunk's matrix: a few roundings to bfloat16, and those of the states before."""

WARPGROUPS = pytest.mark.parametrize("warpgroups", [1, 2])
LENGTHS = pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129, 200])


def draw(
    T: int = 150, H: int = 1, HV: int = 2, B: int = 1, gate: str = "init", seed: int = 0, **arrays: Any
) -> ChunkInputs:
    d = Draw(seed)
    raw = gate in ("random", "init")
    gates = {n: x if n == "A_log" else x[..., 0] for n, x in d.gate(gate, B, T, HV, 1).items()}
    q, k, v = d.normal(B, T, H, 128), d.normal(B, T, H, 128), d.normal(B, T, HV, 128)
    beta = d.normal(B, T, HV) if raw else d.uniform(B, T, HV)
    return ChunkInputs(q, k, v, beta=beta, **gates)._replace(**arrays)


def draw_states(n: int, hv: int = 2, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    return Draw(seed).normal(n, hv, 128, 128, dtype=dtype)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN before and behind them."""
    edge = 64 * int(np.prod(x.shape[2:]))
    buffer = torch.full((x.numel() + 2 * edge,), NAN, dtype=x.dtype)
    inside = buffer[edge:-edge].view(x.shape)
    inside.copy_(x)
    return inside


def nan_like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(0).new_empty(shape, dtype=dtype).fill_(NAN)


def options_of(gate: str) -> dict[str, Any]:
    return MODEL if gate in ("random", "init") else {"use_qk_l2norm_in_kernel": True}


def numbers_of(request: Request, **more: int) -> dict[str, Any]:
    """Those that a launch of the gated delta rule takes."""
    numbers = chunk_numbers(request) | more
    for name, divisor in (("h", request.H), ("group", request.HV // request.H)):
        numbers[f"{name}_factor"], numbers[f"{name}_shift"] = division(divisor)
    return numbers


def walk_back(
    inputs: ChunkInputs,
    *,
    warpgroups: int = 1,
    d_final: torch.Tensor | None = None,
    flags: int = 0,
    d_o: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """One launch of the reverse walk, held to the model. The model's records are the kernel's; numbers that only other
    launches need are NaN."""
    request = request_of(OP, inputs, output_final_state=True, **MODEL | options)
    work = model.records(request, inputs, flags)
    for name in model.SCALARS:
        work[name][:] = NAN
    packed = model.pack_records(work)
    d_o = Draw(100).normal(*inputs.v.shape) if d_o is None else d_o
    slots, HV = chunk_slots(request), request.HV
    got = {
        "state_grads": nan_like(slots, HV, 128 * 128),
        "dv": nan_like(*inputs.v.shape),
    }
    if inputs.initial_state is not None:
        got["d_h0"] = nan_like(*inputs.initial_state.shape, dtype=inputs.initial_state.dtype)
    arrays = {"records": packed, "q": guarded(inputs.q), "k": guarded(inputs.k), "d_o": guarded(d_o)}
    arrays |= {"cu_seqlens": inputs.cu_seqlens, "d_ht": d_final}
    launch_kernel(
        backward_walk_kernel(warpgroups, with_states=False),
        2 // warpgroups * request.N * HV,
        inputs.q,
        {name: x for name, x in (arrays | got).items() if x is not None},
        **numbers_of(request),
    )
    want, dv, d_initial = model.reverse(request, inputs, model.unpack_records(packed), d_o, d_final)
    check_slots(request, inputs, matrices(got["state_grads"], 128, 128), want["state_grads"])
    check_tokens(request, inputs, got["dv"], dv)
    if inputs.initial_state is not None:
        assert error(got["d_h0"], d_initial) < BOUND
    return got


def matrices(images: torch.Tensor, rows: int, columns: int) -> F64:
    return chunk_model.from_images(images, rows, columns)


def check_slots(request: Request, inputs: ChunkInputs, got: F64, want: F64) -> None:
    """Each chunk's matrix within the bound; slots that no sequence fills unwritten."""
    where = filled(request, inputs)
    assert worst(got, want, where) < BOUND if where else True
    elsewhere = np.ones(got.shape[:2], bool)
    for at in where:
        elsewhere[at] = False
    assert np.isnan(got[elsewhere]).all()


def check_tokens(request: Request, inputs: ChunkInputs, got: torch.Tensor, want: F64) -> None:
    """Each chunk's rows within the bound; those behind a pack unwritten."""
    mine = to_float64(got)
    for c in chunk_model.chunks(request, inputs):
        at = c.batch, c.tokens
        assert np.linalg.norm(mine[at] - want[at]) <= BOUND * np.linalg.norm(want[at])
    assert np.isnan(mine[np.isnan(want)]).all()


def same(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, NaN too."""
    return x.keys() == y.keys() and all(
        torch.equal(x[name].view(torch.uint8), y[name].view(torch.uint8)) for name in x
    )


# --- the reverse walk ------------------------------------------------------------------------------------------------


@LENGTHS
@WARPGROUPS
def test_reverse_lengths(emulated: list[str], T: int, warpgroups: int) -> None:
    walk_back(draw(T, B=1 + T % 2, seed=T), warpgroups=warpgroups)


@WARPGROUPS
def test_reverse_many_chunks(emulated: list[str], warpgroups: int) -> None:
    """Rings run round more than twice."""
    inputs = draw(9 * 64 + 5, HV=1, seed=3, initial_state=draw_states(1, 1))
    walk_back(inputs, warpgroups=warpgroups, d_final=draw_states(1, 1, seed=6))
