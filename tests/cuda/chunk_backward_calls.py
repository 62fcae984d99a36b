"""Calls of single backward kernels for the tests: inputs, the workspace as byte images, a launch, and what it left."""

from __future__ import annotations

from typing import Any

import chunk_backward_model as model
import numpy as np
import single_launches
import torch
from cuda_calls import Draw

from kdacore.types import ChunkInputs, InputGrads, Request
from kdacore_cuda.forms.backward.workspace import WORKSPACE
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_reference.oracle import to_float64


def draw(
    T: int = 150, H: int = 1, HV: int = 1, *, B: int = 1, gate: str = "random", seed: int = 0, **more: Any
) -> ChunkInputs:
    """Random bfloat16 inputs, K = V = 128; ``more`` replaces or adds arrays."""
    d = Draw(seed)
    raw = gate in ("random", "init")
    make = d.normal if raw else d.unit
    fields = {
        "q": make(B, T, H, 128),
        "k": make(B, T, H, 128),
        "v": d.normal(B, T, HV, 128),
        "beta": d.normal(B, T, HV) if raw else d.uniform(B, T, HV),
        **d.gate(gate, B, T, HV, 128),
        **more,
    }
    return ChunkInputs(**fields)


def same_gradients(got: Any, want: Any) -> None:
    """Bit for bit, and the same ones absent."""
    for name, a, b in zip(InputGrads._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def launch(
    kernel: Kernel,
    request: Request,
    inputs: ChunkInputs,
    given: dict[str, model.F64],
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype] | None],
    device: str = "cpu",
    blocks: int | None = None,
    sizes: dict[str, int] | None = None,
    **arrays: torch.Tensor,
) -> dict[str, model.F64]:
    """One launch, in the emulator where a test asks for it.

    Args:
        given: matrices of the workspace, as the model makes them.
        wanted: arrays that the kernel writes, by name; None: an array of the workspace, else shape and dtype. All
            begin as NaN.
        device: where it runs; everything is copied there first.
        blocks: of the grid; None: as many as the kernel says.
        sizes: numbers among its parameters, by name, beside those of every backward.
        arrays: other tensors it reads, by the name of their parameter.

    Returns:
        What is in each wanted array, matrices of the workspace unswizzled.
    """
    plan = single_launches.plan_of(request).with_numbers(**(sizes or {}))
    inputs = ChunkInputs(*(None if x is None else x.to(device) for x in inputs))
    work = {name: _image(name, x).to(device) for name, x in given.items()}
    arrays = {name: x.to(device) for name, x in arrays.items()}
    out: dict[str, torch.Tensor] = {}
    for name, made in wanted.items():
        if made is None:
            # Also written in place where it is given: u becomes v_new.
            fresh = single_launches.make_workspace(plan, inputs.q, name)[name]
            out[name] = work.pop(name) if name in work else fresh.fill_(float("nan"))
        else:
            out[name] = torch.full(made[0], float("nan"), dtype=made[1], device=device)
    single_launches.launch(kernel, plan, inputs, {**work, **out, **arrays}, blocks)
    return {name: _matrices(name, x) if wanted[name] is None else to_float64(x) for name, x in out.items()}


def _image(name: str, matrices: model.F64) -> torch.Tensor:
    if WORKSPACE[name][1] == "float32":
        return torch.from_numpy(matrices).float().flatten(2)
    return model.to_images(matrices)


def _matrices(name: str, array: torch.Tensor) -> model.F64:
    rows, columns = model.WIDTHS[name]
    if array.dtype == torch.float32:
        return to_float64(array).reshape(*array.shape[:2], rows, columns)
    return model.from_images(array, rows, columns)


def filled(request: Request, inputs: ChunkInputs) -> list[tuple[int, int]]:
    """Slot and value head of every chunk there is: the others hold what was there before."""
    return [(c.slot, hv) for c in model.chunks(request, inputs) for hv in range(request.HV)]


def worst(
    got: model.F64, want: model.F64, where: list[tuple[int, int]], sizes: list[float] | None = None
) -> float:
    """Largest relative error in the 2-norm over the chunks of ``where``; NaN stays NaN.

    Args:
        sizes: norms that errors are relative to, if larger than the chunk's own.
    """
    floors = [0.0] * len(where) if sizes is None else sizes
    pairs = [(got[at], want[at], size) for at, size in zip(where, floors, strict=True)]
    return float(
        np.max([np.linalg.norm(a - b) / (max(np.linalg.norm(b), size) or 1.0) for a, b, size in pairs])
    )
