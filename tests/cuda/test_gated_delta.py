"""``chunk_gated_delta_rule`` in two launches, emulated on the CPU, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import MODEL, Draw, check_outputs, oracle, request_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda.forms.gated_delta.launches import launches_of
from kdacore_cuda.forms.launches import FORWARD_ARGUMENTS
from kdacore_cuda.forms.torch_forward import TorchOp

pytestmark = pytest.mark.usefixtures("poison")

OP = TorchOp(
    lambda request, plain: launches_of(request),
    FORWARD_ARGUMENTS,
    ChunkInputs._fields,
    lambda request: True,
    takes_float16_gate=True,
)


def draw(
    T: int, H: int = 1, HV: int = 2, B: int = 1, seed: int = 0, gate: str = "init", **arrays: Any
) -> ChunkInputs:
    d = Draw(seed)
    gates = {n: x if n == "A_log" else x[..., 0] for n, x in d.gate(gate, B, T, HV, 1).items()}
    q, k, v = d.normal(B, T, H, 128), d.normal(B, T, H, 128), d.normal(B, T, HV, 128)
    return ChunkInputs(q, k, v, beta=d.normal(B, T, HV), **gates)._replace(**arrays)


def check(inputs: ChunkInputs, loose: float = 2.0, **options: Any) -> Outputs:
    request = request_of("chunk_gated_delta_rule", inputs, output_final_state=True, **options)
    got = OP.forward(request, inputs)
    check_outputs(got, oracle(request, inputs), loose)
    return got


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 129, 257])
def test_lengths(emulated: list[str], T: int) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **MODEL)
    assert [name.split("-")[0] for name in emulated] == ["chunk_records", "walk_records"]


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    check(draw(300, gate=gate, initial_state=state(1, 2)), **options)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_groups_of_value_heads(emulated: list[str], group: int) -> None:
    check(draw(130, 2, 2 * group), **MODEL)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    inputs = draw(200, B=2, initial_state=state(2, 2, dtype=dtype))
    check(inputs, checkpoint_every=128 if v_first else 64, state_v_first=v_first, **MODEL)


def test_packs(emulated: list[str]) -> None:
    offsets = torch.tensor([0, 0, 65, 66, 193, 250])
    check(draw(270, cu_seqlens=offsets, initial_state=state(5, 2)), checkpoint_every=64, **MODEL)
