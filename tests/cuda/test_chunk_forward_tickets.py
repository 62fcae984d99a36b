"""Clusters that wait for others begin in any order: each takes its part of the work by a ticket."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import emulator
import numpy as np
import program_launches
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, request_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.runtime import device_figures, torch_launch

pytestmark = pytest.mark.usefixtures("poison")

MORE = pytest.mark.exhaustive
NUMBER = 0x1234_5678_9ABC_DEF0
FIRST = 0x7FFFFFF << 36 | (NUMBER & 0xFFFFFF) << 12
"""What a counter holds before its first ticket is drawn by the launch of that number."""


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)


def draw(lengths: tuple[int, ...] | None, B: int = 1, T: int = 0, HV: int = 1) -> ChunkInputs:
    pack = {}
    if lengths is not None:
        T, pack = sum(lengths), {"cu_seqlens": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)}
    d = Draw(B + T + HV)
    return ChunkInputs(
        q=d.normal(B, T, 1, 128),
        k=d.normal(B, T, 1, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, 128),
        **pack,
    )


Case = tuple[ChunkInputs, int, int, int]
"""Inputs, blocks a cluster, clusters that share them (0: one each), clusters of helpers."""
CASES: dict[str, Callable[[], Case]] = {
    "dense, cut": lambda: (draw(None, 1, 100, 3), 2, 2, 0),
    "dense, clusters of four": lambda: (draw(None, 2, 70, 2), 4, 3, 0),
    "pack, cut": lambda: (draw((0, 70, 1, 130, 33, 0)), 2, 4, 0),
    "pack, more clusters than steps": lambda: (draw((40,)), 2, 4, 0),
    "helpers": lambda: (draw(None, 2, 130, 3), 4, 0, 2),
    "helpers, one head": lambda: (draw(None, 1, 200, 1), 4, 0, 1),
    "helpers of clusters of two": lambda: (draw(None, 1, 300, 3), 2, 0, 2),
    "helpers of clusters of two, one head": lambda: (draw(None, 1, 400, 1), 2, 0, 1),
}


def run(monkeypatch: pytest.MonkeyPatch, case: Case, dispatch: int, seed: int = 0, **options: Any) -> Outputs:
    inputs, cluster, clusters, helpers = case
    monkeypatch.setattr(choice, "cluster_size", lambda *given: cluster)
    monkeypatch.setattr(choice, "resident_clusters", lambda *given: clusters)
    monkeypatch.setattr(choice, "preparing_clusters", lambda *given: helpers)
    plain = emulator.run
    with monkeypatch.context() as inside:
        inside.setattr(
            emulator, "run", lambda *a, **k: plain(*a, **{**k, "seed": seed, "dispatch": dispatch})
        )
        request = request_of("chunk_kda", inputs, output_final_state=True, **options)
        return chunk_forward.forward(request, inputs)


def same_bits(got: Outputs, want: Outputs) -> bool:
    return torch.equal(got.o, want.o) and torch.equal(got.final_state, want.final_state)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "options", [BOUNDED_MODEL, pytest.param(MODEL, marks=MORE)], ids=["bounded", "unbounded"]
)
def test_any_order_of_dispatch(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """One cluster at a time: one that waited for another that has not begun would wait for ever."""
    case = CASES[name]()
    want = run(monkeypatch, case, emulator.FORWARDS, **options)
    assert same_bits(run(monkeypatch, case, emulator.BACKWARDS, **options), want)
    for seed in (1, 2):
        assert same_bits(run(monkeypatch, case, emulator.SHUFFLED, seed, **options), want)


def test_the_emulator_sees_a_wait_for_what_has_not_begun(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the first ticket the last one, the second cluster would wait for the first: the tests above can fail."""
    monkeypatch.setattr(program_launches, "numbers", count(NUMBER))
    with_counter(
        monkeypatch, FIRST + 1
    )  # as if one ticket were drawn already, by a cluster that never begins
    with pytest.raises(RuntimeError, match="deadlock"):
        run(monkeypatch, CASES["dense, cut"](), emulator.FORWARDS, **BOUNDED_MODEL)


def with_counter(monkeypatch: pytest.MonkeyPatch, held: int) -> list[torch.Tensor]:
    """Workspaces come with this 64-bit number where the counter is."""
    made: list[torch.Tensor] = []
    plain = torch_launch.allocator

    def allocator(device_type: str) -> Any:
        empty = plain(device_type)

        def prepared(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            x = empty(shape, strides, dtype)
            if dtype == torch.uint8:
                x[:8] = torch.tensor([held], dtype=torch.int64).view(torch.uint8)
                made.append(x)
            return x

        return prepared

    monkeypatch.setattr(torch_launch, "allocator", allocator)
    return made


HELD = {
    "zeros": 0,
    "ones": -1,
    "the largest number": 2**63 - 1,
    "the smallest number": -(2**63),
    "just below": FIRST - 1,
    "the first ticket": FIRST,
    "just above all tickets": FIRST + 100,
    "another launch's": FIRST + (5 << 12) + 3,
    "an earlier launch's": FIRST - (5 << 12) + 3,
    "NaN": 0x7FC00000_7FC00000,
    "infinity": 0x7F800000_7F800000,
    "bfloat16 NaN": 0x7FFF_7FFF_7FFF_7FFF,
}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize(
    "name",
    [
        "dense, cut",
        pytest.param("helpers, one head", marks=MORE),
        pytest.param("helpers of clusters of two, one head", marks=MORE),
    ],
)
def test_whatever_the_workspace_held(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, name: str, held: int
) -> None:
    """And the counter is left so that the same launch can be made again, as a graph makes it."""
    monkeypatch.setattr(program_launches, "numbers", count(NUMBER))
    case = CASES[name]()
    want = run(monkeypatch, case, emulator.FORWARDS, **BOUNDED_MODEL)
    monkeypatch.setattr(program_launches, "numbers", count(NUMBER))
    made = with_counter(monkeypatch, held)
    got = run(monkeypatch, case, emulator.BACKWARDS, **BOUNDED_MODEL)
    assert same_bits(got, want)
    (workspace,) = made
    assert workspace[:8].view(torch.int64).item() == 0
