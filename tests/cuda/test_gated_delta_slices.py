"""``chunk_gated_delta_rule`` on slices of a row that ranks share, emulated on the CPU, against the oracle on the whole
row. What is that of ``chunk_kda``, too (the chains, how ranks meet), is tested in test_slices.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_calls import MODEL, Draw, error, request_of
from emulated_backend import HOPPER
from gated_delta_calls import NAN, OP, TOKENS, draw, in_each_order, names_of
from pool_checks import same_bits
from slice_checks import (
    CROSSING,
    SKIPPING,
    check_calls_with_cp,
    check_forward,
    check_gradients,
    check_that_blocks_share_states,
    check_that_later_tokens_change_no_bit,
    offsets,
    state,
    use_segments,
)
from slice_ranks import Row

from kdacore.types import ChunkInputs, OutputGrads, Request
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.segments.segment_lengths import slice_segment_chunks
from kdacore_cuda.forms.slices import backward, forward, functions, halves
from kdacore_cuda.runtime import device_figures
from kdacore_reference.oracle import oracle_forward

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]

LOG: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
BEGIN = ["chunk_records", "walk_first_segments", "transition"]
FINISH = ["slice_starts", "walk_later_segments"]
BACKWARD_BEGIN = ["chunk_records", "walk_outer_segments", "slice_gradient"]
BACKWARD_FINISH = ["slice_chain", "walk_inner_segments", "unit_grads", "gate_sums"]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


def pack(
    lengths: list[int], T: int, H: int = 1, HV: int = 1, index: torch.dtype = torch.int32, **more: Any
) -> ChunkInputs:
    """Sequences of these lengths and padding up to T."""
    cu = offsets(lengths, index)
    return draw(T, H, HV, cu_seqlens=cu, initial_state=state(len(lengths), HV), **more)


def on_hopper(request: Request) -> Request:
    return dataclasses.replace(request, device=HOPPER)


def log_inputs(T: int, gate: str) -> ChunkInputs:
    """Log decays, and betas between 0 and 1."""
    inputs = draw(T, HV=1, gate=gate, initial_state=state(1, 1))
    return inputs._replace(beta=Draw(9).uniform(1, T, 1).bfloat16())


DENSE = pytest.mark.parametrize(
    ("T", "B", "H", "HV", "ranks"),
    [(640, 1, 1, 1, 2), (280, 2, 1, 2, 2), (576, 1, 2, 6, 3)],
    ids=["one head", "two rows", "grouped, three ranks"],
)


# --- forward -------------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(1)
@DENSE
def test_forward(emulated: list[str], T: int, B: int, H: int, HV: int, ranks: int) -> None:
    check_forward(draw(T, H, HV, B=B, initial_state=state(B, HV)), ranks, **MODEL)
    assert names_of(emulated) == BEGIN * ranks + FINISH * ranks


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257])
def test_tokens_of_a_rank(emulated: list[str], T: int) -> None:
    check_forward(draw(2 * T, HV=1, seed=T, initial_state=state(1, 1)), 2, **MODEL)
    finish = FINISH if T > 128 else FINISH[1:]
    assert names_of(emulated) == BEGIN * 2 + finish * 2


@pytest.mark.parametrize(
    ("lengths", "ranks", "T"),
    [(CROSSING, 3, 768), (SKIPPING, 4, 768), ([40], 2, 384), ([0, 256, 0, 128, 0], 2, 512)],
    ids=["crossing", "skipping", "mostly padding", "at borders"],
)
def test_forward_of_packs(emulated: list[str], lengths: list[int], ranks: int, T: int) -> None:
    index = torch.int32 if ranks == 3 else torch.int64
    check_forward(pack(lengths, T, index=index), ranks, **MODEL)
    assert names_of(emulated) == BEGIN * ranks + FINISH * ranks


def test_packs_of_grouped_heads(emulated: list[str]) -> None:
    check_forward(pack([200, 150, 30], 384, 2, 4), 2, safe_gate=True, lower_bound=-5.0, scale=0.2, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [None, CROSSING], ids=["dense", "pack"])
def test_float16(emulated: list[str], lengths: list[int] | None) -> None:
    """Kernels that read q, k or v, or what was made of them, are those of float16."""
    half = torch.float16
    if lengths is None:
        inputs = draw(280, 1, 2, B=2, of=half, initial_state=state(2, 2))
    else:
        inputs = pack(lengths, 768, of=half, seed=3)
    ranks = 2 if lengths is None else 3
    check_forward(inputs, ranks, **MODEL)
    check_gradients(inputs, ranks, kept=lengths is None, **MODEL)
    others = ("transition", "slice_starts", "slice_gradient", "slice_chain", "gate_sums")
    assert all("HALF_F161" in name for name in emulated if name.split("-")[0] not in others)


def test_rows_behind_a_pack_are_zero(emulated: list[str]) -> None:
    o, _ = Row(pack([40], 384), 2, **MODEL).outputs()
    assert not o[:, 40:].any()


def test_forward_from_no_state_in_other_layout(emulated: list[str]) -> None:
    check_forward(draw(260, initial_state=state(1, 2)), 2, state_v_first=True, **MODEL)
    check_forward(draw(260), 2, allow_neg_eigval=True, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["slow", "mixed", "fast", "spread"])
def test_gates(emulated: list[str], gate: str) -> None:
    """Log decays. Slow ones: all that a rank hands on reaches the last one."""
    inputs = log_inputs(512, gate)
    check_forward(inputs, 4, **LOG)
    for kept in (False, True):
        check_gradients(inputs, 4, kept=kept, **LOG)


@pytest.mark.exhaustive
def test_strided_tokens(emulated: list[str]) -> None:
    wide, short = Draw(8).normal(1, 260, 1, 4 * 128), draw(260, 1, 2)
    v = torch.cat([wide[..., 128:256], wide[..., :128], wide[..., :128]], -2)
    g = torch.cat([short.g, short.g], -1)[..., :2]
    inputs = short._replace(q=wide[..., :128], k=wide[..., 256:384], v=v[..., :2, :], g=g)
    check_forward(inputs, 2, **MODEL)
    check_gradients(inputs, 2, **MODEL)


@pytest.mark.exhaustive
def test_the_lengths_that_slices_have(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of segments."""
    monkeypatch.setattr(halves, "slice_segment_chunks", slice_segment_chunks)
    inputs = draw(2 * 1090, HV=1, initial_state=state(1, 1))
    check_forward(inputs, 2, **MODEL)
    assert names_of(emulated) == BEGIN * 2 + FINISH * 2
    check_gradients(inputs, 2, kept=True, **MODEL)


@pytest.mark.exhaustive
def test_a_long_row_that_forgets_little(emulated: list[str]) -> None:
    """On 4 ranks, with 8 segments each: errors of maps and chains stay below those of the walks."""
    inputs = log_inputs(4096, "slow")
    request = request_of(OP, inputs, output_final_state=True, **LOG)
    want, whole = oracle_forward(request, inputs), gated_delta.forward(on_hopper(request), inputs)
    o, final = Row(inputs, 4, output_final_state=True, **LOG).outputs()
    assert error(o, want.o) < 1.05 * error(whole.o, want.o)
    assert error(final, want.final_state) < 1.05 * error(whole.final_state, want.final_state)


def test_checkpoints(emulated: list[str]) -> None:
    """At the slice's start, inside segments and at their borders: the states of the whole call there."""
    inputs, every = draw(512, initial_state=state(1, 2)), 64
    row = Row(inputs, 2, checkpoint_every=every, output_final_state=True, **MODEL)
    found = row.forward()
    for rank, (outputs, start) in zip(row.ranks, found, strict=True):
        assert outputs.checkpoints is not None and outputs.checkpoints.shape[1] == 4
        assert torch.equal(outputs.checkpoints[0, 0], start[0])
        for i in range(1, 4):
            short = rank.inputs._replace(
                **{n: getattr(rank.inputs, n)[:, : i * every].contiguous() for n in TOKENS}
            )
            request = request_of(OP, short._replace(initial_state=start), output_final_state=True, **MODEL)
            request = on_hopper(request)
            begun = forward.begin(request, short, None)
            ended = forward.finish(request, short, begun.pending, start).final_state
            assert ended is not None and torch.equal(outputs.checkpoints[0, i], ended[0])


def test_transition_of_padding(emulated: list[str]) -> None:
    """No state: nothing that is read before it is written."""
    row = Row(pack([40], 128), 2, **MODEL)
    begun = forward.begin(row.ranks[1].request, row.ranks[1].inputs, None)
    assert torch.equal(begun.M[0, 0], torch.eye(128))
    assert not begun.C.any()


# --- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
@DENSE
def test_gradients(emulated: list[str], T: int, B: int, H: int, HV: int, ranks: int, kept: bool) -> None:
    inputs = draw(T, H, HV, B=B, seed=2, initial_state=state(B, HV))
    check_gradients(inputs, ranks, kept=kept, **MODEL)
    names = names_of(emulated)[5 * ranks :]
    assert names == BACKWARD_BEGIN * ranks + BACKWARD_FINISH * ranks


@pytest.mark.parametrize("T", [1, 16, 63, 64, 65, 128, 129])
def test_gradients_of_tokens_of_a_rank(emulated: list[str], T: int) -> None:
    check_gradients(draw(2 * T, HV=1, seed=T + 1, initial_state=state(1, 1)), 2, kept=T % 2 == 0, **MODEL)


@pytest.mark.parametrize(
    ("lengths", "ranks", "T"),
    [
        (CROSSING, 3, 768),
        pytest.param(SKIPPING, 4, 768, marks=pytest.mark.exhaustive),
        ([40], 2, 384),
        ([0, 256, 0, 128, 0], 2, 512),
    ],
    ids=["crossing", "skipping", "mostly padding", "at borders"],
)
def test_gradients_of_packs(emulated: list[str], lengths: list[int], ranks: int, T: int) -> None:
    # Drawn so that the gradient of A_log, one number here, is not what is left of terms that cancel.
    check_gradients(pack(lengths, T, seed=2 + len(lengths)), ranks, **MODEL)
    assert names_of(emulated)[-4 * ranks :] == BACKWARD_FINISH * ranks


@pytest.mark.exhaustive
def test_gradients_of_packs_of_grouped_heads(emulated: list[str]) -> None:
    check_gradients(pack([200, 150, 30], 384, 2, 4), 2, **MODEL)


def test_gradients_without_those_of_final_states(emulated: list[str]) -> None:
    inputs = draw(260, HV=1, initial_state=state(1, 1))
    for kept in (False, True):
        check_gradients(inputs, 2, final=False, kept=kept, state_v_first=True, **MODEL)


def test_gradients_of_packs_keep_nothing(emulated: list[str]) -> None:
    """The forward has no map of the segments at the ends of sequences, which the backward needs."""
    assert [x.saved for x, _ in Row(pack([50, 206], 256), 2, True, **MODEL).forward()] == [(), ()]


def test_what_is_kept_serves_two_backwards(emulated: list[str]) -> None:
    """It is read, not written; the same bits again."""
    inputs = draw(300, initial_state=state(1, 2))
    row = Row(inputs, 2, True, **MODEL)
    rank, (outputs, start) = row.ranks[0], row.forward()[0]
    before, grads = outputs.saved[0].clone(), OutputGrads(Draw(3).normal(*rank.inputs.v.shape), None)
    found = []
    for _ in range(2):
        given = rank.request, rank.inputs, outputs.saved
        _, pending = backward.backward_begin(*given, grads, start, None)
        found.append(backward.backward_finish(*given, pending, grads, start, torch.ones_like(start)))
        assert torch.equal(outputs.saved[0], before)
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True) if x is not None)


# --- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunks", [1, 4])
def test_longer_than_two_rings(emulated: list[str], monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Of maps: who is a ring ahead must not mistake one phase for another."""
    use_segments(monkeypatch, chunks)
    inputs = draw(64 * 14, seed=4, initial_state=state(1, 2))
    check_forward(inputs, 2, **MODEL)
    for kept in (False, True):
        check_gradients(inputs, 2, kept=kept, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
def test_blocks_that_share_states_give_the_same_bits(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    check_that_blocks_share_states(monkeypatch, draw(300, initial_state=state(1, 2)), kept, **MODEL)


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    check_that_later_tokens_change_no_bit(draw(512), **MODEL)


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = pack([150, 100, 134], 384)
    want, _ = Row(inputs, 2, **MODEL).outputs()
    for n in TOKENS:
        getattr(inputs, n)[:, :150] = NAN
    assert same_bits(Row(inputs, 2, **MODEL).outputs()[0][:, 150:], want[:, 150:])


@pytest.mark.exhaustive
def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    use_segments(monkeypatch, 5)
    inputs, found = draw(900, HV=1, initial_state=state(1, 1)), []
    grads = OutputGrads(Draw(3).normal(*inputs.v.shape), state(1, 1))
    for _ in in_each_order(monkeypatch, (0, 3, 4), (1,)):
        row = Row(inputs, 2, output_final_state=True, **MODEL)
        found.append([*row.outputs(), *row.transitions, *(x for x in row.gradients(grads) if x is not None)])
    assert all(same_bits(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(300)
    want = Row(inputs, 2, **MODEL).outputs()[0]
    monkeypatch.setenv(EVERY_LANE, "1")
    assert same_bits(Row(inputs, 2, **MODEL).outputs()[0], want)


# --- calls ---------------------------------------------------------------------------------------------------------


def test_calls_with_cp(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls_with_cp(monkeypatch, pack(CROSSING, 768, 1, 2, torch.int64), MODEL)
    assert {*names_of(emulated)} == {*BEGIN, *FINISH, *BACKWARD_BEGIN, *BACKWARD_FINISH}


def test_which_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(OP, draw(64), **MODEL)
    for arch, there in (("sm_90a", True), ("sm_80", False), ("sm_100f", False)):
        monkeypatch.setattr(device_figures, "build_arch", lambda given, arch=arch: arch)
        assert (functions.slice_functions(request) is not None) == there
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    assert functions.slice_functions(request_of(OP, draw(64, of=torch.float16), **MODEL)) is not None
    q = torch.zeros(1, 64, 1, 128, dtype=torch.float16)
    kda = ChunkInputs(q, q, q, q, q[..., 0])
    assert functions.slice_functions(request_of("chunk_kda", kda)) is None
