"""``chunk_kda`` on slices of a row that ranks share, emulated on the CPU, against the oracle on the whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, request_of
from slice_checks import (
    CROSSING,
    SKIPPING,
    check_calls_with_cp,
    check_forward,
    check_gradients,
    check_that_blocks_share_states,
    check_that_later_tokens_change_no_bit,
    pack,
    state,
    use_segments,
)
from slice_ranks import Row

from kdacore.types import OutputGrads
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.segments.segment_lengths import slice_segment_chunks
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_cuda.forms.slices import functions as slices
from kdacore_cuda.forms.slices import launches as slices_launches
from kdacore_cuda.runtime import device_figures, torch_launch

pytestmark = pytest.mark.usefixtures("poison")

SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


DENSE = pytest.mark.parametrize(
    ("T", "B", "H", "HV", "ranks"),
    [(640, 1, 1, 1, 2), (280, 2, 1, 2, 2)],
    ids=["one head", "two rows, grouped"],
)


@pytest.mark.first_cases(1)
@DENSE
def test_forward(emulated: list[str], T: int, B: int, H: int, HV: int, ranks: int) -> None:
    check_forward(draw(T, H, HV, B=B, initial_state=state(B, HV)), ranks, **BOUNDED_MODEL)
    names = [name.split("-")[0] for name in emulated]
    assert names == ["prepare", "maps", "transition"] * ranks + ["slice_starts", "output"] * ranks


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("lengths", "ranks", "options"),
    [(CROSSING, 3, BOUNDED_MODEL), (SKIPPING, 4, MODEL), ([40], 2, BOUNDED_MODEL)],
    ids=["crossing", "skipping", "mostly padding"],
)
def test_forward_of_packs(
    emulated: list[str], lengths: list[int], ranks: int, options: dict[str, Any]
) -> None:
    index = torch.int32 if ranks == 3 else torch.int64
    check_forward(pack(lengths, 192 * ranks if ranks != 3 else 768, index), ranks, **options)


@pytest.mark.parametrize(
    "options",
    [BOUNDED_MODEL, pytest.param(MODEL, marks=pytest.mark.exhaustive)],
    ids=["bounded", "unbounded"],
)
def test_packs_of_many_sequences(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Results by a call of their own; operands and maps of the sequence that goes on behind the slice alone."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    lengths = [1, 40, 0, 200, 17, 150, 60]
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: len(lengths) // 4)
    inputs = pack(lengths, 480, torch.int64 if options is MODEL else torch.int32)
    check_forward(inputs, 2, **options)
    names = [name.split("-")[0] for name in emulated]
    assert names[:6] == ["prepare", "maps", "transition"] * 2
    assert all("LEAVING_ONLY1" in name for name in emulated[:6] if "transition" not in name)
    assert "slice_starts" not in names
    assert [name for name in names[6:] if "chunk_forward" in name]
    # Operands of the other sequences are not there.
    rank = Row(inputs, 2, **options).ranks[0]
    assert slices_launches.forward_launches(rank.request).finish is None
    assert chunk_forward_slices.begin(rank.request, rank.inputs, None).pending is None


def test_which_slices_finish_as_whole_calls() -> None:
    finishes = choice.finishes_as_whole
    assert [finishes(n, True, 132) for n in (16, 527, 528, 10_000)] == [False, False, True, True]
    assert not finishes(10_000, False, 132)


def test_forward_from_no_state_in_other_layout(emulated: list[str]) -> None:
    check_forward(draw(260, initial_state=state(1, 1)), 2, state_v_first=True, **BOUNDED_MODEL)
    check_forward(draw(260), 2, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["slow", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    """Slow ones: all that a rank hands on reaches the last one."""
    inputs = draw(512, gate=gate, initial_state=state(1, 1))
    options = SAFE_LOG if gate == "slow" else {}
    check_forward(inputs, 4, **options)
    for kept in (False, True):
        check_gradients(inputs, 4, kept=kept, **options)


def test_transition_of_padding(emulated: list[str]) -> None:
    """No state: nothing that is read before it is written."""
    row = Row(pack([40], 128), 2, **BOUNDED_MODEL)
    begun = chunk_forward_slices.begin(row.ranks[1].request, row.ranks[1].inputs, None)
    assert torch.equal(begun.M[0, 0], torch.eye(128))
    assert not begun.C.any()


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
@DENSE
def test_gradients(emulated: list[str], T: int, B: int, H: int, HV: int, ranks: int, kept: bool) -> None:
    inputs = draw(T, H, HV, B=B, seed=2, initial_state=state(B, HV))
    check_gradients(inputs, ranks, kept=kept, **BOUNDED_MODEL)
    names = [name.split("-")[0] for name in emulated][5 * ranks :]
    begin, scan = ["prepare", "segment_maps", "slice_gradient"], ["slice_chain", "scan", "grads"]
    sums = ["groups", "groups", "sums"] if HV > H else ["sums"]
    assert names == begin * ranks + (scan + sums) * ranks


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("lengths", "ranks", "options"),
    [
        (CROSSING, 3, BOUNDED_MODEL),
        pytest.param(SKIPPING, 4, MODEL, marks=pytest.mark.exhaustive),
        ([40], 2, BOUNDED_MODEL),
    ],
    ids=["crossing", "skipping", "mostly padding"],
)
def test_gradients_of_packs(
    emulated: list[str], lengths: list[int], ranks: int, options: dict[str, Any]
) -> None:
    # Drawn so that the gradient of A_log, one number here, is not what is left of terms that cancel.
    check_gradients(pack(lengths, 192 * ranks if ranks != 3 else 768, seed=len(lengths)), ranks, **options)


@pytest.mark.exhaustive
def test_gradients_without_those_of_final_states(emulated: list[str]) -> None:
    inputs = draw(260, initial_state=state(1, 1))
    for kept in (False, True):
        check_gradients(inputs, 2, final=False, kept=kept, state_v_first=True, **BOUNDED_MODEL)


def test_gradients_of_packs_keep_nothing(emulated: list[str]) -> None:
    """The forward has no map of the segments at the ends of sequences, which the backward needs."""
    assert [x.saved for x, _ in Row(pack([50, 206], 256), 2, True, **BOUNDED_MODEL).forward()] == [(), ()]


def test_what_is_kept_serves_two_backwards(emulated: list[str]) -> None:
    """It is read, not written."""
    inputs = draw(300, initial_state=state(1, 1))
    row = Row(inputs, 2, True, **BOUNDED_MODEL)
    rank, (outputs, start) = row.ranks[0], row.forward()[0]
    before, grads = outputs.saved[0].clone(), OutputGrads(Draw(3).normal(*rank.inputs.v.shape), None)
    _, pending = chunk_backward_slices.backward_begin(
        rank.request, rank.inputs, outputs.saved, grads, start, None
    )
    chunk_backward_slices.backward_finish(
        rank.request, rank.inputs, outputs.saved, pending, grads, start, torch.zeros_like(start)
    )
    assert torch.equal(outputs.saved[0], before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunks", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_longer_than_two_rings(emulated: list[str], monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Of maps: who is a ring ahead must not mistake one phase for another."""
    use_segments(monkeypatch, chunks)
    inputs = draw(64 * 14, seed=4, initial_state=state(1, 1))
    check_forward(inputs, 2, **BOUNDED_MODEL)
    for kept in (False, True):
        check_gradients(inputs, 2, kept=kept, **BOUNDED_MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
def test_blocks_that_share_states_give_the_same_bits(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    inputs = draw(300, initial_state=state(1, 1))
    check_that_blocks_share_states(monkeypatch, inputs, kept, **BOUNDED_MODEL)


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    check_that_later_tokens_change_no_bit(draw(512), **BOUNDED_MODEL)


def test_calls_with_cp(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls_with_cp(monkeypatch, pack(CROSSING, 768, torch.int64), BOUNDED_MODEL)
    assert {name.split("-")[0] for name in emulated} >= {"transition", "slice_starts", "slice_gradient"}


def test_which_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    wide = request_of("chunk_kda", draw(64), **MODEL)
    assert slices.slice_functions(wide) is not None
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_80")
    assert slices.slice_functions(wide) is None


def test_segments_are_longer_where_there_are_many() -> None:
    """The fastest that were measured, of 8 to 64 chunks."""
    choose = slice_segment_chunks
    found = [choose(T // 64, H, 132) for T, H in ((2048, 1), (16384, 16), (65536, 4), (65536, 16))]
    assert found == [8, 64, 64, 128]


ENTRIES = ("transition", "slice_starts", "slice_gradient", "slice_chain")
PACKAGED = [
    kernel
    for kernel in packaged_kernels("sm_90a")
    if kernel.macros["OF_SLICE"] or kernel.macros["LEAVING_ONLY"] or kernel.entry in ENTRIES
]
"""The kernels for slices alone."""


def test_the_kernels_for_slices_are_packaged() -> None:
    walks = 2 * 4  # of the gated delta rule, bfloat16 and float16
    assert len(PACKAGED) == 2 + 4 + 2 + walks + 2 * len(ENTRIES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", PACKAGED, ids=lambda k: k.name)
def test_compiles_without_spills(kernel: KernelSource) -> None:
    log = compile_kernel(kernel, "sm_90a")
    assert log.usage().spills == 0
    assert "serialized" not in log.log
    assert "setmaxnreg ignored" not in log.log
