"""Whole rows and a rank's slice of them: arrays, the call, its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

import kdacore
from kdacore.bench import arrays as made
from kdacore.bench.cases import Case

TOKENS = ("q", "k", "v", "g", "beta")
SHARED = ("A_log", "dt_bias", "initial_state")
"""What every rank holds; its gradients are shares."""
OPS = {"kda": "chunk_kda", "gdn": "chunk_gated_delta_rule"}


class RowCase(NamedTuple):
    """One row, of which each rank has an equal part."""

    op: str
    """``kda`` or ``gdn``."""
    T: int
    """Tokens of the whole row."""
    H: int
    lengths: tuple[int, ...] = ()
    """Makes it a pack of these sequences."""
    backend: str | None = None
    gate: str = ""
    """``sigmoid`` (bounded by -5) or ``softplus``; empty: the model's."""

    @property
    def kind_of_gate(self) -> str:
        return self.gate or ("sigmoid" if self.op == "kda" else "softplus")

    @property
    def name(self) -> str:
        pack = f", {len(self.lengths)} sequences" if self.lengths else ""
        return f"{self.op} T{self.T} H{self.H}{pack}"

    @property
    def case(self) -> Case:
        return Case(
            name="row",
            op=OPS[self.op],
            T=self.T,
            H=self.H,
            lengths=self.lengths,
            gate=self.kind_of_gate,  # type: ignore[arg-type]
        )


def lengths_of_a_pack(T: int) -> tuple[int, ...]:
    """Sequences of 1 to T / 4 tokens that fill T."""
    rng = np.random.default_rng(T)
    found: list[int] = []
    while sum(found) < T:
        found.append(int(min(T - sum(found), np.exp(rng.uniform(np.log(200), np.log(T // 4))))))
    return tuple(found)


def whole(case: RowCase, device: str, gates: str = "init", states: bool = False) -> dict[str, Any]:
    """The array arguments of the call on the whole row: the same numbers on every rank's GPU."""
    x = made.make(case.case, gates, device)
    if states:
        N = max(1, len(case.lengths))
        rng = torch.Generator().manual_seed(3)
        x["initial_state"] = torch.randn(N, case.H, 128, 128, generator=rng).to(device)
    return x


def slice_of(x: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A rank's arrays, in memory of their own."""
    T = x["q"].shape[1] // size
    return {n: v[:, rank * T : (rank + 1) * T].clone() if n in TOKENS else v for n, v in x.items()}


def call(case: RowCase, x: dict[str, Any], cp: Any = None, final: bool = True) -> tuple[torch.Tensor, Any]:
    """``o`` and the final states, of the whole row or of a slice."""
    function = getattr(kdacore, OPS[case.op])
    options = made.options(case.case) | {"output_final_state": final}
    o, state = function(**x, **options, cp=cp, backend=case.backend)[:2]
    return o, state


def output_gradients(case: RowCase, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``o`` and of the final states of the whole row, drawn at random."""
    rng = torch.Generator(x["v"].device).manual_seed(5)
    do = torch.randn(x["v"].shape, generator=rng, device=x["v"].device).to(x["v"].dtype)
    N = max(1, len(case.lengths))
    return do, torch.randn(N, case.H, 128, 128, generator=rng, device=x["v"].device)


def with_gradients(x: dict[str, Any]) -> dict[str, Any]:
    """The arrays as leaves that need gradients."""
    return {n: v.detach().requires_grad_() if v.is_floating_point() else v for n, v in x.items()}


def training_step(case: RowCase, x: dict[str, Any], do: torch.Tensor, cp: Any = None) -> Any:
    """Forward and backward of ``o``; ``x`` as :func:`with_gradients` returns it. Gradients in ``x``'s order."""
    o, _ = call(case, x, cp, final=False)
    return torch.autograd.grad(o, [v for v in x.values() if v.requires_grad], do)


def results(
    case: RowCase, x: dict[str, Any], do: torch.Tensor, d_final: torch.Tensor, cp: Any = None
) -> dict[str, torch.Tensor]:
    """Outputs, final states and every gradient, by name."""
    leaves = with_gradients(x)
    o, final = call(case, leaves, cp)
    names = [n for n, v in leaves.items() if v.requires_grad]
    found = torch.autograd.grad([o, final], [leaves[n] for n in names], [do, d_final])
    return {"o": o.detach(), "final_state": final.detach()} | {
        f"d{n}": g for n, g in zip(names, found, strict=True)
    }
