"""The kernel of the fused decode step whose blocks take several sequences in turn, emulated: against the oracle, and
bit for bit against that whose blocks take one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_calls import KDA, WRITTEN, check, decode_inputs, decode_request
from decode_servers import IN_PLACE, candidates, launched
from gated_delta_calls import in_each_order
from pool_checks import same_bits
from record_calls import PARTS
from test_decode_tokens import FEW, PLAIN_CALLS, by_states, every_argument, verified_and_decoded

from kdacore.types import DecodeInputs
from kdacore_cuda import choice
from kdacore_cuda.choice import Split
from kdacore_cuda.forms.decode import forward as decode
from kdacore_cuda.runtime import torch_launch

NAME = "decode_sequences"
WHOLE = Split(1, 1, True)
WAYS = ("records", "records, windows", "states", "states, windows")
HEADS: dict[str, Any] = {"HV": 1, "K": 128}


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "USE_TURNS", True)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with two places: the first block has the first, third and fifth sequence, the second the others."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 1)


def inputs_of(way: str, lengths: tuple[int, ...] = FEW, **given: Any) -> DecodeInputs:
    return (candidates if "records" in way else by_states)(
        lengths=lengths, windows="windows" in way, **({"op": KDA} | HEADS | given)
    )


def results_of(inputs: DecodeInputs, **options: Any) -> list[torch.Tensor]:
    """What a call returns and writes, of copies of its pools."""
    pools = {name: x.clone() for name in WRITTEN if (x := getattr(inputs, name)) is not None}
    inputs = inputs._replace(**pools)
    o = decode.forward(decode_request(KDA, inputs, **(IN_PLACE | options)), inputs).o
    return [o, *(getattr(inputs, name) for name in pools)]


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_against_the_oracle(
    way: str, v_first: bool, emulated: list[str], poison: None, in_turn: None
) -> None:
    check(inputs_of(way), state_v_first=v_first, **IN_PLACE)
    assert launched(emulated) == [NAME]


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_bits_of_one_sequence_a_block(
    way: str, v_first: bool, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and replays of fewer tokens than are staged together, as many, and more."""
    lengths, more = FEW, {}
    if "records" in way:
        lengths, more = (4, 8, 0, 5, 2, 1), {"n": 8}
    inputs, found = inputs_of(way, lengths, **more), []
    for count in (2, 1):
        monkeypatch.setattr(torch_launch, "multiprocessors", lambda index, count=count: count)
        found.append(results_of(inputs, state_v_first=v_first))
    assert all(map(same_bits, *found))
    assert [name.partition("-")[0] for name in emulated] == ["decode_tokens", NAME]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("windows", [False, True])
def test_long_sequences(
    windows: bool, v_first: bool, emulated: list[str], poison: None, in_turn: None
) -> None:
    """Of more tokens than are staged together; the fifth has no row of records."""
    inputs = candidates(lengths=(8, 4, 0, 5, 16, 2), n=8, windows=windows, **HEADS)
    check(inputs, state_v_first=v_first, **IN_PLACE)
    assert launched(emulated) == [NAME]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("call", PLAIN_CALLS)
def test_tokens_that_are_no_candidates(
    call: str, v_first: bool, emulated: list[str], poison: None, in_turn: None
) -> None:
    """The state after the last one is written."""
    given = PLAIN_CALLS[call]
    N = len(given["lengths"]) if "lengths" in given else 6
    if call == "moved":
        given = given | {"state_indices": torch.arange(6), "write_indices": torch.tensor([6, 9, -1, 7, 8, 3])}
    if call == "fresh":
        given = given | {"has_initial_state": torch.tensor([True, False, True, True, False, True])}
    inputs = decode_inputs(KDA, **({"B": 6, "H": 1, "HV": 1, "slots": N + 4} | given))
    if call != "moved":
        inputs.state_indices[N - 2] = -1
    check(inputs, state_v_first=v_first, inplace_state=True, output_final_state=True)
    assert launched(emulated) == [NAME]


def test_every_argument(emulated: list[str], poison: None, in_turn: None) -> None:
    check(every_argument(), **IN_PLACE)
    assert launched(emulated) == [NAME]


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_heads_and_windows_whose_channels_lie_side_by_side(
    side_by_side: bool, heads: int, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers have them, with lengths that no number of blocks divides."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 3)
    inputs = candidates(lengths=FEW, H=heads, HV=heads, K=128)
    if side_by_side:
        conv = inputs.conv_state.transpose(1, 2).contiguous().transpose(1, 2)
        inputs = inputs._replace(conv_state=conv)
    check(inputs, **IN_PLACE)
    assert launched(emulated) == [NAME]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("way", ["records", "states"])
def test_no_order_of_blocks_and_threads_changes_a_bit(
    way: str, v_first: bool, emulated: list[str], monkeypatch: pytest.MonkeyPatch, in_turn: None
) -> None:
    """Windows of candidates share memory: each begins one token after the one before."""
    lengths = (2, 5, 0, 0, 1, 0) if way == "records" else (2, 4, 0, 0, 1, 0)

    def call(share: bool) -> list[torch.Tensor]:
        inputs = inputs_of(f"{way}, windows", lengths, **({"n": 5} if way == "records" else {}))
        tokens, D = inputs.conv_windows.shape[1], inputs.x.shape[2]
        memory = torch.randn(8, D, tokens + 2, generator=torch.Generator().manual_seed(2)).bfloat16()
        windows = memory.as_strided((8, tokens, 3, D), ((tokens + 2) * D, 1, 1, tokens + 2))
        inputs = inputs._replace(conv_windows=windows if share else windows.clone())
        o = decode.forward(decode_request(KDA, inputs, state_v_first=v_first, **IN_PLACE), inputs).o
        records = [x for name in PARTS if (x := getattr(inputs, name)) is not None]
        return [o, inputs.conv_state, inputs.initial_state, *records]

    expected = call(False)
    for _ in in_each_order(monkeypatch, starved=range(0, 4, 3), dispatch=range(2)):
        assert all(map(same_bits, call(True), expected))
    assert {name.partition("-")[0] for name in emulated} == {NAME}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [True, False])
def test_float32_states_are_those_of_one_token_at_a_time(
    v_first: bool, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel for one token, of as many sequences."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 1)
    by_records, plain = verified_and_decoded(KDA, v_first, 3, K=128, H=2, HV=2)
    assert same_bits(by_records.inputs.initial_state, plain.inputs.initial_state)
    names = {name.partition("-")[0] for name in emulated}
    assert names == {NAME, "decode_head", "commit_records", "commit_windows"}
