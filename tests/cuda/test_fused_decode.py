"""The fused decode step of the CUDA backend, emulated, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_calls import GDN, KDA, NAN, check, decode_inputs, decode_request
from pool_checks import same_bits

from kdacore_cuda.choice import RecurrentMode, Split
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.runtime import torch_launch

GENERAL, ONE, HEAD = RecurrentMode.GENERAL, RecurrentMode.ONE_TOKEN, RecurrentMode.ONE_TOKEN_HEAD_GATE
PACK = (3, 1, 0, 16, 2, 1)
IN_PLACE: dict[str, Any] = {"inplace_state": True, "output_final_state": True}


def launched_kernel(emulated: list[str]) -> str:
    """The name of the one kernel that ran."""
    (name,) = set(emulated)
    assert name.startswith("decode-")
    return name


def assert_mode(emulated: list[str], mode: RecurrentMode) -> None:
    assert f"-MODE{int(mode)}-" in launched_kernel(emulated)


def on_device_of(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)


SPLITS = {
    "whole": Split(1, 1),
    "quarters": Split(4, 1),
    "two_heads": Split(1, 2),
    "halves": Split(2, 1),
    "two_halves": Split(2, 2),
    "two_quarters": Split(4, 2),
    "four_heads": Split(1, 4),
    "four_halves": Split(2, 4),
}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("op", [KDA, GDN])
def test_each_division(
    op: str, split: str, v_first: bool, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, as models are served: into the pool, with a slot for each sequence but one."""
    want = SPLITS[split]
    on_device_of(3 * want.blocks, monkeypatch)
    inputs = decode_inputs(op, H=1, HV=want.heads)
    inputs.state_indices[1] = -1
    request = check(inputs, op, state_v_first=v_first, **IN_PLACE)
    assert chosen(request).split == want
    name = launched_kernel(emulated)
    assert f"CLUSTER{want.blocks}" in name and f"COLUMNS{128 // want.slices}-" in name
    assert_mode(emulated, HEAD if op == GDN else ONE)


GENERAL_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"T": 5}, {}),
    "pack": ({"lengths": PACK}, IN_PLACE),
    "sixteen": ({"B": 1, "T": 16}, IN_PLACE),
    "float32": ({"dtype": torch.float32, "T": 2}, IN_PLACE),
    "float16": ({"dtype": torch.float16, "T": 2}, IN_PLACE),
    "weights_as_x": ({"weights": torch.bfloat16, "T": 2}, IN_PLACE),
    "two_taps": ({"taps": 2, "T": 3}, IN_PLACE),
    "three_taps": ({"taps": 3, "T": 3, "columns": 5}, IN_PLACE),
    "convolved": ({"conv_weight": None, "conv_state": None}, IN_PLACE),
    "no_norm": ({"norm_weight": None, "z": None, "T": 2}, IN_PLACE),
    "norm_alone": ({"z": None, "T": 2}, IN_PLACE),
    "no_gate_parameters": ({"dt_bias": None, "T": 2}, IN_PLACE),
    "fresh_state": ({"T": 2}, {"output_final_state": True}),
    "read_only": ({"T": 4}, {"read_only_state": True}),
    "narrow": ({"K": 64, "T": 3}, IN_PLACE),
    "loops": ({"H": 1, "HV": 3, "B": 2, "T": 2}, IN_PLACE),
    "loops_of_four": ({"H": 1, "HV": 8, "B": 2, "K": 64}, IN_PLACE),
}


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("call", GENERAL_CALLS)
def test_the_kernel_for_every_call(
    call: str, op: str, v_first: bool, emulated: list[str], poison: None
) -> None:
    given, options = GENERAL_CALLS[call]
    N = len(given.get("lengths", range(given.get("B", 3))))
    inputs = decode_inputs(op, **({"H": 1, "slots": N + 2} | given))
    if N > 1:
        inputs.state_indices[N - 2] = -1
    check(inputs, op, state_v_first=v_first, **options)
    assert_mode(emulated, GENERAL)
