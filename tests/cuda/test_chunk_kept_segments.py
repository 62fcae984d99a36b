"""What a forward in segments keeps for its backward, emulated: gradients against the float64 oracle, and their bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, same_gradients
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of
from emulated_backend import NAME, Plugin

import kdacore
from kdacore.arrays.torch.eager import TORCH
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import kernels as chunk_backward_kernels
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.segments import kernels as segments_kernels
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.runtime import device_figures, torch_launch
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.usefixtures("poison")

GRADIENTS = 1.6e-2
"""Relative: contract section 4 for 16-bit inputs, twice that on calls as short as these."""
TOKENS = ("q", "k", "v", "g", "beta")
LONGER_BEHIND = SegmentLengths.growing(1, 2, 2, 2, 3)
SHORTER_LATER = SegmentLengths(3, 2, 1, 3, 2, 1, 3)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, kernels for sm_90a; segments of two chunks, so that few tokens make many. A backward that is given
    nothing would have others."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(chunk_backward_segments, "backward_segment_chunks", lambda *given: 3)
    cut_in(monkeypatch, SegmentLengths.uniform(2))


def cut_in(monkeypatch: pytest.MonkeyPatch, lengths: SegmentLengths) -> None:
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda request: lengths)


def state(*shape: int) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=torch.float32)


def kept_request(inputs: ChunkInputs, **options: Any) -> Request:
    return dataclasses.replace(
        request_of("chunk_kda", inputs, **{**BOUNDED_MODEL, **options}), needs_grad=True
    )


def grads_of(request: Request, inputs: ChunkInputs) -> OutputGrads:
    d = Draw(3)
    do = d.normal(*inputs.v.shape)
    final = d.normal(*request.state_shape, dtype=torch.float32) if request.output_final_state else None
    return OutputGrads(do, final)


def run(inputs: ChunkInputs, **options: Any) -> tuple[Outputs, InputGrads]:
    request = kept_request(inputs, **options)
    out = chunk_forward.forward(request, inputs)
    return out, chunk_backward.backward(request, inputs, out.saved, grads_of(request, inputs))


def check_gradients(request: Request, inputs: ChunkInputs, got: InputGrads) -> None:
    want = oracle_backward(request, inputs, grads_of(request, inputs))
    for name, mine, exact in zip(InputGrads._fields, got, want, strict=True):
        assert (mine is None) == (exact is None), name
        assert exact is None or error(mine, exact) < GRADIENTS, name


def packed() -> ChunkInputs:
    """Sequences without tokens, of one segment, of exactly one, of three."""
    lengths = [0, 0, 1, 130, 0, 128, 300]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return draw(sum(lengths), 1, 1, seed=3, cu_seqlens=cu, initial_state=state(len(lengths), 1))


CASES = {
    "dense": (lambda: draw(330, 1, 2, B=2, seed=1, initial_state=state(2, 2)), {}),
    "packed": (packed, {"state_v_first": True}),
    "unbounded": (lambda: draw(330, 2, 2, seed=2), {**MODEL, "safe_gate": False, "lower_bound": None}),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "lengths", [SegmentLengths.uniform(2), LONGER_BEHIND], ids=["equal", "longer behind"]
)
@pytest.mark.parametrize("case", CASES)
def test_gradients(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, case: str, lengths: SegmentLengths
) -> None:
    """The backward makes no map of the state, and cuts as the forward did."""
    cut_in(monkeypatch, lengths)
    make, options = CASES[case]
    inputs, options = make(), {"output_final_state": True, **options}
    out, got = run(inputs, **options)
    names = [name.split("-")[0] for name in emulated if not name.startswith("groups")]
    backward = names.index("output") + 1
    chain = [] if case == "unbounded" else ["chain"]  # begins with zeros, and so output finds start states
    assert names[:backward] == ["prepare", "maps", *chain, "output"]
    assert names[backward:] == ["prepare", "segment_maps", "segment_chain", "scan", "grads", "sums"]
    request = kept_request(inputs, **options)
    check_outputs(out, oracle(request, inputs), 2.0)
    check_gradients(request, inputs, got)


def test_what_is_kept(emulated: list[str]) -> None:
    """Of every segment of a value head, and the same results as where nothing is."""
    inputs = draw(330, 1, 2, B=2, initial_state=state(2, 2))
    request = kept_request(inputs, output_final_state=True)
    out = chunk_forward.forward(request, inputs)
    (buffer,) = out.saved
    assert buffer.dtype == torch.uint8 and buffer.shape == (2 * 2 * 3 * 128 * 1024,)
    plain = chunk_forward.forward(dataclasses.replace(request, needs_grad=False), inputs)
    assert plain.saved == () and torch.equal(plain.o, out.o)
    assert plain.final_state is not None and torch.equal(plain.final_state, out.final_state)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lengths", [SegmentLengths.uniform(2), SHORTER_LATER], ids=["equal", "shorter later"]
)
def test_output_that_finds_start_states_keeps_them(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, lengths: SegmentLengths
) -> None:
    """The same bits as those that a launch of its own finds."""
    cut_in(monkeypatch, lengths)
    inputs = draw(700, 1, 2, seed=4)
    out, grads = run(inputs, output_final_state=True)
    assert not any(name.startswith("chain-") for name in emulated)
    check_gradients(kept_request(inputs, output_final_state=True), inputs, grads)
    monkeypatch.setattr(segments_kernels, "output_composes", lambda segments, blocks: False)
    chained, chained_grads = run(inputs, output_final_state=True)
    assert any(name.startswith("chain-") for name in emulated)
    assert torch.equal(out.o, chained.o)
    assert torch.equal(out.final_state, chained.final_state)
    same_gradients(grads, chained_grads)


def test_it_serves_two_backwards_and_lies_anywhere(emulated: list[str]) -> None:
    """It is read, not written; off 16 bytes it is copied."""
    inputs = draw(330, initial_state=state(1, 1))
    request = kept_request(inputs)
    out, grads = chunk_forward.forward(request, inputs), grads_of(request, inputs)
    before = out.saved[0].clone()
    first = chunk_backward.backward(request, inputs, out.saved, grads)
    assert torch.equal(out.saved[0], before)
    moved = torch.empty(before.numel() + 1, dtype=torch.uint8)[1:]
    moved.copy_(before)
    assert moved.data_ptr() % 16
    same_gradients(chunk_backward.backward(request, inputs, (moved,), grads), first)


def test_without_it_the_backward_makes_its_own(emulated: list[str]) -> None:
    """Saved tensors may be lost, as where a compiler has split a call. Then in segments of another length."""
    inputs = draw(330, seed=2, initial_state=state(1, 1))
    request = kept_request(inputs)
    _, kept = run(inputs)
    alone = chunk_backward.backward(request, inputs, (), grads_of(request, inputs))
    for name, a, b in zip(InputGrads._fields, kept, alone, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or error(a, b.double().numpy()) < GRADIENTS, name


@pytest.mark.exhaustive
def test_no_gradient_depends_on_how_many_tokens_follow(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the loss does not see. Also where fewer tokens are one segment, of which nothing is kept, and such a
    backward would be one chain per head."""
    monkeypatch.setattr(choice, "use_segments_backward", lambda *given: False)
    inputs = draw(330, initial_state=state(1, 1))
    for cut in (100, 128, 200):
        do = Draw(3).normal(*inputs.v.shape)
        do[:, cut:] = 0
        found = []
        for T in (330, 260, cut):
            short = inputs._replace(**{n: getattr(inputs, n)[:, :T].contiguous() for n in TOKENS})
            request = kept_request(short)
            out = chunk_forward.forward(request, short)
            assert bool(out.saved) == (T > 128)
            grads = OutputGrads(do[:, :T].contiguous(), None)
            found.append(chunk_backward.backward(request, short, out.saved, grads))
        for other in found[1:]:
            for name in TOKENS:
                assert torch.equal(getattr(found[0], name)[:, :cut], getattr(other, name)[:, :cut]), name
            assert torch.equal(found[0].initial_state, other.initial_state)


def test_how_many_blocks_share_a_state_changes_no_bit(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, found = draw(330, initial_state=state(1, 1)), []
    for warpgroups, blocks in ((1, 8), (2, 4)):
        monkeypatch.setattr(chunk_backward_kernels, "walk_warpgroups", lambda walks, count, n=warpgroups: n)
        monkeypatch.setattr(chunk_backward_segments, "chain_blocks", lambda items, count, n=blocks: n)
        found.append(run(inputs)[1])
    same_gradients(*found)


@pytest.mark.exhaustive
def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies, and with an arrival for each lane, as racecheck is given the kernels."""
    inputs, plain = draw(330, initial_state=state(1, 1)), emulator.run
    want = run(inputs)[1]
    for seed in range(2):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        same_gradients(run(inputs)[1], want)
    monkeypatch.setattr(emulator, "run", plain)
    monkeypatch.setenv(EVERY_LANE, "1")
    same_gradients(run(inputs)[1], want)


@pytest.mark.exhaustive
def test_longer_than_two_rings(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chain's maps, and of the chunks of a segment."""
    cut_in(monkeypatch, SegmentLengths.growing(1, 6, 7, 1, 7))
    inputs = draw(64 * 13 + 5, seed=4, initial_state=state(1, 1))
    _, got = run(inputs, output_final_state=True)
    check_gradients(kept_request(inputs, output_final_state=True), inputs, got)


# --- cached calls, autograd ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_cached_calls_give_the_same_bits(emulated: list[str], case: str) -> None:
    make, options = CASES[case]
    inputs, options = make(), {"output_final_state": True, **options}
    request = kept_request(inputs, **options)
    wanted = tuple(x is not None for x in inputs[:8])
    step = chunk_backward.make_fast_gradients(request, inputs, wanted)
    assert step is not None
    emulated.clear()
    results = step.forward(tuple(inputs))
    assert results is not None
    o, final, _, kept = results
    grads = grads_of(request, inputs)
    got = step.backward(tuple(inputs), (kept,), *grads)
    launches = list(emulated)
    out, want = run(inputs, **options)
    assert emulated[len(launches) :] == launches
    assert torch.equal(o, out.o) and out.final_state is not None and torch.equal(final, out.final_state)
    same_gradients(got, want)
    assert step.backward(tuple(inputs), (), *grads) is None


def test_through_autograd(emulated: list[str]) -> None:
    """First, cached and checkpointed calls have the same bits; what is kept is freed with the graph."""
    REGISTRY.register(Plugin(), NAME)
    x = draw(200, initial_state=state(1, 1))
    do, d_final = Draw(3).normal(*x.v.shape), state(1, 1)
    names = [n for n, a in x._asdict().items() if a is not None]

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {**BOUNDED_MODEL, "output_final_state": True, "backend": NAME}
        return kdacore.chunk_kda(**dict(zip(names, leaves, strict=True)), **options)

    runs = []
    try:
        for i in range(5):
            leaves = [getattr(x, n).clone().requires_grad_() for n in names]
            if i == 4:
                o, final = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)
            else:
                o, final = call(*leaves)
                sizes = {
                    a.numel() for a in o.grad_fn.saved_tensors if a is not None and a.dtype == torch.uint8
                }
                assert sizes == {2 * 128 * 1024}
            torch.autograd.backward([o, final], [do, d_final])
            runs.append([o, final, *[a.grad for a in leaves]])
        assert TORCH.seen_calls.calls["chunk_kda"][0].fast_call is not None
    finally:
        REGISTRY.reset()
    assert all(torch.equal(a, b) for found in runs[1:] for a, b in zip(found, runs[0], strict=True))
    maps = [name for name in emulated if name.startswith("segment_maps")]
    assert len(maps) == 5


# --- which calls ---------------------------------------------------------------------------------------------------


def keeps(request: Request) -> bool:
    return chunk_backward.saved_kind(request) == "maps"


def test_which_calls_keep() -> None:
    inputs = draw(330)
    request = kept_request(inputs)
    assert keeps(request)
    for other in (
        dataclasses.replace(request, needs_grad=False),
        dataclasses.replace(request, traced=True),
        dataclasses.replace(request, batch_invariant=True),
        kept_request(draw(128)),
    ):
        assert not keeps(other)
    assert not choice.saves_maps(dataclasses.replace(request, kind="jax"), 132)
    calls = [dataclasses.replace(request, HV=heads) for heads in (1, 12, 16, 17)]
    assert [choice.saves_maps(r, 132) for r in calls] == [True] * 3 + [False]


def test_the_benchmark_times_what_a_call_launches(emulated: list[str]) -> None:
    from benchmarks import backward_launches, backward_segments

    inputs = draw(300)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    request, kept = backward_segments.with_kept(request, inputs)
    assert kept is not None
    emulated.clear()
    steps = backward_launches.cuda_steps(request, inputs, grads_of(request, inputs), kept)
    assert list(steps) == ["prepare", "maps", "chain", "scan", "gradients", "all"]
    timed = list(emulated)
    steps["all"]()
    assert emulated[len(timed) :][: len(timed)] == timed
    short = draw(100)
    assert backward_segments.with_kept(kept_request(short), short)[1] is None
