"""``chunk_gated_delta_rule`` in segments, emulated on the CPU: against the oracle and the model, as servers call it,
equal bits."""

from __future__ import annotations

import dataclasses

import gated_delta_model as model
import pytest
import torch
from cuda_calls import MODEL, error, request_of
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

from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import segments
from kdacore_cuda.forms.gated_delta.kernels import first_segments_kernel, later_segments_kernel
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
SHORT = SegmentLengths(1, 0, 2, 1, 1, 2, 3)
"""Chunks: two, one, one, then three each."""


CHOOSE_LENGTHS = segments.choose_lengths


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lengths(monkeypatch, SHORT)


def use_lengths(monkeypatch: pytest.MonkeyPatch, lengths: SegmentLengths) -> None:
    monkeypatch.setattr(segments, "choose_lengths", lambda *given: lengths)


CUT = ["chunk_records", "walk_first_segments", "chain", "walk_later_segments"]


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("T", "names"),
    [
        (128, ["chunk_records", "walk_records"]),
        (129, ["chunk_records", "walk_records"]),
        (192, ["chunk_records", "walk_records"]),
        (193, CUT),
        (255, CUT),
        (449, CUT),
        (513, CUT),
    ],
)
def test_lengths(emulated: list[str], T: int, names: list[str]) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **MODEL)
    assert names_of(emulated) == names


def test_the_lengths_that_calls_have(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "choose_lengths", CHOOSE_LENGTHS)
    check(draw(2300, HV=1, initial_state=state(1, 1)), 1.0, **MODEL)
    assert names_of(emulated) == CUT


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    check(draw(450, gate=gate, initial_state=state(1, 2)), **options)
    assert names_of(emulated) == CUT


@pytest.mark.exhaustive
def test_a_long_sequence_that_forgets_little(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """15 segments: errors of maps and of the chain stay below those of the walks."""
    use_lengths(monkeypatch, SegmentLengths(4, 0, 8, 1, 4, 30, 4))
    options = {**MODEL, "use_gate_in_kernel": False}
    inputs = draw(4096, HV=1, gate="slow", initial_state=state(1, 1))
    got = check(inputs, 1.0, **options)
    emulated.clear()
    use_lengths(monkeypatch, SegmentLengths(64, 0, 64, 1, 64, 1, 64))
    whole = check(inputs, 1.0, **options)
    assert "walk_records" in names_of(emulated)
    request = request_of(OP, inputs, output_final_state=True, **options)
    _, o, final = model.walk(request, inputs, model.records(request, inputs))
    assert error(got.o, o) < 1.05 * error(whole.o, o)
    assert error(got.final_state, final) < 1.05 * error(whole.final_state, final)


def test_nearly_equal_keys(emulated: list[str]) -> None:
    """Maps then consist of products of large matrices that nearly cancel."""
    inputs = draw(400, gate="fast", initial_state=state(1, 2))
    k = inputs.k[:, :1] + 0.05 * inputs.k
    inputs = inputs._replace(k=k, beta=torch.full_like(inputs.beta, 6.0))
    check(inputs, **{**MODEL, "use_gate_in_kernel": False})
    assert names_of(emulated) == CUT


def test_negative_eigenvalues_and_groups(emulated: list[str]) -> None:
    check(draw(400, 2, 6), safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, scale=0.2, **MODEL)


def test_strided_tokens(emulated: list[str]) -> None:
    wide = torch.randn(1, 340, 2, 4 * 128).to(torch.bfloat16)
    v = torch.cat([wide[..., 128:256], wide[..., :128]], -2)
    inputs = draw(340, 2, 4)._replace(q=wide[..., :128], k=wide[..., 256:384], v=v[..., :4, :])
    check(inputs, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", [64, 128, 192, 256])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], every: int, v_first: bool, dtype: torch.dtype) -> None:
    """Checkpoints inside segments and at their borders."""
    inputs = draw(510, B=2, initial_state=state(2, 2, dtype=dtype))
    got = check(inputs, checkpoint_every=every, state_v_first=v_first, **MODEL)
    assert got.final_state is not None and got.final_state.dtype == dtype


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
    assert names_of(emulated)[:4] == CUT


def test_one_pool_in_place(emulated: list[str]) -> None:
    indices = torch.tensor([3, 5, -4, 1], dtype=torch.int32)
    inputs = pack((330, 0, 40, 193), 5, gate="random", initial_state=pool_of(6, 128), state_indices=indices)
    out = torch.full(inputs.v.shape, 7.0, dtype=torch.bfloat16)
    assert check_servers(inputs._replace(out=out), inplace_state=True).written.nonzero()[0].tolist() == [
        1,
        3,
        5,
    ]
    check_servers(inputs, output_final_state=True)  # new final states, zero for padding


def test_batches_with_padding(emulated: list[str]) -> None:
    inputs = draw(250, B=3, gate="random", initial_state=pool_of(4, 128))
    check_servers(inputs._replace(state_indices=torch.tensor([2, -1, 0])), inplace_state=True)
    check_servers(
        inputs._replace(state_indices=torch.tensor([2, -1, 0])), null_index=2, output_final_state=True
    )
    assert set(names_of(emulated)) == set(CUT)


def test_checkpoints_of_packs(emulated: list[str]) -> None:
    offsets = torch.tensor([0, 0, 265, 266, 522, 850])
    check(draw(870, cu_seqlens=offsets, initial_state=state(5, 2)), checkpoint_every=64, **MODEL)


# --- bits ----------------------------------------------------------------------------------------------------------


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    """Changed or appended, at borders of segments and elsewhere: of outputs, checkpoints and final states."""
    inputs, noise = draw(600), draw(600, seed=7)
    options = MODEL | {"checkpoint_every": 64, "output_final_state": True}
    whole = run(inputs, **options)
    assert whole.checkpoints is not None
    for cut in (40, 128, 192, 200, 256, 320, 448):
        given = {n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS}
        short = run(inputs._replace(**given), **options)
        assert short.checkpoints is not None and short.final_state is not None
        assert same_bits(short.o, whole.o[:, :cut])
        assert same_bits(short.checkpoints, whole.checkpoints[:, : -(-cut // 64)])
        if cut % 64 == 0:
            assert same_bits(short.final_state, whole.checkpoints[:, cut // 64])
    mixed = {n: torch.cat([getattr(inputs, n)[:, :300], getattr(noise, n)[:, 300:]], 1) for n in TOKENS}
    assert same_bits(run(inputs._replace(**mixed), **MODEL).o[:, :300], whole.o[:, :300])


def test_a_first_segment_has_the_bits_of_a_call_that_is_not_cut(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw(320)
    got = run(inputs, **MODEL).o
    use_lengths(monkeypatch, SegmentLengths(9, 0, 9, 1, 9, 1, 9))
    emulated.clear()
    want = run(inputs, **MODEL).o
    assert names_of(emulated) == ["chunk_records", "walk_records"]
    assert same_bits(got[:, :192], want[:, :192])  # the second segment begins with the end of the first


@pytest.mark.exhaustive
def test_the_same_bits_alone_in_a_batch_and_in_a_pack(emulated: list[str]) -> None:
    """Where segments are as long."""
    batch = draw(300, B=3)
    first = batch._replace(**{n: getattr(batch, n)[:1].contiguous() for n in TOKENS})
    tokens = {n: getattr(batch, n).flatten(0, 1)[None] for n in TOKENS}
    packed = batch._replace(**tokens, cu_seqlens=torch.tensor([0, 300, 600, 900]))
    found = [run(x, **MODEL).o.flatten(0, 1)[:300] for x in (first, batch, packed)]
    assert all(same_bits(x, found[0]) for x in found)


def test_batch_invariant_calls_are_not_cut(emulated: list[str]) -> None:
    inputs = draw(600)
    request = dataclasses.replace(request_of(OP, inputs, **MODEL), batch_invariant=True)
    gated_delta.forward(request, inputs)
    assert names_of(emulated) == ["chunk_records", "walk_records"]


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = draw(350, B=2)
    want = run(inputs, **MODEL).o[0]
    for n in TOKENS:
        getattr(inputs, n)[1] = NAN
    assert same_bits(run(inputs, **MODEL).o[0], want)


def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    use_lengths(monkeypatch, SegmentLengths(1, 0, 2, 1, 6, 2, 6))
    inputs, found = draw(650, HV=1), []
    for _ in in_each_order(monkeypatch, (0, 3, 4)):
        found.append(run(inputs, output_final_state=True, **MODEL))
    assert all(all_same_bits(x, found[0]) for x in found)


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(400)
    want = run(inputs, **MODEL).o
    monkeypatch.setenv(EVERY_LANE, "1")
    assert same_bits(run(inputs, **MODEL).o, want)


# --- lengths, conformance and the compiler -------------------------------------------------------------------------


@pytest.mark.parametrize("items", range(1, 23))
def test_lengths_of_segments(monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """No segment is shorter than packs have places for; those of 8192 tokens are walked at once."""
    monkeypatch.undo()
    lengths = segments.choose_lengths(items, 132)
    found = [lengths.of(i) for i in range(40)]
    assert lengths.first == min(found)
    assert lengths.segments(32) <= 3
    later = lengths.segments(128) - 1
    assert 2 * items * later <= 132
    assert lengths.segments(sum(found)) == len(found)


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
def test_products_overlap() -> None:
    """The compiler says when it makes each product wait for the one before, or adds a wait."""
    for kernel in (first_segments_kernel(), later_segments_kernel()):
        log = compile_kernel(kernel.source, "sm_90a").log
        assert "serialized" not in log
        assert "injected" not in log
