"""Sequences that the device cuts in two, where the host does not know their lengths: slots that are none, packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, request_of
from form_calls import grid_of, workspace_bytes
from pool_checks import check_pools, pool_of

from kdacore.types import ChunkInputs
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.fused import workspace
from kdacore_cuda.forms.fused.workspace import cut_states_bytes
from kdacore_cuda.runtime import device_figures, torch_launch

pytestmark = pytest.mark.usefixtures("poison")
MORE = pytest.mark.exhaustive


def use_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The fused kernel of Hopper, planned for a device with few multiprocessors."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: count)


def draw(B: int, T: int, HV: int, **more: Any) -> ChunkInputs:
    d = Draw(B + T + HV)
    return ChunkInputs(
        q=d.normal(B, T, 1, 128),
        k=d.normal(B, T, 1, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV),
        **d.gate("random", B, T, HV, 128),
        **more,
    )


def check(inputs: ChunkInputs, **options: Any) -> None:
    bounds = (2 * O_BOUND, 2 * STATE_BOUND)
    check_pools(chunk_forward, "chunk_kda", inputs, bounds, options)


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("multiprocessors", "B", "T", "HV", "null"),
    [
        pytest.param(6, 3, 200, 2, (0,), id="twice as many items as clusters, the first is null"),
        pytest.param(6, 3, 130, 2, (1,), id="the middle one"),
        pytest.param(6, 3, 130, 4, (2,), id="four times, the last"),
        pytest.param(6, 6, 70, 1, (0, 4), id="one value head"),
        pytest.param(6, 9, 40, 1, (1, 2, 8), id="three times"),
        pytest.param(14, 13, 97, 1, (3,), id="one item fewer than twice the clusters"),
        pytest.param(14, 13, 65, 1, (0, 1, 12), id="one item fewer, three null"),
        pytest.param(6, 3, 130, 2, (0, 1, 2), id="all null"),
        pytest.param(4, 4, 33, 1, (), id="none null"),
    ],
)
def test_null_slots_of_dense_calls(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    B: int,
    T: int,
    HV: int,
    null: tuple[int, ...],
) -> None:
    """Were all sequences of T tokens, none would be cut. Those without a slot count as one step, which moves the
    borders between clusters."""
    use_multiprocessors(monkeypatch, multiprocessors)
    rows = torch.arange(B, dtype=torch.int32)
    rows[list(null)] = -1
    inputs = draw(B, T, HV, initial_state=pool_of(B, 128, HV=HV), state_indices=rows)
    check(inputs, inplace_state=True, output_final_state=True, **BOUNDED_MODEL)
    request = request_of("chunk_kda", inputs, inplace_state=True, **BOUNDED_MODEL)
    assert grid_of(request) == multiprocessors
    assert workspace_bytes(request) == cut_states_bytes(multiprocessors // 2)


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=MORE)], ids=["int32", "int64"])
def test_a_null_index_of_dense_calls(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wide: bool
) -> None:
    """A row number that names no slot, beside negative ones; checkpoints; states not in place."""
    use_multiprocessors(monkeypatch, 6)
    rows = torch.tensor([2, 0, -7, 1, 3, 0], dtype=torch.int64 if wide else torch.int32)
    inputs = draw(6, 150, 1, initial_state=pool_of(4, 128, HV=1), state_indices=rows)
    check(inputs, null_index=2, output_final_state=True, checkpoint_every=64, **options)


@pytest.mark.parametrize("count", [6, pytest.param(4, marks=MORE), pytest.param(10, marks=MORE)])
@pytest.mark.parametrize(
    "lengths", [(100, 100, 100, 100, 100, 100), (0, 0, 0, 64, 0, 0), (0,) * 6, (33, 1, 0, 200, 16, 64)]
)
def test_packs_of_any_lengths(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, count: int, lengths: tuple[int, ...]
) -> None:
    """Equal ones, empty ones, with a slot or without, rows behind the pack."""
    use_multiprocessors(monkeypatch, count)
    inputs = draw(
        *(1, sum(lengths) + 5, 1),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        initial_state=pool_of(6, 128, HV=1),
        state_indices=torch.tensor([5, 4, -1, 2, 1, -1]),
    )
    check(inputs, inplace_state=True, output_final_state=True, **BOUNDED_MODEL)


@pytest.mark.parametrize("helped", [0, 2, 4], ids=["cut states", "helpers, clusters of two", "helpers"])
def test_a_workspace_that_is_too_small_is_found_out(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, helped: int
) -> None:
    """Host and device each count how much there is: with fewer numbers on the host, a flag lies in the guard. The
    cluster of the highest number sends no state, so its 16 flags of 8 bytes are not used."""
    use_multiprocessors(monkeypatch, 4)
    name = {0: "cut_states_bytes", 2: "spaced_steps_bytes", 4: "prepared_steps_bytes"}[helped]
    unused = {0: 4 * 17, 2: 112 + 4, 4: 4}[helped]  # two flags have a line of 128 bytes
    plain = getattr(workspace, name)
    monkeypatch.setattr(workspace, name, lambda *given: plain(*given) - unused)
    if helped:
        monkeypatch.setattr(choice, "cluster_size", lambda *given: helped)
        monkeypatch.setattr(choice, "resident_clusters", lambda *given: 0)
        monkeypatch.setattr(choice, "preparing_clusters", lambda *given: 1)
    inputs = draw(1, 100 if helped != 2 else 300, 3)
    with pytest.raises(AssertionError, match="wrote behind an array"):
        chunk_forward.forward(request_of("chunk_kda", inputs, **BOUNDED_MODEL), inputs)
