"""The kernel for several tokens of the fused decode step, emulated: against the oracle, and bit for bit against
decoding one token at a time, in every division among blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decode_calls import GDN, KDA, NAN, check, decode_inputs, decode_request
from decode_servers import IN_PLACE, MOST, SLOT, Server, candidates, draw_counts, launched
from gated_delta_calls import in_each_order
from pool_checks import same_bits
from record_calls import PARTS, apart

from kdacore.types import DecodeInputs
from kdacore_cuda.choice import Split
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.decode import forward as decode
from kdacore_cuda.runtime import torch_launch

FEW = (2, 1, 4, 0, 1, 1)
SPLITS = [
    *((KDA, Split(slices, 1, True)) for slices in (1, 2, 4)),
    *(
        (GDN, Split(slices, heads, True))
        for slices, heads in ((1, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4))
    ),
]


def on_device_for(split: Split, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose multiprocessors are as many as lead to this division, with room for all blocks at once."""
    blocks = sequences * split.blocks
    count = {1: -(-blocks // 3), 2: -(-blocks // 4), 4: blocks}[split.slices]
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: count)


def by_states(op: str, lengths: tuple[int, ...] = FEW, windows: bool = False, **given: Any) -> DecodeInputs:
    """Six sequences that write the state after each candidate; they continue from some, all and no candidates."""
    table = torch.randperm(24, generator=torch.Generator().manual_seed(4)).view(6, 4)
    accepted = torch.tensor([2, 1, 3, 4, 0, 1])
    given = {"H": 1, "slots": 24, "columns": 3 if windows else 6} | given
    inputs = decode_inputs(op, lengths=lengths, **given, state_indices=table, num_accepted_tokens=accepted)
    if windows:
        kept = torch.randn(6, 4, 3, inputs.x.shape[2], generator=torch.Generator().manual_seed(1))
        inputs = inputs._replace(conv_windows=kept.bfloat16())
    return inputs


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["records", "records, windows", "states", "states, windows"])
@pytest.mark.parametrize(("op", "split"), SPLITS)
def test_each_division(
    op: str,
    split: Split,
    way: str,
    state_dtype: torch.dtype,
    v_first: bool,
    emulated: list[str],
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if state_dtype == torch.bfloat16 and split.slices == 4:
        return
    on_device_for(split, 6, monkeypatch)
    given: dict[str, Any] = {
        "HV": split.heads,
        "K": 128,
        "state_dtype": state_dtype,
        "windows": "windows" in way,
    }
    inputs = (candidates if "records" in way else by_states)(op, lengths=FEW, **given)
    request = check(inputs, op, state_v_first=v_first, **IN_PLACE)
    assert chosen(request).split == split
    assert launched(emulated) == ["decode_tokens"]


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("op", "split"), [SPLITS[0], SPLITS[1], SPLITS[3], SPLITS[5]])
def test_long_sequences(
    op: str,
    split: Split,
    windows: bool,
    v_first: bool,
    emulated: list[str],
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of more tokens than are staged together; the fifth has no row of records."""
    on_device_for(split, 6, monkeypatch)
    lengths = (8, 4, 0, 5, 16, 2)
    inputs = candidates(op, lengths=lengths, n=8, windows=windows, HV=split.heads, K=128)
    check(inputs, op, state_v_first=v_first, **IN_PLACE)
    assert launched(emulated) == ["decode_tokens"]


PLAIN_CALLS: dict[str, dict[str, Any]] = {
    "pack": {"lengths": (3, 1, 0, 16, 2, 1)},
    "tokens": {"T": 5},
    "no_norm": {"T": 2, "norm_weight": None, "z": None},
    "norm_alone": {"T": 2, "z": None},
    "weights_as_x": {"T": 2, "weights": torch.bfloat16},
    "no_gate_parameters": {"T": 2, "dt_bias": None},
    "fresh": {"T": 2, "has_initial_state": torch.tensor([True, False, True])},
    "moved": {
        "T": 2,
        "state_indices": torch.tensor([0, 1, 2]),
        "write_indices": torch.tensor([6, 5, -1]),
    },
}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("call", PLAIN_CALLS)
def test_tokens_that_are_no_candidates(
    call: str, op: str, v_first: bool, emulated: list[str], poison: None
) -> None:
    """The state after the last one is written."""
    given = PLAIN_CALLS[call]
    N = len(given.get("lengths", range(3)))
    inputs = decode_inputs(op, **({"H": 1, "HV": 2 if op == GDN else 1, "slots": N + 4} | given))
    if call != "moved":
        inputs.state_indices[N - 2] = -1
    check(inputs, op, state_v_first=v_first, inplace_state=True, output_final_state=True)
    assert launched(emulated) == ["decode_tokens"]


def every_argument() -> DecodeInputs:
    """Rows read and written apart, another pool, new sequences, 32-bit indices, the convolution's bias, any strides of
    windows, records in rows that lie apart."""
    inputs = candidates(lengths=FEW, HV=1, K=128, index=torch.int32, windows=True)
    wide = torch.full_like(inputs.initial_state.repeat(2, 1, 1, 1), NAN)
    spread = {name: torch.full((8, 9, *getattr(inputs, name).shape[2:]), NAN) for name in PARTS}
    for name, x in spread.items():
        x[:, 1:8:2] = getattr(inputs, name)
    inputs = inputs._replace(
        **{name: x[:, 1:8:2] for name, x in spread.items()},
        conv_windows=apart(inputs.conv_windows),
        conv_bias=torch.randn(inputs.x.shape[2]),
        write_pool=wide,
        write_indices=torch.tensor([9, 3, 8, 15, -1, 2], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False, True, True, False, True]),
    )
    inputs.num_replayed[1] = 0
    return inputs


def test_every_argument(emulated: list[str], poison: None) -> None:
    check(every_argument(), **IN_PLACE)
    assert launched(emulated) == ["decode_tokens"]


def test_batches_of_one_length(emulated: list[str], poison: None) -> None:
    """No pack, no counts, no norm; of sequences with records the pool keeps every bit."""
    inputs = candidates(GDN, lengths=(), HV=1, K=128, num_replayed=None)._replace(cu_seqlens=None)
    dense = decode_inputs(GDN, B=6, T=3, H=1, HV=1)
    inputs = inputs._replace(**{name: getattr(dense, name) for name in ("x", "g", "beta")})
    inputs = inputs._replace(z=None, norm_weight=None)
    before = inputs.initial_state.clone()
    check(inputs, GDN, **IN_PLACE)
    kept = [3, 5, 1, 7]
    assert same_bits(inputs.initial_state[kept], before[kept])
    assert not same_bits(inputs.initial_state[2], before[2])
    assert launched(emulated) == ["decode_tokens"]


@pytest.mark.parametrize("name", PARTS)
def test_records_whose_elements_lie_apart(name: str, emulated: list[str], poison: None) -> None:
    """Are served by the kernel for every call."""
    inputs = candidates(lengths=(1, 1, 1, 0, 1, 1), HV=1, K=128)
    check(inputs._replace(**{name: apart(getattr(inputs, name))}), **IN_PLACE)
    assert launched(emulated) == ["decode"]


# --- what several blocks and threads share ------------------------------------------------------------------------


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("op", "split"), [SPLITS[i] for i in (0, 4, 2, 6)])
@pytest.mark.parametrize("way", ["records", "states"])
def test_windows_that_share_memory_in_any_order(
    way: str, op: str, split: Split, v_first: bool, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins one token after the one before, as SGLang has them for the gated delta rule. Blocks and threads read
    records and windows that the call replaces: no order of them changes a bit, and the call does what it does with
    windows in memory of their own."""
    lengths = (2, 5, 0, 0, 0, 0) if way == "records" else (2, 4, 0, 0, 0, 0)

    def call(share: bool) -> list[torch.Tensor]:
        if way == "records":
            inputs = candidates(op, lengths=lengths, n=5, windows=True, HV=split.heads, K=128)
        else:
            inputs = by_states(op, lengths, HV=split.heads, windows=True)
        tokens, D = inputs.conv_windows.shape[1], inputs.x.shape[2]
        memory = torch.randn(8, D, tokens + 2, generator=torch.Generator().manual_seed(2)).bfloat16()
        windows = memory.as_strided((8, tokens, 3, D), ((tokens + 2) * D, 1, 1, tokens + 2))
        inputs = inputs._replace(conv_windows=windows if share else windows.clone())
        o = decode.forward(decode_request(op, inputs, state_v_first=v_first, **IN_PLACE), inputs).o
        records = [x for name in PARTS if (x := getattr(inputs, name)) is not None]
        if not share:
            for row, length in zip([4, 2] if records else [0, 1], lengths[:2], strict=True):
                for t in range(length):
                    memory[row, :, t : t + 3] = inputs.conv_windows[row, t].T
        return [o, memory, inputs.conv_state, inputs.initial_state, *records]

    on_device_for(split, 6, monkeypatch)
    expected = call(False)
    assert all(name.startswith("decode_tokens-") for name in emulated)
    assert f"CLUSTER{split.blocks}" in emulated[0]
    for _ in in_each_order(monkeypatch, starved=range(0, 4 * split.blocks, 3), dispatch=range(2)):
        assert all(map(same_bits, call(True), expected))


# --- bit for bit --------------------------------------------------------------------------------------------------


class OneToken(Server):
    """Decodes one token of each sequence at a time, all sequences in a batch."""

    def token(self, at: list[int], there: list[bool]) -> torch.Tensor:
        """``there``: which sequences have one. The others have no slot. Returns the outputs."""
        tokens = {
            name: torch.stack([row[a] for row, a in zip(getattr(self.inputs, name), at, strict=True)])[
                :, None
            ]
            for name in ("x", "g", "beta", "z")
        }
        slots = torch.where(torch.tensor(there), self.inputs.state_indices, 0)
        x = self.inputs._replace(**tokens, **dict.fromkeys(PARTS), state_indices=slots)
        return decode.forward(decode_request(self.op, x, state_v_first=self.v_first, **IN_PLACE), x).o[:, 0]


def verified_and_decoded(op: str, v_first: bool, calls: int, **sizes: Any) -> tuple[Server, Server]:
    """A server that verifies candidates by records, one of three sequences without, and one that decodes what came
    true. Both have given the same outputs."""
    by_records, plain = Server(op, v_first=v_first, **sizes), OneToken(op, v_first=v_first, **sizes)
    rng, at, accepted = np.random.default_rng(1), [0, 0, 0], [0, 0, 0]
    for _ in range(calls):
        counts, true = draw_counts(rng)
        drafts = by_records.verify(at, counts, accepted)
        for t in range(max(true)):
            there = [t < count for count in true]
            got = plain.token([a + t for a in at], there)
            assert all(same_bits(got[n], drafts[n][t]) for n in range(3) if there[n])
        at, accepted = [a + count for a, count in zip(at, true, strict=True)], true
    by_records.commit(accepted)
    return by_records, plain


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(("op", "split"), [SPLITS[i] for i in (0, 1, 2, 4, 6)])
def test_float32_states_are_those_of_one_token_at_a_time(
    op: str, split: Split, v_first: bool, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel for one token, of as many sequences."""
    on_device_for(split, 3, monkeypatch)
    by_records, plain = verified_and_decoded(op, v_first, 3, K=128, HV=split.heads)
    assert same_bits(by_records.inputs.initial_state, plain.inputs.initial_state)
    used = plain.inputs.state_indices
    assert same_bits(by_records.inputs.conv_state[used, :, :3], plain.inputs.conv_state[used, :, :3])
    assert {name.partition("-")[0] for name in emulated} == {
        "decode_tokens",
        "decode_head",
        "commit_records",
        "commit_windows",
    }
    assert all(f"CLUSTER{split.blocks}" in name for name in emulated if name.startswith("decode"))


@pytest.mark.parametrize("v_first", [True, False])
def test_states_in_every_division(
    v_first: bool, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States ``[V, K]`` have the same bits however a head is divided; states ``[K, V]`` those of its division."""
    found = []
    for slices in (1, 2, 4):
        on_device_for(Split(slices, 1, True), 3, monkeypatch)
        server = Server(KDA, v_first=v_first, K=128, HV=1)
        server.verify([0, 0, 0], [MOST, MOST, 1], [0, 0, 0])
        server.commit([MOST, MOST, 0])
        found.append(server.inputs.initial_state)
    assert all(same_bits(x, found[0]) for x in found) == v_first


@pytest.mark.parametrize("v_first", [True, False])
def test_states_of_16_bits_are_those_of_writing_each(v_first: bool, emulated: list[str]) -> None:
    by_records, by_states = (Server(KDA, torch.bfloat16, v_first, HV=1, K=128) for _ in range(2))
    table = torch.arange(3 * MOST).view(3, MOST) + 1  # row 0 is no slot
    pools = {}
    for name in ("initial_state", "conv_state"):
        pool = getattr(by_states.inputs, name)
        pools[name] = torch.full((1 + 3 * MOST, *pool.shape[1:]), NAN).to(pool.dtype)
        pools[name][table[:, 0]] = pool[SLOT]
    rng, at, accepted = np.random.default_rng(2), [0, 0, 0], [0, 0, 0]
    for _ in range(3):
        counts, true = draw_counts(rng)
        drafts = by_records.verify(at, counts, accepted)
        before = torch.tensor([max(count, 1) for count in accepted])
        want = by_states.call(at, counts, **pools, state_indices=table, num_accepted_tokens=before)
        assert all(map(same_bits, drafts, want))
        at, accepted = [a + count for a, count in zip(at, true, strict=True)], true
    by_records.commit(accepted)
    last = table[torch.arange(3), torch.tensor(accepted) - 1]
    assert same_bits(by_records.inputs.initial_state[SLOT], pools["initial_state"][last])
    assert {name.partition("-")[0] for name in emulated[:-2]} == {"decode_tokens"}
