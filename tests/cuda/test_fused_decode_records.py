"""Candidates by records in the fused decode step of the CUDA backend, emulated: against the oracle, and bit for bit
against decoding without records; and windows of candidates that share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decode_calls import GDN, KDA, NAN, check, decode_inputs, decode_request
from decode_servers import IN_PLACE, LENGTHS, MOST, SLOT, Server, candidates, draw_counts, launched
from emulated_backend import NAME, registered
from gated_delta_calls import in_each_order
from pool_checks import same_bits
from record_calls import PARTS, apart, commit_request

import kdacore
from kdacore.oracle.commit import oracle_commit
from kdacore.types import CommitInputs, DecodeInputs
from kdacore_cuda import unsupported_calls
from kdacore_cuda.forms.commit.forward import commit_records
from kdacore_cuda.forms.decode import forward as decode


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_records(op: str, windows: bool, v_first: bool, emulated: list[str], poison: None) -> None:
    check(candidates(op, windows=windows, HV=1), op, state_v_first=v_first, **IN_PLACE)
    assert launched(emulated) == ["decode"]
    assert "-RECORDS1-MODE0" in emulated[0]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_states_of_every_dtype(
    op: str, v_first: bool, state_dtype: torch.dtype, emulated: list[str], poison: None
) -> None:
    """As models are served."""
    given: dict[str, Any] = {"HV": 1, "K": 128, "state_dtype": state_dtype}
    check(candidates(op, lengths=(2, 1, 4, 0, 1, 1), **given), op, state_v_first=v_first, **IN_PLACE)
    assert launched(emulated) == ["decode" if state_dtype == torch.float16 else "decode_tokens"]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("group", [2, 3])
def test_value_heads_that_share_keys(
    group: int, windows: bool, op: str, emulated: list[str], poison: None
) -> None:
    """Their keys and windows are left to a second launch."""
    check(candidates(op, windows=windows, H=2, HV=2 * group), op, **IN_PLACE)
    assert launched(emulated) == ["decode", "decode_windows"]


@pytest.mark.parametrize("group", [1, 2])
def test_convolved_tokens(group: int, emulated: list[str], poison: None) -> None:
    check(candidates(HV=group, conv_weight=None, conv_state=None), **IN_PLACE)
    assert launched(emulated) == ["decode", "decode_windows"][:group]


def test_every_argument(emulated: list[str], poison: None) -> None:
    """Rows read and written apart, another pool, new sequences, 32-bit indices, records of any strides."""
    inputs = candidates(HV=2, index=torch.int32, windows=True, conv_bias=torch.randn(4 * 64))
    wide = torch.full_like(inputs.initial_state.repeat(2, 1, 1, 1), NAN)
    inputs = inputs._replace(
        **{name: apart(getattr(inputs, name)) for name in (*PARTS, "conv_windows")},
        write_pool=wide,
        write_indices=torch.tensor([9, 3, 8, 15, -1, 2], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False, True, True, False, True]),
        conv_indices=torch.tensor([2, 6, 7, 3, 1, 4], dtype=torch.int32),
    )
    inputs.num_replayed[1] = 0
    check(inputs, **IN_PLACE)


def test_batches_of_one_length(emulated: list[str], poison: None) -> None:
    """No pack, no counts; of sequences with records the pool keeps every bit."""
    inputs = candidates(lengths=(), HV=1, num_replayed=None)._replace(cu_seqlens=None)
    dense = decode_inputs(B=6, T=2, H=1, HV=1, K=64)
    inputs = inputs._replace(**{name: getattr(dense, name) for name in ("x", "g", "beta", "z")})
    before = inputs.initial_state.clone()
    check(inputs, **IN_PLACE)
    kept = [3, 5, 1, 7]
    assert same_bits(inputs.initial_state[kept], before[kept])
    assert not same_bits(inputs.initial_state[2], before[2])


def test_rows_of_windows_without_records(emulated: list[str], poison: None) -> None:
    """As SGLang names them beside states of candidates."""
    T, rows = 3, torch.tensor([4, 0, 6])
    table = torch.arange(T) + T * rows[:, None]
    given: dict[str, Any] = {"T": T, "H": 1, "HV": 2, "K": 64, "slots": 4}
    inputs = decode_inputs(**given, state_indices=torch.tensor([3, 1, -1]), write_indices=table)
    kept = torch.randn(8, T, 3, inputs.x.shape[2], generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = torch.full((8 * T, *inputs.initial_state.shape[1:]), NAN)
    check(inputs._replace(conv_windows=kept, record_indices=rows, write_pool=wide), **IN_PLACE)
    assert launched(emulated) == ["decode", "decode_windows"]


def test_counts_beyond_the_records_read_no_other_memory(emulated: list[str]) -> None:
    """Such a call is wrong; what is read of records stays inside them."""
    few, many = (candidates(HV=1, windows=True) for _ in range(2))
    few.num_replayed[:] = torch.tensor([4, 0, 0, 0, 0, 0])
    many.num_replayed[:] = torch.tensor([1000, -3, 0, 0, 0, 0])
    for inputs in (few, many):
        inputs.conv_windows.zero_()
        decode.forward(decode_request(KDA, inputs, **IN_PLACE), inputs)
    assert same_bits(few.initial_state, many.initial_state)


@pytest.mark.parametrize("group", [1, 2])
def test_no_order_of_blocks_and_threads_changes_a_bit(
    group: int, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and threads read records and windows that the call replaces."""
    first: list[torch.Tensor] = []
    for _ in in_each_order(monkeypatch, starved=range(0, 8, 3), dispatch=range(2)):
        inputs = candidates(GDN, HV=group, lengths=(2, 2, 0, 0, 0, 0))
        o = decode.forward(decode_request(GDN, inputs, **IN_PLACE), inputs).o
        written = [o, inputs.initial_state, inputs.conv_state, *(getattr(inputs, name) for name in PARTS)]
        assert all(map(same_bits, written, first or written))
        first = written


def candidates_by_states(group: int, rows: torch.Tensor | None) -> DecodeInputs:
    """Six sequences that write the state after each candidate; they continue from some, all and no candidates.
    ``rows``: of their windows."""
    table = torch.randperm(24, generator=torch.Generator().manual_seed(4)).view(6, 4)
    accepted = torch.tensor([2, 1, 3, 4, 0, 1])
    given: dict[str, Any] = {"H": 1, "HV": group, "K": 64, "slots": 24}
    inputs = decode_inputs(GDN, lengths=LENGTHS, **given, state_indices=table, num_accepted_tokens=accepted)
    return inputs._replace(record_indices=rows)


@pytest.mark.every_other
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("way", ["states", "states, named rows", "records"])
def test_windows_that_share_memory(
    way: str, group: int, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins one token after the one before, as SGLang has them for the gated delta rule. The call does what it
    does with the same windows in memory of their own."""

    def call(share: bool) -> tuple[torch.Tensor, DecodeInputs, torch.Tensor]:
        if way == "records":
            inputs = candidates(GDN, windows=True, HV=group)
            inputs.num_replayed[0] = 2
        else:
            rows = torch.tensor([4, 2, 6, 1, 5, 3]) if way.endswith("rows") else None
            inputs = candidates_by_states(group, rows)
        D = inputs.x.shape[2]
        memory = torch.randn(8, D, 4 + 2, generator=torch.Generator().manual_seed(2)).bfloat16()
        windows = memory.as_strided((8, 4, 3, D), (6 * D, 1, 1, 6))
        inputs = inputs._replace(conv_windows=windows if share else windows.clone())
        o = decode.forward(decode_request(GDN, inputs, **IN_PLACE), inputs).o
        return o, inputs, memory

    o, apart, expected = call(False)
    rows = range(6) if apart.record_indices is None else apart.record_indices.tolist()
    for row, length in zip(rows, LENGTHS, strict=True):
        for t in range(length if row >= 0 else 0):
            expected[row, :, t : t + 3] = apart.conv_windows[row, t].T
    for _ in in_each_order(monkeypatch, starved=range(0, 8, 3), dispatch=range(2)):
        got, inputs, memory = call(True)
        assert same_bits(got, o)
        assert same_bits(memory, expected)
        assert same_bits(inputs.conv_state, apart.conv_state)
        assert same_bits(inputs.initial_state, apart.initial_state)


# --- commit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_commit_of_windows(windows: bool, dtype: torch.dtype, emulated: list[str]) -> None:
    """Of all, no and some records; one without a row of them, one without a slot. Any strides and rows."""
    inputs = candidates(GDN, windows=windows, HV=2, index=torch.int32)
    given = {name: getattr(inputs, name) for name in CommitInputs._fields if name in inputs._fields}
    conv = {name: apart(given[name].to(dtype)) for name in ("conv_state", "conv_windows")[: 1 + windows]}
    given |= {**conv, "conv_indices": torch.tensor([2, 6, -1, 3, 1, 4]) if windows else None}
    call = CommitInputs(**given)
    request = commit_request(call)
    before = CommitInputs(*(None if x is None else x.clone() for x in call))
    want = oracle_commit(request, before)
    got = commit_records(request, call)
    assert got.pool is call.initial_state and got.conv_state is call.conv_state
    assert same_bits(call.conv_state, torch.from_numpy(want.conv_state).to(dtype))
    kept = [row for row in range(8) if row not in (3, 5, 1, 7)]
    assert same_bits(call.initial_state[kept], before.initial_state[kept])
    assert [name.partition("-")[0] for name in emulated] == ["commit_records", "commit_windows"]


# --- bit for bit --------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        (KDA, {"HV": 1}),
        (GDN, {"v_first": True}),
        (GDN, {}),
        (KDA, {}),
        (GDN, {"K": 128, "HV": 1}),
        (KDA, {"K": 128, "HV": 1, "v_first": True}),
    ],
)
def test_float32_states_are_those_of_plain_decoding(
    op: str, sizes: dict[str, int], emulated: list[str]
) -> None:
    """By the kernel for every call: that for one token has its own order of sums."""
    by_records, plain = (Server(op, **sizes) for _ in range(2))
    rng, at, accepted = np.random.default_rng(1), [0, 0, 0], [0, 0, 0]
    for _ in range(6):
        counts, true = draw_counts(rng)
        drafts = by_records.verify(at, counts, accepted)
        for t in range(max(true)):
            there = [int(t < count) for count in true]
            got = plain.call([a + t for a in at], there)
            assert all(same_bits(got[n], drafts[n][t : t + there[n]]) for n in range(3))
        at, accepted = [a + count for a, count in zip(at, true, strict=True)], true
    by_records.commit(accepted)
    assert same_bits(by_records.inputs.initial_state, plain.inputs.initial_state)
    assert same_bits(by_records.inputs.conv_state[SLOT, :, :3], plain.inputs.conv_state[SLOT, :, :3])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_are_those_of_writing_each(state_dtype: torch.dtype, emulated: list[str]) -> None:
    by_records, by_states = (Server(KDA, state_dtype, HV=1) for _ in range(2))
    pool = by_states.inputs.initial_state
    table = torch.arange(5, 5 + 3 * MOST).view(3, MOST)
    wide = torch.full((5 + 3 * MOST, *pool.shape[1:]), NAN).to(state_dtype)
    wide[:5] = pool
    reads = torch.cat([SLOT[:, None], table[:, 1:]], 1)
    rng, at, accepted = np.random.default_rng(2), [0, 0, 0], [0, 0, 0]
    for _ in range(4):
        counts, true = draw_counts(rng)
        drafts = by_records.verify(at, counts, accepted)
        # The sequence without records continues from its window, and the state, after its one token.
        before = torch.tensor([max(count, 1) for count in accepted])
        more = {"state_indices": reads, "num_accepted_tokens": before, "write_indices": table}
        want = by_states.call(at, counts, initial_state=wide, conv_indices=SLOT, **more)
        assert all(map(same_bits, drafts, want))
        at, accepted, reads = [a + count for a, count in zip(at, true, strict=True)], true, table


# --- what is declined, and what explain says ----------------------------------------------------------------------


def test_without_nvrtc_usual_states_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported_calls, "_has_compiler", lambda: False)
    for K, state_dtype, packaged in (
        (128, torch.float32, True),
        (128, torch.bfloat16, True),
        (128, torch.float16, False),
        (64, torch.float32, False),
    ):
        request = decode_request(KDA, candidates(K=K, state_dtype=state_dtype), **IN_PLACE)
        found = unsupported_calls.decode_records(request)
        assert (found is None) == packaged
        assert found is None or found.code == "unavailable"
    assert unsupported_calls.decode_records(decode_request(KDA, decode_inputs(K=64))) is None


@pytest.mark.parametrize("op", [KDA, GDN])
def test_explain_names_records(op: str) -> None:
    inputs = candidates(op, HV=1)
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    given["records"] = tuple(given.pop(name) for name in PARTS)
    with registered(op):
        found = kdacore.explain(op, **given, **IN_PLACE, use_gate_in_kernel=True, backend=NAME)
    assert "candidates by records" in found.candidate(NAME).form
