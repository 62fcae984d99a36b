"""Ranks as threads of one process, on the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import rank_calls
import torch
from thread_ranks import on_threads

import kdacore
from kdacore.calls.values import Shape

pytestmark = pytest.mark.quick


def check(whole: Any, size: int) -> None:
    shares = on_threads(size, lambda ranks: rank_calls.run_rank(whole, ranks, size, ranks.rank))
    rank_calls.check(whole, shares)


@pytest.mark.parametrize("whole", rank_calls.cases(3), ids=lambda whole: whole.note)
def test_three_ranks(whole: Any) -> None:
    check(whole, 3)


def test_many_ranks_with_slow_gates() -> None:
    """The state of the first tokens reaches the last of eight ranks through seven maps."""
    shape = Shape(T=8 * 16, H=1, HV=1, K=16, V=16)
    check(rank_calls.case(shape=shape, gates="zero", factor=2.0, note="eight"), 8)


def test_what_other_sequences_hold_does_not_matter() -> None:
    """NaN in one sequence reaches no other, on whichever rank it lies."""

    def run(poison: bool) -> list[Any]:
        def work(ranks: Any) -> Any:
            generator = torch.Generator().manual_seed(ranks.rank)
            x = [torch.randn(1, 16, 1, 16, generator=generator) for _ in range(3)]
            g, beta = (
                -torch.rand(1, 16, 1, 16, generator=generator),
                torch.rand(1, 16, 1, generator=generator),
            )
            if poison and ranks.rank == 0:
                x[2][:, :10] = torch.nan
            if poison and ranks.rank == 2:
                x[2][:, 3:] = torch.nan
            offsets = torch.tensor([0, 10, 35, 48])
            return kdacore.chunk_kda(*x, g, beta, cu_seqlens=offsets, cp=ranks, output_final_state=True)

        return on_threads(3, work)

    plain, poisoned = run(False), run(True)
    assert torch.equal(poisoned[0][0][:, 10:], plain[0][0][:, 10:])
    assert torch.equal(poisoned[1][0], plain[1][0])
    assert torch.equal(poisoned[2][0][:, :3], plain[2][0][:, :3])
    for rank in range(3):
        assert torch.equal(poisoned[rank][1][1], plain[rank][1][1])
        assert poisoned[rank][1][0].isnan().any() and poisoned[rank][1][2].isnan().any()


def test_later_tokens_change_no_earlier_bit() -> None:
    """Nor on other ranks: of results, and of the gradients of a loss on the tokens before."""

    def run(changed: bool) -> list[Any]:
        def work(ranks: Any) -> Any:
            generator = torch.Generator().manual_seed(ranks.rank)
            x = [torch.randn(1, 16, 1, 16, generator=generator) for _ in range(3)]
            x += [-torch.rand(1, 16, 1, 16, generator=generator), torch.rand(1, 16, 1, generator=generator)]
            if changed and ranks.rank == 1:
                for a in x:
                    a[:, 5:] *= 0.5
            if changed and ranks.rank == 2:
                for a in x:
                    a *= 0.25
            for a in x:
                a.requires_grad_(True)
            o, _ = kdacore.chunk_kda(*x, cp=ranks)
            weight = torch.ones_like(o) if ranks.rank == 0 else torch.zeros_like(o)
            weight[:, :5] = 1 if ranks.rank < 2 else 0
            o.backward(weight)
            return o.detach(), *[a.grad for a in x]

        return on_threads(3, work)

    for rank, (one, two) in enumerate(zip(run(False), run(True), strict=True)):
        for a, b in zip(one, two, strict=True):
            if rank == 0:
                assert torch.equal(a, b)
            elif rank == 1:
                assert torch.equal(a[:, :5], b[:, :5])
    assert not any(x.any() for x in run(True)[2][1:])


def test_a_thread_that_fails_ends_the_others() -> None:
    def work(ranks: Any) -> Any:
        if ranks.rank == 1:
            raise ZeroDivisionError
        x = torch.zeros(1, 4, 1, 16)
        return kdacore.chunk_kda(x, x, x, x, x[..., 0], cp=ranks)

    with pytest.raises(ZeroDivisionError):
        on_threads(2, work)


def test_ranks_that_disagree() -> None:
    def work(ranks: Any) -> Any:
        x = torch.zeros(1, 4 + ranks.rank, 1, 16)
        with pytest.raises(
            kdacore.ContractError, match=r"'q': got .*4, 1, 16\] on rank 0; .*5, 1, 16\] on rank 1"
        ):
            kdacore.chunk_kda(x, x, x, x, x[..., 0], cp=ranks)

    on_threads(2, work)
