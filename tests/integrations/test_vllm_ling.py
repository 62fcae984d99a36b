"""Ling-3.0's calls of Kimi Delta Attention in vLLM, computed by kdacore and compared with the recurrence in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import BY_VLLM, Counts, close, packages, paged_pool, recurrence

import kdacore

MODULE = "vllm.model_executor.models.bailing_moe_v3"
H, K, BOUND = 2, 16, -5.0


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with packages(tmp_path_factory.mktemp("ling"), fake_vllm.layers()) as modules:
        yield modules[MODULE]


class Tokens:
    """Random inputs of a pack with padding behind it, gate and beta as the model computes them before a call."""

    def __init__(self, *lengths: int, padding: int = 0) -> None:
        torch.manual_seed(sum(lengths) + padding)
        self.lengths, T = lengths, sum(lengths) + padding
        self.given = {name: torch.randn(1, T, H, K) for name in "qkv"}
        self.given["g"] = BOUND * torch.randn(1, T, H, K).sigmoid()
        self.given["beta"] = torch.randn(1, T, H).sigmoid()
        self.given["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    def rows(self, n: int, tokens: int | None = None) -> slice:
        start = int(self.given["cu_seqlens"][n])
        return slice(start, start + (self.lengths[n] if tokens is None else tokens))

    def expected(self, n: int, state: torch.Tensor, tokens: int | None = None) -> Any:
        here = self.rows(n, tokens)
        return recurrence(*(self.given[name][0, here] for name in ("q", "k", "v", "g", "beta")), state)


@pytest.mark.parametrize("safe", [True, False])
def test_prefill(ling: Any, safe: bool) -> None:
    """The bound of a safe gate is handed on; without one there is nothing to promise."""
    x, states, counts = Tokens(40, 0, 17, padding=3), torch.randn(3, H, K, K), Counts("ling_chunk_kda")
    with kdacore.record_selections() as ran:
        o, final = ling.chunk_kda(
            **x.given, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True,
            safe_gate=safe, lower_bound=BOUND,
        )  # fmt: skip
    (call,) = ran
    assert (call.op, call.request.safe_gate) == ("chunk_kda", safe) and (counts.served, counts.declined) == (
        1,
        0,
    )
    for n in (0, 2):
        want, after = x.expected(n, states[n])
        close(o[0, x.rows(n)], want)
        close(final[n], after)


def test_decode_with_null_slots(ling: Any) -> None:
    x, pool, counts = Tokens(1, 1, 1), paged_pool(5, H, K, K), Counts("ling_fused_recurrent_kda")
    before, rows = pool.clone(), torch.tensor([3, 0, 1, 4], dtype=torch.int32)
    o, state = ling.fused_recurrent_kda(
        **x.given, initial_state=pool, use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=BOUND,
        ssm_state_indices=rows,
    )  # fmt: skip
    assert (counts.served, counts.declined) == (1, 0) and state is pool
    for n in (0, 2):
        want, after = x.expected(n, before[rows[n]])
        close(o[0, x.rows(n)], want)
        close(pool[rows[n]], after)
    assert pool[0].isnan().all() and torch.equal(pool[[2, 4]], before[[2, 4]])


def test_drafted_tokens(ling: Any) -> None:
    x, pool, counts = Tokens(3, 2, padding=2), paged_pool(7, H, K, K), Counts("ling_fused_recurrent_kda_fwd")
    before = pool.clone()
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    o, _ = ling.fused_recurrent_kda_fwd(
        **x.given, scale=K**-0.5, initial_state=pool, inplace_final_state=True, ssm_state_indices=rows,
        num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert (counts.served, counts.declined) == (1, 0)
    for n, start in ((0, 2), (1, 4)):
        close(o[0, x.rows(n)], x.expected(n, before[start])[0])
        for t in range(x.lengths[n]):
            close(pool[rows[n, t]], x.expected(n, before[start], t + 1)[1])


def test_states_that_are_not_written_in_place_are_declined(ling: Any) -> None:
    x, pool, counts = Tokens(1, 1), paged_pool(3, H, K, K), Counts("ling_fused_recurrent_kda")
    rows = torch.tensor([1, 2], dtype=torch.int32)
    call = {**x.given, "initial_state": pool, "ssm_state_indices": rows, "inplace_final_state": False}
    assert ling.fused_recurrent_kda(**call) == BY_VLLM
    assert (counts.served, counts.declined) == (0, 1) and "inplace_final_state" in counts.reason
