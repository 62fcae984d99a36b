"""Calls from JAX in the emulator, and the same calls from torch, whose bits they must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda_calls import Draw, request_of
from emulated_backend import on_hopper
from jax_emulation import to_jax, to_torch

import kdacore
from kdacore.types import ChunkInputs

BACKEND = "emulated"


def draw(B: int, T: int, H: int, HV: int = 0, K: int = 128, seed: int = 0, **more: Any) -> ChunkInputs:
    d, HV = Draw(seed), HV or H
    fields = {
        "q": d.normal(B, T, H, K),
        "k": d.normal(B, T, H, K),
        "v": d.normal(B, T, HV, K),
        "beta": d.normal(B, T, HV),
        **d.gate("random", B, T, HV, K),
        **more,
    }
    return ChunkInputs(**fields)


def normal(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def function(op: str, inputs: Any, options: dict[str, Any], others: dict[str, Any]) -> Callable[[Any], Any]:
    """The public op as a function of its arrays in JAX, by name."""
    positional = ("q", "k", "v", "g", "beta")

    def call(x: dict[str, Any]) -> Any:
        keywords = {name: a for name, a in x.items() if name not in positional}
        return getattr(kdacore, op)(
            *(x[n] for n in positional), **keywords, **options, **others, backend=BACKEND
        )

    return call


def arrays_of(inputs: Any) -> dict[str, Any]:
    return {name: to_jax(x) for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}


def check(got: Any, want: Any) -> None:
    """The same bits, None where None is."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            x, y = to_torch(a), b.detach()
            assert x.shape == y.shape and x.dtype == y.dtype
            assert torch.equal(x.view(torch.uint8), y.contiguous().view(torch.uint8))


def from_torch(forward: Any, op: str, inputs: Any, options: dict[str, Any]) -> list[Any]:
    copies = type(inputs)(*(None if x is None else x.clone() for x in inputs))
    request = request_of(op, copies, **options)
    out = on_hopper(forward)(request, copies)
    return [x for x in (out.o, out.final_state, out.checkpoints) if x is not None]
