"""Calls of the backward of ``chunk_gated_delta_rule`` for the tests: requests, gradients of results, a comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_calls import Draw, error, request_of
from gated_delta_calls import OP

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import choice
from kdacore_cuda.forms.gated_delta import backward_launches, gradients, launches
from kdacore_reference.oracle import oracle_backward

BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice that on calls as short as these."""
EVERY = (True,) * 8
WHOLE = ["chunk_records", "walk_backward", "unit_grads", "gate_sums"]
"""The kernels of a backward for which nothing was saved."""


def carry(monkeypatch: pytest.MonkeyPatch, warpgroups: int) -> None:
    """Blocks of so many warpgroups in every walk."""
    for module in (launches, backward_launches):
        monkeypatch.setattr(module, "walk_warpgroups", lambda *given: warpgroups)


def leave_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads as many: a forward with disable_recompute saves."""
    monkeypatch.setattr(choice, "most_cut", lambda *given: 0)
    monkeypatch.setattr(choice, "use_cut_backward", lambda *given: False)


def training(inputs: ChunkInputs, **options: Any) -> Request:
    return dataclasses.replace(request_of(OP, inputs, **options), needs_grad=True)


def output_grads(r: Request, inputs: ChunkInputs, seed: int = 17) -> OutputGrads:
    """Random ones, of both results that a call has."""
    d = Draw(seed)
    d_o, dtype = d.normal(*inputs.v.shape, dtype=inputs.v.dtype), getattr(torch, r.state_dtype)
    return OutputGrads(d_o, d.normal(*r.state_shape, dtype=dtype) if r.output_final_state else None)


def run(r: Request, inputs: ChunkInputs, grads: OutputGrads, saved: Any = ()) -> InputGrads:
    return gradients.backward(r, inputs, saved, grads)


def hold(got: InputGrads, want: InputGrads, inputs: ChunkInputs, loose: float) -> None:
    """Every gradient is there, in its input's form, and within the bound."""
    for name, mine, exact in zip(InputGrads._fields, got, want, strict=True):
        assert (mine is None) == (exact is None), name
        if mine is not None:
            given = getattr(inputs, name)
            assert mine.dtype == given.dtype and mine.shape == given.shape and mine.is_contiguous(), name
            assert error(mine, exact) < loose * BOUND, name


def check(inputs: ChunkInputs, *, loose: float = 2.0, final: bool = True, **options: Any) -> InputGrads:
    """Run, compare every gradient with the oracle, return what was computed."""
    r = training(inputs, output_final_state=final, **options)
    grads = output_grads(r, inputs)
    got = run(r, inputs, grads)
    hold(got, oracle_backward(r, inputs, grads), inputs, loose)
    return got
