"""Candidates by records on a GPU: many steps, bit for bit."""

from __future__ import annotations

import pytest
import torch
from record_calls import GDN, KDA, Server, check_plain_decoding, check_writing_each

pytestmark = [pytest.mark.gpu, pytest.mark.exhaustive]
STEPS = 10_000


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_float32_states_are_those_of_plain_decoding(op: str, v_first: bool) -> None:
    sizes = {"K": 128, "H": 2, "HV": 4}
    check_plain_decoding(STEPS, *[Server(op, v_first=v_first, device="cuda", **sizes) for _ in range(2)])


@pytest.mark.parametrize("v_first", [False, True])
def test_bfloat16_states_are_those_of_writing_each(v_first: bool) -> None:
    servers = [Server(KDA, torch.bfloat16, v_first, K=128, H=2, HV=4, device="cuda") for _ in range(2)]
    check_writing_each(STEPS, *servers)
