"""The backward of ``chunk_gated_delta_rule`` in segments, emulated on the CPU: against the oracle, equal bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL, error
from emulated_backend import NAME, registered, run_emulated
from gated_delta_backward_calls import WHOLE, check, output_grads, run, training
from gated_delta_calls import OP, TOKENS, draw, in_each_order, names_of, pack, state

from kdacore.testing import matrix
from kdacore.testing.serving import judge
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms.gated_delta import backward_segments
from kdacore_cuda.forms.gated_delta.kernels import inner_segments_kernel, outer_segments_kernel
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_reference.oracle import oracle_backward

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
NAN = float("nan")
OUTER, INNER = "walk_outer_segments", "walk_inner_segments"
TWO = ["chunk_records", OUTER, INNER, *WHOLE[2:]]
CUT = ["chunk_records", OUTER, "segment_chain", INNER, *WHOLE[2:]]
SHORT, WHOLE_SEQUENCES = SegmentLengths(1, 0, 2, 1, 1, 2, 3), SegmentLengths(99, 0, 99, 1, 99, 1, 99)
"""Chunks: two, one, one, then three each."""


CHOOSE_LENGTHS = backward_segments.choose_lengths


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lengths(monkeypatch, SHORT)


def use_lengths(monkeypatch: pytest.MonkeyPatch, lengths: SegmentLengths) -> None:
    monkeypatch.setattr(backward_segments, "choose_lengths", lambda *given: lengths)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("T", "names"), [(128, WHOLE), (129, TWO), (192, TWO), (193, CUT), (256, CUT), (449, CUT), (513, CUT)]
)
def test_lengths(emulated: list[str], T: int, names: list[str]) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **MODEL)
    assert names_of(emulated) == names


@pytest.mark.exhaustive
def test_the_lengths_that_calls_have(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_segments, "choose_lengths", CHOOSE_LENGTHS)
    check(draw(2300, HV=1, initial_state=state(1, 1)), loose=1.0, **MODEL)
    assert names_of(emulated) == CUT


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    inputs = draw(450, gate=gate, initial_state=state(1, 2))
    if gate not in ("init", "random"):
        inputs = inputs._replace(beta=inputs.beta.sigmoid())
    check(inputs, **options)
    assert names_of(emulated)[:4] == CUT[:4]


@pytest.mark.exhaustive
def test_bounded_gate_negative_eigenvalues_and_groups(emulated: list[str]) -> None:
    check(draw(330, 2, 6), safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, scale=0.2, **MODEL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    check(draw(330, B=2, initial_state=state(2, 2, dtype=dtype)), state_v_first=v_first, **MODEL)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("final", [False, True])
def test_packs(emulated: list[str], final: bool) -> None:
    """Sequences of none to five segments, and rows behind the pack."""
    inputs = pack((0, 1, 128, 129, 0, 450, 257, 0), 30, initial_state=state(8, 2))
    got = check(inputs, final=final, **MODEL)
    assert names_of(emulated) == CUT
    assert got.v is not None and not got.v[:, -30:].any()


@pytest.mark.exhaustive
def test_a_long_sequence_that_forgets_little(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """15 segments: errors are those of one walk."""
    inputs = draw(2048, HV=1, gate="slow", initial_state=state(1, 1))
    options = {**MODEL, "use_gate_in_kernel": False}
    r = training(inputs, output_final_state=True, **options)
    grads = output_grads(r, inputs)
    want = oracle_backward(r, inputs, grads)
    found: list[dict[str, float]] = []
    for lengths in (SegmentLengths(2, 0, 4, 1, 2, 30, 2), WHOLE_SEQUENCES):
        use_lengths(monkeypatch, lengths)
        emulated.clear()
        got = run(training(inputs, output_final_state=True, **options), inputs, grads)
        assert names_of(emulated) == (CUT[:-1] if len(found) == 0 else WHOLE[:-1])
        found.append({n: error(getattr(got, n), getattr(want, n)) for n in (*TOKENS, "initial_state")})
    cut, whole = found
    assert all(cut[n] < 1.1 * whole[n] for n in whole), found


# --- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_later_tokens_without_gradient_change_no_bit(emulated: list[str]) -> None:
    inputs, options = draw(600, initial_state=state(1, 2)), MODEL
    r = training(inputs, **options)
    grads = output_grads(r, inputs)
    assert grads.o is not None
    for cut in (100, 192, 256, 300):
        d_o = grads.o.clone()
        d_o[:, cut:] = 0
        whole = run(r, inputs, grads._replace(o=d_o))
        given = {n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS}
        short_inputs = inputs._replace(**given)
        short_request = training(short_inputs, **options)
        short = run(short_request, short_inputs, grads._replace(o=d_o[:, :cut].contiguous()))
        for n in TOKENS:
            assert torch.equal(getattr(short, n), getattr(whole, n)[:, :cut]), n
        assert torch.equal(short.initial_state, whole.initial_state)


@pytest.mark.exhaustive
def test_a_pack_has_the_bits_of_a_batch(emulated: list[str]) -> None:
    batch = draw(300, B=3, initial_state=state(3, 2))
    tokens = {n: getattr(batch, n).flatten(0, 1)[None] for n in TOKENS}
    packed = batch._replace(**tokens, cu_seqlens=torch.tensor([0, 300, 600, 900]))
    a = training(batch, output_final_state=True, **MODEL)
    b = training(packed, output_final_state=True, **MODEL)
    grads = output_grads(a, batch)
    assert grads.o is not None
    x, y = run(a, batch, grads), run(b, packed, grads._replace(o=grads.o.flatten(0, 1)[None]))
    for n in TOKENS:
        assert torch.equal(getattr(x, n).flatten(0, 1), getattr(y, n)[0]), n
    assert torch.equal(x.initial_state, y.initial_state)


@pytest.mark.exhaustive
def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = draw(350, B=2)
    r = training(inputs, **MODEL)
    grads = output_grads(r, inputs)
    want = run(r, inputs, grads)
    for n in TOKENS:
        getattr(inputs, n)[1] = NAN
    got = run(r, inputs, grads)
    assert all(torch.equal(getattr(got, n)[0], getattr(want, n)[0]) for n in TOKENS)


@pytest.mark.exhaustive
def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    use_lengths(monkeypatch, SegmentLengths(1, 0, 2, 1, 5, 2, 5))
    inputs = draw(600, HV=1)
    r = training(inputs, output_final_state=True, **MODEL)
    grads, found = output_grads(r, inputs), []
    for _ in in_each_order(monkeypatch, (0, 3, 4)):
        found.append(run(r, inputs, grads))
    for got in found[1:]:
        same_gradients(got, found[0])


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(400)
    r = training(inputs, **MODEL)
    grads = output_grads(r, inputs)
    want = run(r, inputs, grads)
    monkeypatch.setenv(EVERY_LANE, "1")
    same_gradients(run(r, inputs, grads), want)


# --- lengths, conformance and the compiler -------------------------------------------------------------------------


@pytest.mark.parametrize("items", range(1, 17))
def test_lengths_of_segments(monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """No segment is shorter than packs have places for; those of 8192 tokens are walked at once. Two would gain
    nothing."""
    monkeypatch.undo()
    lengths = backward_segments.choose_lengths(items, 132)
    found = [lengths.of(i) for i in range(40)]
    assert lengths.first == min(found)
    assert lengths.segments(32) == (3 if items < 5 else 1)
    assert 4 * items * (lengths.segments(128) - 1) <= 132
    assert lengths.segments(sum(found)) == len(found)


QUICK = (f"{OP}-gradient_causality_append-base", f"{OP}-gradients-base")


@pytest.mark.exhaustive
def test_some_conformance_cases(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_lengths(monkeypatch, SegmentLengths(1, 0, 1, 1, 1, 2, 2))
    with registered(OP):
        every = [
            dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=128, V=128))
            for c in matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
            if c.op == OP and c.id.startswith(QUICK)
        ]
        cases = [c for c in every if not judge(c)]
        assert cases
        run_emulated(cases, emulated, INNER)


@pytest.mark.exhaustive
def test_products_overlap() -> None:
    """The compiler says when it makes each product wait for the one before, or adds a wait."""
    for kernel in (outer_segments_kernel(), inner_segments_kernel()):
        log = compile_kernel(kernel.source, "sm_90a").log
        assert "serialized" not in log
        assert "injected" not in log
