"""The training stages, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import O_BOUND, Draw, error, request_of

from kdacore.types import ChunkGateInputs, IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda import stages
from kdacore_reference import oracle_stages as exact

MIXED = [0, 1, 17, 64, 15, 0, 70, 33]
"""Lengths of a pack: empty, one token, a whole chunk, a chunk and some."""


def stage_request(op: str, inputs: Any, **options: Any) -> Request:
    return request_of(op, inputs, **({"chunk_size": 64} | options))


class Drawn:
    """Random inputs of both stages; Akk is the exact inverse, rounded."""

    def __init__(
        self, T: int = 0, *, B: int = 1, H: int = 1, HV: int = 1, K: int = 64, V: int = 64, gate: str = "spread",
        lengths: list[int] | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0, collinear: bool = False,
    ) -> None:  # fmt: skip
        d = Draw(seed, dtype)
        self.cu = None if lengths is None else torch.tensor(np.cumsum([0, *lengths]))
        T = sum(lengths) if lengths else T
        self.q, self.k = d.unit(B, T, H, K), d.unit(B, T, H, K)
        if collinear:
            self.k = torch.nn.functional.normalize(self.k[:, :1].float() + 0.02 * d.normal(B, T, H, K).float(), dim=-1)
            self.k = self.k.to(dtype)
        self.v, self.beta = d.normal(B, T, HV, V), d.uniform(B, T, HV)
        if collinear:
            self.beta = 0.98 + 0.02 * self.beta
        g = ChunkGateInputs(d.gate(gate, B, T, HV, K)["g"], cu_seqlens=self.cu)
        gc = exact.oracle_chunk_gate(stage_request("kda_chunk_gate", g), g)
        self.gc = torch.tensor(gc, dtype=torch.float32)

    def intra(self, **changes: Any) -> IntraInputs:
        return IntraInputs(self.q, self.k, self.gc, self.beta, self.cu)._replace(**changes)

    def recompute(self, with_q: bool = True) -> RecomputeInputs:
        x = self.intra()
        Akk = exact.oracle_chunk_intra(stage_request("kda_chunk_intra", x), x).Akk
        Akk = torch.tensor(Akk).to(self.k.dtype)
        return RecomputeInputs(self.k, self.v, self.beta, self.gc, Akk, self.q if with_q else None, self.cu)


def intra(inputs: IntraInputs, **options: Any) -> IntraOutputs:
    return stages.chunk_intra(stage_request("kda_chunk_intra", inputs, **options), inputs)


def recompute(inputs: RecomputeInputs) -> RecomputeOutputs:
    return stages.recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)


def check_intra(inputs: IntraInputs, loose: float = 1.0) -> IntraOutputs:
    want = exact.oracle_chunk_intra(stage_request("kda_chunk_intra", inputs), inputs)
    got = intra(inputs)
    assert got.Aqk.dtype == got.Akk.dtype == inputs.q.dtype
    assert error(got.Aqk, want.Aqk) < loose * O_BOUND
    assert error(got.Akk, want.Akk) < loose * O_BOUND
    upper = ~np.tril(np.ones((64, 64), dtype=bool))
    assert not got.Aqk.float().numpy()[want.Aqk == 0].any() or (want.Aqk[:, :64][..., upper[0]] == 0).all()
    return got


def check_recompute(inputs: RecomputeInputs) -> RecomputeOutputs:
    want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
    got = recompute(inputs)
    for mine, right in zip(got, want, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert mine.dtype == inputs.k.dtype
            assert error(mine, right) < O_BOUND
    return got


SHAPES = [
    pytest.param({"T": 70}, id="tail"),
    pytest.param({"T": 64, "K": 128, "V": 128}, id="K128"),
    pytest.param({"T": 33, "H": 2, "HV": 4, "B": 2}, id="grouped"),
    pytest.param({"lengths": MIXED}, id="packed"),
    pytest.param({"T": 40, "dtype": torch.float16}, id="float16"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_intra(emulated: list[str], shape: dict[str, Any]) -> None:
    check_intra(Drawn(**shape).intra())


@pytest.mark.parametrize("gate", ["slow", "fast", "mixed"])
def test_intra_gates(emulated: list[str], gate: str) -> None:
    check_intra(Drawn(64, gate=gate).intra(), 2.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_q", [False, True])
def test_recompute(emulated: list[str], shape: dict[str, Any], with_q: bool) -> None:
    check_recompute(Drawn(**shape).recompute(with_q))
