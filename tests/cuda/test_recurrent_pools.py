"""The recurrent kernel with state pools as servers use them, emulated, against the oracle of single sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, Draw, error, request_of
from pool_checks import check_pools, pool_of
from server_model import Expected, expected

from kdacore.types import RecurrentInputs
from kdacore_cuda.forms.recurrent import forward as recurrent

NAN = float("nan")
KDA, GDN = "fused_recurrent_kda", "fused_recurrent_gated_delta_rule"


def draw(
    B: int, T: int, H: int = 1, HV: int = 2, K: int = 64, *, seed: int = 0, **more: Any
) -> RecurrentInputs:
    d = Draw(seed)
    return RecurrentInputs(
        q=d.normal(B, T, H, K),
        k=d.normal(B, T, H, K),
        v=d.normal(B, T, HV, K),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, K),
        **more,
    )


def draw_head_gate(N: int, K: int = 64, **more: Any) -> RecurrentInputs:
    """One token of the gated delta rule."""
    d = Draw(N)
    q, k, v = d.normal(N, 1, 1, K), d.normal(N, 1, 1, K), d.normal(N, 1, 2, K)
    gate = {"g": d.normal(N, 1, 2), "A_log": d.uniform(2), "dt_bias": d.normal(2, dtype=torch.float32)}
    return RecurrentInputs(q=q, k=k, v=v, beta=d.normal(N, 1, 2), **gate, **more)


def check(inputs: RecurrentInputs, op: str = KDA, **options: Any) -> Expected:
    options = (MODEL if op == GDN else BOUNDED_MODEL) | options
    return check_pools(recurrent, op, inputs, (O_BOUND, O_BOUND), options)


@pytest.mark.every_other
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.exhaustive)])
def test_a_decode_step_with_every_argument(
    emulated: list[str], K: int, v_first: bool, state_dtype: torch.dtype, index: torch.dtype
) -> None:
    """One launch of the kernel for one token: slots that are none, rows read and written apart, new sequences."""
    pool, other = pool_of(7, K, state_dtype), pool_of(6, K, state_dtype, seed=2)
    pool[3] = NAN  # of a new sequence
    pool[0] = other[0] = NAN
    inputs = draw(
        6,
        1,
        K=K,
        initial_state=pool,
        state_indices=torch.tensor([4, 0, -1, 3, 1, 0], dtype=index),
        has_initial_state=torch.tensor([True, True, False, False, True, False]),
        write_indices=torch.tensor([2, 3, 4, 1, 0, -1], dtype=index),
        write_pool=other,
    )
    want = check(inputs, inplace_state=True, null_index=0, state_v_first=v_first, output_final_state=True)
    assert want.written.tolist() == [False, True, True, False, False, False]
    assert {name[-1] for name in emulated} == {"2"}


@pytest.mark.parametrize("v_first", [False, True])
def test_a_decode_step_with_one_gate_a_head(emulated: list[str], v_first: bool) -> None:
    inputs = draw_head_gate(
        4,
        initial_state=pool_of(5),
        state_indices=torch.tensor([4, 0, -3, 2]),
        has_initial_state=torch.tensor([True, True, True, False]),
        write_indices=torch.tensor([1, 2, 3, -1]),
        out=torch.full((4, 1, 2, 64), NAN, dtype=torch.bfloat16),
    )
    check(inputs, GDN, inplace_state=True, null_index=0, state_v_first=v_first)
    check(inputs._replace(write_indices=None), GDN, state_v_first=v_first, output_final_state=True)
    assert {name[-1] for name in emulated} == {"3"}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_padding_of_several_tokens(emulated: list[str], v_first: bool, state_dtype: torch.dtype) -> None:
    inputs = draw(3, 3, initial_state=pool_of(5, dtype=state_dtype), state_indices=torch.tensor([4, -1, 1]))
    more = {"state_v_first": v_first, "output_final_state": True}
    check(inputs, inplace_state=True, **more)
    check(inputs, **more)
    assert {name[-1] for name in emulated} == {"1"}


@pytest.mark.parametrize("v_first", [False, True])
def test_the_state_after_every_token_goes_to_its_row(emulated: list[str], v_first: bool) -> None:
    """As speculative decoding writes them, columns past a sequence's tokens and null rows left alone."""
    inputs = draw(
        3,
        2,
        initial_state=pool_of(5),
        state_indices=torch.tensor([4, 0, 1]),
        write_indices=torch.tensor([[0, 5, 2], [1, 1, 1], [7, -1, 3]], dtype=torch.int32),
        write_pool=pool_of(9, seed=2),
    )
    want = check(inputs, inplace_state=True, null_index=0, state_v_first=v_first)
    assert want.written.nonzero()[0].tolist() == [5, 7]


@pytest.mark.parametrize("packed", [False, True])
def test_only_the_final_state_of_accepted_candidates(emulated: list[str], packed: bool) -> None:
    B, T = (1, 9) if packed else (4, 2)
    inputs = draw(
        B,
        T,
        initial_state=pool_of(9),
        state_indices=torch.tensor([[8, 1], [2, 6], [3, 4], [0, 0]]),
        num_accepted_tokens=torch.tensor([2, 0, 1, 1], dtype=torch.int32),
        write_indices=torch.tensor([5, 7, 3, 2]),
        cu_seqlens=torch.tensor([0, 2, 3, 5, 7]) if packed else None,
    )
    want = check(inputs, inplace_state=True, null_index=0)
    assert want.written.nonzero()[0].tolist() == [3, 5, 7]


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_padded_packs(emulated: list[str], with_out: bool, v_first: bool) -> None:
    cu = torch.tensor([0, 5, 5, 6, 8, 8, 8], dtype=torch.int32)
    out = torch.full((1, 11, 2, 64), 7.0, dtype=torch.bfloat16) if with_out else None
    inputs = draw(1, 11, initial_state=pool_of(7), cu_seqlens=cu, out=out)
    indices = torch.tensor([4, 3, 5, 0, 0, -1])
    more = {"state_v_first": v_first, "output_final_state": True}
    check(inputs._replace(state_indices=indices), inplace_state=True, null_index=0, **more)
    check(inputs._replace(initial_state=inputs.initial_state[:6]), **more)
    check(inputs._replace(initial_state=None), **more)


def test_a_pack_without_any_token(emulated: list[str]) -> None:
    check(draw(1, 4, cu_seqlens=torch.tensor([0, 0, 0])), output_final_state=True)


def test_an_output_that_has_to_be_copied_keeps_its_unused_rows(emulated: list[str]) -> None:
    out = torch.full((1, 2, 7, 64), 7.0, dtype=torch.bfloat16).transpose(1, 2)
    inputs = draw(1, 7, cu_seqlens=torch.tensor([0, 3, 4]), out=out)
    got = recurrent.forward(request_of(KDA, inputs, **BOUNDED_MODEL), inputs)
    assert got.o is out
    assert (out[:, 4:] == 7.0).all()
    assert not (out[:, :4] == 7.0).all(-1).any()


def test_a_pool_to_write_and_no_state_to_read(emulated: list[str]) -> None:
    rows, pool = torch.tensor([3, 0, -1]), pool_of(4)
    inputs = draw(3, 2, write_pool=pool, write_indices=rows)
    check(inputs, inplace_state=True, output_final_state=True)
    states = 0.3 * torch.randn(3, 2, 64, 64)
    mask = torch.tensor([True, False, True])
    check(inputs._replace(initial_state=states, has_initial_state=mask), inplace_state=True)


def test_pools_whose_rows_are_not_contiguous_are_copied(emulated: list[str]) -> None:
    states = torch.randn(4, 2, 64, 64).transpose(2, 3)
    pool = torch.randn(4, 2, 64, 64).transpose(2, 3)
    inputs = draw(2, 1, initial_state=states, state_indices=torch.tensor([2, 1]), write_pool=pool)
    request = request_of(KDA, inputs, inplace_state=True, output_final_state=True, **BOUNDED_MODEL)
    want = expected(request, inputs, BOUNDED_MODEL)
    got = recurrent.forward(request, inputs)
    assert got.final_state is pool
    assert error(pool, want.pool) < O_BOUND
