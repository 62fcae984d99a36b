"""Launches may start before the previous one has ended, and still read its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw

import kdacore

pytestmark = pytest.mark.gpu

CHAIN = 40
Values = tuple[torch.Tensor, torch.Tensor]
"""v and the state, which each call of a chain takes from the one before."""


def follow(step: Callable[[Values], Values], start: Values, wait: bool) -> list[Values]:
    """Every link of a chain of calls, the device waited for between them or not."""
    links = [start]
    for _ in range(CHAIN):
        links.append(step(links[-1]))
        if wait:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return links


def check(step: Callable[[Values], Values], start: Values) -> None:
    want = follow(step, start, wait=True)
    for _ in range(5):
        for i, (a, b) in enumerate(zip(follow(step, start, wait=False), want, strict=True)):
            assert torch.equal(a[0], b[0]), i
            assert torch.equal(a[1], b[1]), i


def draw(B: int, T: int, H: int) -> tuple[dict[str, Any], Values]:
    d = Draw(T + H, device="cuda")
    given = {name: d.normal(B, T, H, 128) for name in ("q", "k")} | {"beta": d.normal(B, T, H)}
    given |= {name: x.cuda() for name, x in d.gate("init", B, T, H, 128).items()}
    return given, (d.normal(B, T, H, 128), d.normal(B, H, 128, 128, dtype=torch.float32))


@pytest.mark.parametrize(
    ("T", "H"),
    [(64, 4), (700, 8), (700, 40), (200, 80)],
    ids=["one segment", "segments", "fused", "shared clusters"],
)
def test_chunk_forward(T: int, H: int) -> None:
    given, start = draw(1, T, H)

    def step(x: Values) -> Values:
        return kdacore.chunk_kda(
            **given, v=x[0], initial_state=x[1], output_final_state=True, **BOUNDED_MODEL, backend="cuda"
        )

    with torch.no_grad():
        check(step, start)


def test_recurrent_and_chunk_forward_alternate() -> None:
    prompt, (v, state) = draw(2, 64, 32)
    token, _ = draw(2, 1, 32)

    def step(x: Values) -> Values:
        o, after = kdacore.chunk_kda(
            **prompt, v=x[0], initial_state=x[1], output_final_state=True, **BOUNDED_MODEL, backend="cuda"
        )
        last, final = kdacore.fused_recurrent_kda(
            **token,
            v=o[:, -1:].contiguous(),
            initial_state=after,
            output_final_state=True,
            **BOUNDED_MODEL,
            backend="cuda",
        )
        return torch.cat([o[:, 1:], last], 1), final

    with torch.no_grad():
        check(step, (v, state))


@pytest.mark.parametrize("H", [4, 80])
def test_training(H: int) -> None:
    given, start = draw(1, 200, H)

    def step(x: Values) -> Values:
        v, state = (y.detach().requires_grad_() for y in x)
        o, _ = kdacore.chunk_kda(**given, v=v, initial_state=state, **BOUNDED_MODEL, backend="cuda")
        dv, d_state = torch.autograd.grad(o, (v, state), o.detach())
        return torch.nn.functional.normalize(dv, dim=-1), torch.nn.functional.normalize(d_state, dim=-1)

    check(step, start)
