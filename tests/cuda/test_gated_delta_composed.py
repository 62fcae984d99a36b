"""``chunk_gated_delta_rule`` in segments whose blocks find their own starts, emulated on the CPU: against the oracle,
as servers call it, and bit for bit against the launch that chains maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import MODEL, request_of
from emulated_backend import registered, run_emulated, wide_inference_cases
from gated_delta_calls import (
    NAN,
    OP,
    TOKENS,
    all_same_bits,
    check,
    check_servers,
    draw,
    in_each_order,
    names_of,
    pack,
    run,
    state,
)
from pool_checks import pool_of, same_bits
from spill_allowances import allowed
from test_gated_delta_segments import CHOOSE_LENGTHS, CUT, SHORT, use_lengths

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms.gated_delta import segments
from kdacore_cuda.forms.gated_delta.kernels import first_segments_kernel, later_segments_kernel
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.gated_delta_variant import Variant

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
ONES = SegmentLengths(1, 0, 1, 1, 1, 1, 1)
COMPOSED = ["chunk_records", "walk_first_segments", "walk_later_segments"]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "USE_COMPOSED_STARTS", True)
    use_lengths(monkeypatch, SHORT)


def in_both_ways(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, **options: Any
) -> list[Outputs]:
    """What a call gives with and without the chain's launch."""
    found = []
    for composes, names in ((True, COMPOSED), (False, CUT)):
        monkeypatch.setattr(choice, "USE_COMPOSED_STARTS", composes)
        emulated.clear()
        found.append(run(inputs, output_final_state=True, **options))
        assert names_of(emulated)[: len(names)] == names
    return found


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [193, 255, 256, 257, 448, 449, 513, 641])
def test_lengths(emulated: list[str], T: int) -> None:
    """Last segments of one token to three chunks, behind one to four maps."""
    check(draw(T, B=1 + T % 2, seed=T, initial_state=state(1 + T % 2, 2)), **MODEL)
    assert names_of(emulated) == COMPOSED


@pytest.mark.parametrize("gate", ["init", "slow", "fast", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate == "init" else {"use_qk_l2norm_in_kernel": True}
    check(draw(450, gate=gate, initial_state=state(1, 2)), **options)
    assert names_of(emulated) == COMPOSED


def test_nearly_equal_keys(emulated: list[str]) -> None:
    """Maps then consist of products of large matrices that nearly cancel."""
    inputs = draw(400, gate="fast", initial_state=state(1, 2))
    k = inputs.k[:, :1] + 0.05 * inputs.k
    inputs = inputs._replace(k=k, beta=torch.full_like(inputs.beta, 6.0))
    check(inputs, **{**MODEL, "use_gate_in_kernel": False})
    assert names_of(emulated) == COMPOSED


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", [64, 128, 192])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], every: int, v_first: bool, dtype: torch.dtype) -> None:
    """Checkpoints inside segments and at their borders."""
    inputs = draw(510, B=2, initial_state=state(2, 2, dtype=dtype))
    check(inputs, checkpoint_every=every, state_v_first=v_first, **MODEL)
    assert names_of(emulated) == COMPOSED


# --- as servers call it --------------------------------------------------------------------------------------------


def test_everything_at_once(emulated: list[str]) -> None:
    """Two pools of strided rows; sequences without slots, new ones, rows behind the pack, none to five segments."""
    states, other = pool_of(8, 128), pool_of(9, 128, seed=2)
    states[0] = states[6] = other[0] = NAN
    inputs = pack(
        (70, 0, 317, 257, 1, 129, 0, 500),
        21,
        gate="random",
        initial_state=states,
        state_indices=torch.tensor([4, 0, 0, 2, 6, 7, -1, 3]),
        has_initial_state=torch.tensor([True, True, True, True, False, False, False, True]),
        write_indices=torch.tensor([8, 1, 2, 3, 4, 0, 5, 7], dtype=torch.int32),
        write_pool=other,
    )
    want = check_servers(inputs, inplace_state=True, null_index=0, output_final_state=True)
    assert want.written.nonzero()[0].tolist() == [3, 4, 7, 8]
    assert names_of(emulated)[:3] == COMPOSED


@pytest.mark.parametrize("v_first", [False, True])
def test_checkpoints_at_chosen_tokens(emulated: list[str], v_first: bool) -> None:
    inputs = pack((300, 0, 70, 260), 9, gate="random", initial_state=pool_of(14, 128))
    inputs = inputs._replace(
        state_indices=torch.tensor([3, 0, 4, 5]),
        checkpoint_offsets=torch.tensor([0, 16, 128, 192, 208, 288, 300, 450, 626], dtype=torch.int32),
        checkpoint_indices=torch.tensor([6, 7, 8, 9, 10, 11, 1, 12, 13], dtype=torch.int32),
    )
    want = check_servers(inputs, inplace_state=True, null_index=0, state_v_first=v_first)
    assert want.written.nonzero()[0].tolist() == [1, *range(3, 14)]
    assert names_of(emulated)[:4] == [*COMPOSED, "walk_to_checkpoints"]


def test_batches_with_padding(emulated: list[str]) -> None:
    inputs = draw(250, B=3, gate="random", initial_state=pool_of(4, 128))
    check_servers(inputs._replace(state_indices=torch.tensor([2, -1, 0])), inplace_state=True)
    check_servers(
        inputs._replace(state_indices=torch.tensor([2, -1, 0])), null_index=2, output_final_state=True
    )
    assert set(names_of(emulated)) == set(COMPOSED)


# --- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [193, 257, 500, 640])
def test_bits_of_the_chain(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int, v_first: bool
) -> None:
    inputs = draw(T, 1, 2, B=2, initial_state=state(2, 2))
    options = MODEL | {"checkpoint_every": 64, "state_v_first": v_first}
    composed, chained = in_both_ways(emulated, monkeypatch, inputs, **options)
    assert all_same_bits(composed, chained) and same_bits(composed.checkpoints, chained.checkpoints)


def test_bits_of_the_chain_in_a_pack(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of none to ten segments; the host counts as if one had all tokens."""
    use_lengths(monkeypatch, ONES)
    monkeypatch.setattr(choice, "_MOST_COMPOSED", 21)
    inputs = pack((0, 640, 64, 129, 0, 449), 9, gate="random", initial_state=state(6, 2))
    assert all_same_bits(*in_both_ways(emulated, monkeypatch, inputs, **MODEL))


def test_bits_behind_one_to_ten_maps(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An even and an odd number of them, each of which has its places in turn; then chunks in all stages."""
    use_lengths(monkeypatch, SegmentLengths(1, 0, 1, 1, 1, 6, 4))
    for T in (190, 256, 700, 12 * 64 - 1):
        assert all_same_bits(*in_both_ways(emulated, monkeypatch, draw(T, HV=1, seed=T), **MODEL))


def test_many_segments_are_chained(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of few: appended tokens change none."""
    use_lengths(monkeypatch, ONES)
    inputs, most = draw(64 * 13, HV=1), choice._MOST_COMPOSED
    whole = run(inputs, **MODEL).o
    assert names_of(emulated) == CUT
    emulated.clear()
    fewer = inputs._replace(**{n: getattr(inputs, n)[:, : 64 * most].contiguous() for n in TOKENS})
    assert same_bits(run(fewer, **MODEL).o, whole[:, : 64 * most])
    assert names_of(emulated) == COMPOSED


def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    use_lengths(monkeypatch, SegmentLengths(1, 0, 2, 1, 1, 3, 6))
    inputs, found = draw(650, HV=1), []
    for _ in in_each_order(monkeypatch, (0, 3, 4, 7)):
        found.append(run(inputs, output_final_state=True, **MODEL))
    assert all(all_same_bits(x, found[0]) for x in found)
    assert set(names_of(emulated)) == set(COMPOSED)


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(400)
    want = run(inputs, **MODEL).o
    monkeypatch.setenv(EVERY_LANE, "1")
    assert same_bits(run(inputs, **MODEL).o, want)


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = draw(350, B=2)
    want = run(inputs, **MODEL).o[0]
    for n in TOKENS:
        getattr(inputs, n)[1] = NAN
    assert same_bits(run(inputs, **MODEL).o[0], want)


# --- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", range(1, 23))
def test_shorter_segments(monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """No segment is shorter than packs have places for. Of 8192 tokens the long ones are walked at once, and the short
    ones beside them in two rounds at most."""
    monkeypatch.undo()
    lengths, before = (segments.choose_lengths(items, 132, shorter) for shorter in (True, False))
    if items > 8:
        assert lengths == before
        return
    found = [lengths.of(i) for i in range(lengths.segments(128))]
    assert found == sorted(found) and lengths.first == found[0] == 7
    assert lengths.segments(32) == 5 and lengths.segments(sum(found)) == len(found)
    longer = 2 * items * (len(found) - 5)
    assert longer <= 132 and 2 * items * 4 <= 2 * (132 - longer)


def test_a_call_in_shorter_segments(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths are those of one head, or of eight."""
    monkeypatch.setattr(segments, "choose_lengths", CHOOSE_LENGTHS)
    monkeypatch.setattr(choice, "USE_SHORTER_SEGMENTS", True)
    inputs = draw(2048, HV=1, initial_state=state(1, 1))
    request = request_of(OP, inputs, **MODEL)
    assert (cut := segments.cut_of(request)) is not None and cut.segments == 5
    check(inputs, 1.0, **MODEL)
    assert names_of(emulated) == COMPOSED


# --- which calls, conformance and the compiler ----------------------------------------------------------------------


def test_not_before_a_gpu_has_run_them(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not (choice.USE_COMPOSED_STARTS or choice.USE_SHORTER_SEGMENTS)


def test_float16_is_chained(emulated: list[str]) -> None:
    """Its products take float16 operands, and maps are bfloat16."""
    check(draw(300, of=torch.float16), **MODEL)
    assert names_of(emulated) == CUT


QUICK = (f"{OP}-causality_append-base", f"{OP}-accuracy-collinear")


def test_some_conformance_cases(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_lengths(monkeypatch, SegmentLengths(1, 0, 1, 1, 1, 2, 2))
    with registered(OP):
        cases = [c for c in wide_inference_cases(OP) if c.id.startswith(QUICK)]
        assert len(cases) >= len(QUICK)
        run_emulated(cases, emulated, "chunk_records")


@pytest.mark.exhaustive
def test_every_conformance_case(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_lengths(monkeypatch, SegmentLengths(1, 0, 1, 1, 1, 2, 2))
    with registered(OP):
        run_emulated(wide_inference_cases(OP), emulated, "chunk_records")


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", [Variant(), Variant(marks=True), Variant(128, narrow=True)])
@pytest.mark.parametrize("kernel", [first_segments_kernel, later_segments_kernel])
def test_products_overlap(kernel: Any, of: Variant) -> None:
    """The compiler says when it makes each product wait for the one before, or adds a wait. No more is spilled than is
    known."""
    source = kernel(of, composes=True).source
    built = compile_kernel(source, "sm_90a")
    assert "serialized" not in built.log
    assert "injected" not in built.log
    assert built.usage().spills <= allowed(source, "sm_90a")
