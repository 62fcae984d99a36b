"""Checks that the forms of the chunk forward have in common: the same inputs and assertions for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, O_BOUND, STATE_BOUND, error, oracle

from kdacore.types import ChunkInputs, Outputs, Request

TOKENS = ("q", "k", "v", "g", "beta")


def check_grouped_values_and_strides(check: Callable[..., Outputs]) -> None:
    wide = torch.randn(1, 140, 2, 3 * 128).to(torch.bfloat16)
    inputs = draw(140, 2, 4)._replace(q=wide[..., :128], k=wide[..., 256:])
    check(inputs, **BOUNDED_MODEL)


def check_gate_and_beta_in_float16(check: Callable[..., Outputs]) -> None:
    inputs = draw(140)
    assert inputs.dt_bias is not None
    half = {name: getattr(inputs, name).half() for name in ("g", "beta", "dt_bias")}
    check(inputs._replace(**half), allow_neg_eigval=True, scale=0.2, **BOUNDED_MODEL)


def check_later_tokens_change_no_bit(run: Callable[..., Outputs], options: dict[str, Any]) -> None:
    """Changed or appended."""
    inputs, noise = draw(270), draw(270, seed=7)
    whole = run(inputs, checkpoint_every=64, **options)
    for cut in (40, 128, 200):
        kept = {n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS}
        short = run(inputs._replace(**kept), checkpoint_every=64, **options)
        assert torch.equal(short.o, whole.o[:, :cut])
        assert short.checkpoints is not None
        assert whole.checkpoints is not None
        assert torch.equal(short.checkpoints, whole.checkpoints[:, : -(-cut // 64)])
    mixed = {n: torch.cat([getattr(inputs, n)[:, :200], getattr(noise, n)[:, 200:]], 1) for n in TOKENS}
    assert torch.equal(run(inputs._replace(**mixed), **options).o[:, :200], whole.o[:, :200])


def check_against_the_oracle(
    forward: Callable[[Request, ChunkInputs], Outputs],
    request: Callable[..., Request],
    inputs: ChunkInputs,
    options: dict[str, Any],
) -> None:
    """Long sequences on a GPU, with a checkpoint every 192 tokens."""
    r = request(inputs, checkpoint_every=192, **options)
    got = forward(r, inputs)
    host = ChunkInputs(*(None if x is None else x.cpu() for x in inputs))
    want = oracle(request(host, checkpoint_every=192, **options), host)
    assert error(got.o, want.o) < 2 * O_BOUND
    assert error(got.final_state, want.final_state) < 2 * STATE_BOUND
    assert error(got.checkpoints, want.checkpoints) < 2 * STATE_BOUND
