"""Candidates by records in the CUDA kernels, emulated: against the oracle, and bit for bit against plain decoding."""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
import pytest
import torch
from cuda_calls import O_BOUND, Draw, error, oracle, request_of
from gated_delta_calls import in_each_order
from pool_checks import pool_of, same_bits
from record_calls import (
    GDN,
    KDA,
    PARTS,
    TOKENS,
    N,
    Server,
    apart,
    check_plain_decoding,
    check_records,
    check_writing_each,
    commit_request,
    gate_of,
    joined,
    options_of,
    poison_records,
    records_of,
    tokens_of,
)

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.oracle.commit import oracle_commit
from kdacore.types import CommitInputs, RecurrentInputs, Request
from kdacore_cuda.forms.commit.forward import commit_records
from kdacore_cuda.forms.recurrent import forward as recurrent


def rows_of(request: Request, inputs: Any) -> Any:
    given = {name: getattr(inputs, name, None) for name in INDEX_VALUES}
    values = {name: x.numpy() for name, x in given.items() if x is not None}
    return state_rows(request, values, lengths_of(request, inputs))


def lengths_of(request: Request, inputs: Any) -> Any:
    packed = getattr(inputs, "cu_seqlens", None)
    return np.full(request.N, request.T) if packed is None else np.diff(packed.numpy())


def copied(inputs: Any) -> Any:
    return type(inputs)(*(None if x is None else x.clone() for x in inputs))


def check(inputs: RecurrentInputs, op: str = KDA, **options: Any) -> None:
    """A call against the oracle, with NaN in what is not read, and by the fast path."""
    request = request_of(op, inputs, **options_of(op, **options))
    poison_records(rows_of(request, inputs), inputs)
    before = copied(inputs)
    want = oracle(request, before)
    got = recurrent.forward(request, inputs)
    compare(request, before, inputs, got.o, want)
    step = recurrent.make_fast_call(request, inputs)
    if step is None:
        return
    once = copied(inputs)
    for name in ("initial_state", "write_pool", *PARTS):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).copy_(getattr(before, name))
    again = step(tuple(inputs))
    assert again is not None
    assert same_bits(again[0], got.o)
    for name in ("initial_state", "write_pool", *PARTS):
        if getattr(inputs, name) is not None:
            assert same_bits(getattr(inputs, name), getattr(once, name))


def compare(request: Request, before: Any, after: Any, o: torch.Tensor, want: Any) -> None:
    rows, lengths = rows_of(request, before), lengths_of(request, before)
    tokens = int(lengths.sum())
    if request.packed:
        o, want_o = o[:, :tokens], want.o[:, :tokens]
    else:
        want_o = want.o
    assert error(o, want_o) < O_BOUND
    pool, was = getattr(after, request.written_pool), getattr(before, request.written_pool)
    written = np.unique(rows.final[rows.final != ZEROS])
    others = np.setdiff1d(np.arange(len(pool)), written)
    assert error(pool[written], want.final_state[written]) < O_BOUND
    assert same_bits(pool[others], was[others])
    check_records(rows, lengths, before._asdict(), after._asdict(), want.written)


def call_of(
    op: str = KDA,
    B: int = 5,
    T: int = 3,
    n: int = 4,
    H: int = 1,
    HV: int = 2,
    K: int = 64,
    *,
    state_dtype: torch.dtype = torch.float32,
    strided: bool = False,
    index: torch.dtype = torch.int64,
    seed: int = 0,
    **more: Any,
) -> RecurrentInputs:
    """Five sequences: replays of some, all and no records; one without a row, one without a slot."""
    d = Draw(seed)
    given: dict[str, Any] = {
        **tokens_of(op, d, B, T, H, HV, K),
        **gate_of(op, d, HV, K),
        "initial_state": pool_of(8, K, state_dtype, HV=HV),
        "state_indices": torch.tensor([3, 5, 1, 0, 7], dtype=index),
        **records_of(op, d, 6, n, H, HV, K, strided),
        "record_indices": torch.tensor([4, 2, -1, 1, 3], dtype=index),
        "num_replayed": torch.tensor([n - 1, n, 2, 1, 0], dtype=index),
    }
    return RecurrentInputs(**(given | more))


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_state_dtypes(
    emulated: list[str], K: int, v_first: bool, state_dtype: torch.dtype
) -> None:
    check(call_of(K=K, state_dtype=state_dtype), state_v_first=v_first)
    assert launched(emulated) == 2 * ["recurrent", "record_tokens"]  # and the shorter way
    assert emulated[0].endswith("-RECORDS1-MODE1")


def launched(names: list[str]) -> list[str]:
    return [name.partition("-")[0] for name in names]


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_grouped_heads_strided_records_and_every_argument(
    emulated: list[str], op: str, v_first: bool
) -> None:
    """Rows read and written apart, another pool, new sequences, 32-bit indices, a pack with empty sequences."""
    inputs = call_of(
        op,
        1,
        16,
        n=5,
        H=2,
        HV=6,
        strided=True,
        index=torch.int32,
        cu_seqlens=torch.tensor([0, 3, 3, 5, 9, 14], dtype=torch.int32),
        has_initial_state=torch.tensor([True, True, False, True, False]),
        write_indices=torch.tensor([2, 3, 4, 1, -1], dtype=torch.int32),
        write_pool=pool_of(6, HV=6, seed=2),
    )
    check(inputs, op, state_v_first=v_first)
    assert emulated[0].endswith("-RECORDS1-MODE0")


@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("v_first", [False, True])
def test_one_decay_a_head(emulated: list[str], n: int, v_first: bool) -> None:
    check(call_of(GDN, T=n, n=n, H=1, HV=4, seed=n), GDN, state_v_first=v_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_of_tokens(emulated: list[str], dtype: torch.dtype) -> None:
    inputs = call_of()
    check(inputs._replace(**{name: getattr(inputs, name).to(dtype) for name in TOKENS}))


def test_records_and_no_counts(emulated: list[str]) -> None:
    """Nothing is replayed; of the sequences with records the pool keeps every bit."""
    inputs = call_of(num_replayed=None)
    before = inputs.initial_state.clone()
    check(inputs)
    assert same_bits(inputs.initial_state[[0, 2, 3, 4, 5, 6, 7]], before[[0, 2, 3, 4, 5, 6, 7]])
    assert not same_bits(inputs.initial_state[1], before[1])


def test_a_fresh_sequence_starts_its_row_from_zeros(emulated: list[str]) -> None:
    fresh = torch.tensor([False, True, True, True, True])
    inputs = call_of(has_initial_state=fresh, num_replayed=None)
    check(inputs)
    assert not inputs.initial_state[3].any()


def test_counts_beyond_the_records_read_no_other_memory(emulated: list[str]) -> None:
    """Such a call is wrong; what is read stays inside the records."""
    inputs = call_of(n=4)
    few, many = copied(inputs), copied(inputs)
    few.num_replayed[:] = torch.tensor([4, 0, 0, 0, 0])
    many.num_replayed[:] = torch.tensor([1000, -3, 0, 0, 0])
    for given in (few, many):
        recurrent.forward(request_of(KDA, given, **options_of(KDA)), given)
    assert same_bits(few.initial_state, many.initial_state)


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_both_modes_give_the_same_bits(emulated: list[str], v_first: bool, state_dtype: torch.dtype) -> None:
    first, second = (call_of(H=2, HV=4, K=128, state_dtype=state_dtype) for _ in range(2))
    second = second._replace(
        v=torch.stack([second.v, second.v], 1)[:, 0], record_key=apart(second.record_key)
    )
    made = [
        recurrent.forward(request_of(KDA, x, **options_of(KDA, state_v_first=v_first)), x).o
        for x in (first, second)
    ]
    assert ["-MODE1" in name for name in emulated[::2]] == [True, False]
    assert same_bits(*made)
    for name in ("initial_state", *PARTS):
        assert same_bits(getattr(first, name), getattr(second, name))


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_no_order_of_blocks_and_threads_changes_a_bit(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, op: str, v_first: bool
) -> None:
    """Blocks of a head's columns, and of value heads that share a key, read records that the call replaces."""

    def call() -> tuple[torch.Tensor, ...]:
        x = call_of(op, T=4, H=1, HV=4, K=128)
        o = recurrent.forward(request_of(op, x, **options_of(op, state_v_first=v_first)), x).o
        return (o, x.initial_state, *[getattr(x, name) for name in PARTS])

    want = call()
    for given in in_each_order(monkeypatch, range(4), (emulator.BACKWARDS, emulator.SHUFFLED)):
        assert all(same_bits(x, y) for x, y in zip(call(), want, strict=True)), given


# --- commit -------------------------------------------------------------------------------------------------------


def commit_of(inputs: RecurrentInputs, **more: Any) -> CommitInputs:
    given = {name: getattr(inputs, name) for name in CommitInputs._fields if hasattr(inputs, name)}
    return CommitInputs(**(given | more))


@pytest.mark.every_other
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moved", [False, True])
def test_commit(emulated: list[str], K: int, v_first: bool, state_dtype: torch.dtype, moved: bool) -> None:
    goals = torch.tensor([2, 6, 4, 3, -1], dtype=torch.int32) if moved else None
    inputs = commit_of(call_of(H=2, HV=4, K=K, state_dtype=state_dtype, strided=moved), write_indices=goals)
    request = commit_request(inputs, v_first)
    poison_records(rows_of(request, inputs), inputs)
    before = copied(inputs)
    want = oracle_commit(request, before)
    assert commit_records(request, inputs).pool is inputs.initial_state
    written = [2, 6] if moved else [3, 5, 7]
    others = [row for row in range(8) if row not in written]
    assert error(inputs.initial_state[written], want.pool[written]) < O_BOUND
    assert same_bits(inputs.initial_state[others], before.initial_state[others])
    assert launched(emulated) == ["commit_records"]


def test_commit_with_one_decay_a_head_and_pools_in_any_layout(emulated: list[str]) -> None:
    inputs = commit_of(call_of(GDN, HV=2))
    pool = torch.randn(8, 2, 64, 64).transpose(2, 3)
    inputs = inputs._replace(initial_state=pool)
    want = oracle_commit(commit_request(inputs), copied(inputs)).pool
    commit_records(commit_request(inputs), inputs)
    assert error(pool, want) < O_BOUND


# --- bit for bit --------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("op", "v_first", "steps", "sizes"),
    [
        (KDA, False, 200, {}),
        (GDN, True, 40, {"H": 2, "HV": 4}),
        (KDA, True, 200, {}),
        (GDN, False, 40, {"H": 1, "HV": 2}),
        (KDA, False, 12, {"H": 1, "HV": 2, "K": 128}),
        (KDA, True, 12, {"H": 1, "HV": 2, "K": 128}),
    ],
)
def test_float32_states_are_those_of_plain_decoding(
    emulated: list[str], op: str, v_first: bool, steps: int, sizes: dict[str, int]
) -> None:
    check_plain_decoding(steps, *[Server(op, v_first=v_first, **sizes) for _ in range(2)])
    plain_kernels = {name for name in emulated if "-RECORDS0" in name}
    assert {name[-1] for name in plain_kernels} == {"3" if op == GDN else "2"}  # those for one token


@pytest.mark.parametrize(
    ("state_dtype", "v_first", "K", "steps"),
    [
        pytest.param(torch.bfloat16, False, 64, 100, marks=pytest.mark.exhaustive),
        (torch.bfloat16, True, 64, 100),
        (torch.bfloat16, False, 128, 8),
        (torch.float16, False, 64, 20),
    ],
)
def test_states_of_16_bits_are_those_of_writing_each(
    emulated: list[str], state_dtype: torch.dtype, v_first: bool, K: int, steps: int
) -> None:
    check_writing_each(steps, *[Server(KDA, state_dtype, v_first, K) for _ in range(2)])
    assert {name.partition("-")[0] for name in emulated} == {"recurrent", "record_tokens", "commit_records"}


@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_replaying_in_a_call_is_to_commit_before_it(
    emulated: list[str], op: str, v_first: bool, state_dtype: torch.dtype
) -> None:
    once, twice = (Server(op, state_dtype, v_first, H=1, HV=2) for _ in range(2))
    rng = np.random.default_rng(3)
    for _ in range(4):
        drafts = once.tokens(rng)
        x = joined(drafts)
        o = once.verify(x)
        twice.commit()
        twice.accepted = torch.zeros(N, dtype=torch.int32)
        assert same_bits(o, twice.verify(x))
        assert same_bits(once.pool, twice.pool)
        for name in PARTS:
            assert same_bits(once.records[name], twice.records[name])
        accepted = [int(rng.integers(1, x["q"].shape[1] + 1)) for x in drafts]
        once.accept(accepted)
        twice.accept(accepted)
    assert "commit_records" in launched(emulated)
