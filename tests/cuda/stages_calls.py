"""Calls of the training stages for the tests: random inputs, requests, one call of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cuda_calls import Draw, request_of

from kdacore.oracle import stages as exact
from kdacore.types import (
    ChunkGateInputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    RecomputeOutputs,
    Request,
)
from kdacore_cuda.forms.stages import forward as stages


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
            self.k = torch.nn.functional.normalize(
                self.k[:, :1].float() + 0.02 * d.normal(B, T, H, K).float(), dim=-1
            )
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
