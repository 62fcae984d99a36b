"""The five stage ops of the xla backend against the float64 stage oracles, dense and packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pallas_cases import Case, build, error, to_jax

from kdacore.oracle import stages as oracle
from kdacore.types import (
    ChunkGateInputs,
    ChunkInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    IntraInputs,
    RecomputeInputs,
    Request,
)
from kdacore_pallas.xla import entry_points

CASES = {
    "dense": (Case(B=2, T=100, H=2, HV=4, K=24, V=40, gate="softplus"), 64),
    "pack": (Case(lengths=(0, 1, 33, 70, 0, 16), gate="sigmoid", lower_bound=-5.0, v_first=True), 32),
}


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def start(name: str) -> tuple[Request, ChunkInputs, Any]:
    """The request, its inputs, and the oracle's gc rounded to float32."""
    case, C = CASES[name]
    request, inputs = build(case)
    request = replace(request, chunk_size=C)
    gate = ChunkGateInputs(inputs.g, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens)
    return request, inputs, f32(oracle.oracle_chunk_gate(request, gate))


def check(fn: Any, reference: Any, request: Request, inputs: Any, bound: float = 2e-5) -> None:
    got, want = fn(request, to_jax(inputs)), reference(request, inputs)
    if not isinstance(want, tuple):
        got, want = (got,), (want,)
    for x, ref in zip(got, want, strict=True):
        assert (x is None) == (ref is None)
        if ref is not None:
            assert error(x, ref) < bound


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_each_stage(name: str) -> None:
    request, x, gc = start(name)
    gate = ChunkGateInputs(x.g, x.A_log, x.dt_bias, x.cu_seqlens)
    check(entry_points.chunk_gate, oracle.oracle_chunk_gate, request, gate)
    intra = IntraInputs(x.q, x.k, gc, x.beta, x.cu_seqlens)
    check(entry_points.chunk_intra, oracle.oracle_chunk_intra, request, intra)
    Aqk, Akk = map(f32, oracle.oracle_chunk_intra(request, intra))
    recompute = RecomputeInputs(x.k, x.v, x.beta, gc, Akk, x.q, x.cu_seqlens)
    check(entry_points.recompute_w_u, oracle.oracle_recompute_w_u, request, recompute)
    check(entry_points.recompute_w_u, oracle.oracle_recompute_w_u, request, recompute._replace(q=None))
    w, u, kg, _ = map(f32, oracle.oracle_recompute_w_u(request, recompute))
    # The stages beyond this one see value heads only.
    heads = replace(request, H=request.HV)
    state = ChunkStateInputs(kg, w, u, gc, x.initial_state, x.cu_seqlens)
    check(entry_points.chunk_state, oracle.oracle_chunk_state, heads, state)
    h, v_new, _ = map(f32, oracle.oracle_chunk_state(heads, state))
    output = ChunkOutputInputs(x.q, v_new, gc, Aqk, h, x.cu_seqlens)
    check(entry_points.chunk_output, oracle.oracle_chunk_output, request, output)
