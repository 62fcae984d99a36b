"""Calls of flash-linear-attention with ``cp_context``, for ranks that are threads or processes."""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kdacore

H, HV, K, V, TOKENS = 1, 2, 16, 16, 40
MODULES = {"chunk_kda": "fla.ops.kda", "chunk_gated_delta_rule": "fla.ops.gated_delta_rule"}
LENGTHS = [(TOKENS,), (5, 23, 12), (20, 20), (1, 38, 1)]
PARAMETERS = ("A_log", "dt_bias")


def integration() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of fla, where there is no GPU
        return importlib.import_module("kdacore.integrations.fla")


def inputs(function: str, lengths: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """The whole row, with raw gates and logits of beta, and the gradient of its outputs; on every rank the same."""
    made = torch.Generator().manual_seed(len(lengths))
    gate = (HV, K) if function == "chunk_kda" else (HV,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    arrays = {
        "q": normal(1, TOKENS, H, K),
        "k": normal(1, TOKENS, H, K),
        "v": normal(1, TOKENS, HV, V),
        "g": normal(1, TOKENS, *gate),
        "beta": normal(1, TOKENS, HV),
        "A_log": normal(HV).abs(),
        "dt_bias": normal(*gate).flatten(),
    }
    return arrays, normal(1, TOKENS, HV, V)


def run_rank(
    function: str, lengths: tuple[int, ...], group: Any, rank: int, size: int, on_host: bool
) -> dict[str, Tensor]:
    """``o`` and the gradients of a rank. ``on_host``: with a copy of the offsets in host memory."""
    arrays, do = inputs(function, lengths)
    offsets = torch.tensor([*itertools.accumulate(lengths, initial=0)])
    given: dict[str, Any] = {"cu_seqlens_cpu": offsets.clone()} if on_host else {}
    make = importlib.import_module("fla.ops.cp.context").get_cp_cu_seqlens
    context = make(offsets, world_size=size, rank=rank, group=group, conv1d_kernel_size=4, **given)
    offsets.fill_(-1)  # the caller's buffer for the next batch
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    x = {n: (a if n in PARAMETERS else a[:, mine]).clone().requires_grad_(True) for n, a in arrays.items()}
    with kdacore.record_selections() as ran:
        o, final = getattr(importlib.import_module(MODULES[function]), function)(
            **x,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=context.cu_seqlens,
            cp_context=context,
        )
    assert final is None and [s.backend for s in ran] == ["reference"]
    o.backward(do[:, mine])
    return {"o": o.detach(), **{name: a.grad for name, a in x.items() if a.grad is not None}}


def check(function: str, lengths: tuple[int, ...], shares: list[dict[str, Tensor]]) -> None:
    """What all ranks have, against the recurrence on the whole row in float64."""
    wanted = expected(*inputs(function, lengths), lengths)
    for name, want in wanted.items():
        found = [share[name].double() for share in shares]
        got = torch.stack(found).sum(0) if name in PARAMETERS else torch.cat(found, 1)
        error = (got - want).norm() / want.norm()
        assert error <= (2e-5 if name == "o" else 5e-5), (function, lengths, name, error)


def expected(arrays: dict[str, Tensor], do: Tensor, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    x = {name: a.double().requires_grad_(True) for name, a in arrays.items()}
    gate = x["g"].shape[2:]
    rate = x["A_log"].exp().view(HV, *[1] * (len(gate) - 1))
    decay = (-rate * F.softplus(x["g"] + x["dt_bias"].view(gate))).exp().view(TOKENS, HV, -1, 1)
    q, k = (a[0] / (a[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (x["q"], x["k"]))
    v, beta = x["v"][0], x["beta"][0].sigmoid()
    starts = set(itertools.accumulate(lengths, initial=0))
    outputs = []
    state = torch.zeros(HV, K, V, dtype=torch.float64)
    for t in range(TOKENS):
        state = (torch.zeros_like(state) if t in starts else state) * decay[t]
        change = beta[t][:, None] * (v[t] - (k[t][..., None] * state).sum(1))
        state = state + k[t][..., None] * change[:, None]
        outputs.append(K**-0.5 * (q[t][..., None] * state).sum(1))
    o = torch.stack(outputs).unsqueeze(0)
    o.backward(do.double())
    return {"o": o.detach(), **{name: a.grad for name, a in x.items() if a.grad is not None}}
