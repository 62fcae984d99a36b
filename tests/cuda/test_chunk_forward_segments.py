"""``chunk_kda`` in segments, emulated on the CPU: each launch against its model, the whole against the oracle."""

from __future__ import annotations

from typing import Any

import chunk_backward_model as chunk_model
import chunk_forward_segments_model as model
import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, worst
from chunk_backward_model import F64
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of
from form_calls import FormCall, segments_forward
from forward_checks import (
    check_gate_and_beta_in_float16,
    check_grouped_values_and_strides,
    check_later_tokens_change_no_bit,
)

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.choice import Figures
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.segments import kernels as segments_kernels
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, chain_blocks
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.runtime import device_figures, driver, torch_launch
from kdacore_cuda.runtime.kernel import Kernel

pytestmark = pytest.mark.usefixtures("poison")

SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}
BOTH = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
WALK_BOUND, CHAIN_BOUND = 3.5e-3, 1e-5
"""Relative, of a matrix: some roundings to bfloat16 and those of the states before; two parts of 8 bits."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many, and a launch that chains them."""
    use_segments(monkeypatch, 2)
    compose(monkeypatch, False)


def compose(monkeypatch: pytest.MonkeyPatch, composes: bool) -> None:
    """Do output's blocks find start states themselves?"""
    monkeypatch.setattr(
        segments_kernels, "output_composes", lambda segments, blocks: composes and blocks == 2
    )


def use_segments(monkeypatch: pytest.MonkeyPatch, chunks: int | SegmentLengths) -> None:
    lengths = SegmentLengths.uniform(chunks) if isinstance(chunks, int) else chunks
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: lengths)


LONGER_BEHIND = SegmentLengths.growing(1, 2, 2, 2, 3)
SHORTER_LATER = SegmentLengths(3, 2, 1, 3, 2, 1, 3)


@pytest.fixture(params=[2, LONGER_BEHIND], ids=["alike", "longer behind"])
def lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two chunks, and such of which later ones are longer."""
    use_segments(monkeypatch, request.param)


@pytest.fixture(params=[1, 132], ids=["busy device", "idle device"])
def multiprocessors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are many, more blocks share a state."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: request.param)


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return segments_forward(request_of("chunk_kda", inputs, **options), inputs)


def check(inputs: ChunkInputs, loose: float = 2.0, **options: Any) -> Outputs:
    """Run, compare with the oracle, return what was computed. Short sequences: the contract's hard-case factor."""
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    want = oracle(request, inputs)
    got = segments_forward(request, inputs)
    check_outputs(got, want, loose)
    return got


# --- each launch against its model ---------------------------------------------------------------------------------

PACK = [0, 0, 1, 130, 0, 128, 300]


def packed() -> ChunkInputs:
    """Sequences without tokens, of one segment, of exactly one, of three."""
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32)
    return draw(sum(PACK), 1, 1, cu_seqlens=cu, initial_state=state(len(PACK), 1))


CASES = {"dense": lambda: draw(330, 1, 2, B=2), "packed": packed}
LONG = {
    "dense": lambda: draw(64 * 16 + 5, initial_state=state(1, 1)),
    "from zero": lambda: draw(64 * 16 + 5),
    "packed": packed,
}


def operands_of(request: Request, inputs: ChunkInputs) -> dict[str, F64]:
    """What prepare should leave, rounded to what records hold."""
    exact = model.prepare(request, inputs)
    return {
        name: model.to_float64(torch.from_numpy(x).to(torch.float32 if name == "last" else torch.bfloat16))
        for name, x in exact.items()
    }


@pytest.mark.first_cases(1)
@BOTH
@pytest.mark.parametrize(
    "gate", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)], ids=str
)
def test_prepare_writes_operands(emulated: list[str], gate: torch.dtype, options: dict[str, Any]) -> None:
    inputs = packed()
    inputs = inputs._replace(g=inputs.g.to(gate))
    request = request_of("chunk_kda", inputs, **options)
    call = FormCall("segments", request, inputs)
    call.launch("prepare")
    got = model.get_operands(model.views(request, call.workspace).operands)
    want, where = model.prepare(request, inputs), filled(request, inputs)
    bounds = dict.fromkeys(("kd", "qg"), 3e-3) | dict.fromkeys(("kt", "aqt"), 5e-3) | {"last": 1e-4}
    for name, bound in bounds.items():
        exact = want[name]
        floors = [1e-30 if name == "last" else 0.01] * len(where)
        assert worst(got[name], exact, where, floors) < bound, name
        elsewhere = np.ones(exact.shape[:2], bool)
        elsewhere[tuple(np.transpose(where))] = False
        assert np.isnan(got[name][elsewhere]).all(), name


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_maps(emulated: list[str], lengths: None, case: str) -> None:
    inputs = CASES[case]()
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    call, work = FormCall("segments", request, inputs), operands_of(request, inputs)
    view = model.views(request, call.workspace)
    model.put_operands(view.operands, work)
    call.launch("maps")
    got, want = model.get_maps(view), model.maps(request, inputs, work)
    for mine, exact in zip(got, want, strict=True):
        made = ~np.isnan(exact[..., 0, 0])
        assert made.any()
        assert np.isnan(mine[~made]).all()
        for at in np.argwhere(made):
            assert error(mine[tuple(at)], exact[tuple(at)]) < WALK_BOUND


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("case", LONG)
def test_chain(emulated: list[str], lengths: None, multiprocessors: None, case: str) -> None:
    """Nine segments or more of a dense sequence: the ring goes round twice."""
    inputs = LONG[case]()
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    call = FormCall("segments", request, inputs)
    view = model.views(request, call.workspace)
    B, A = model.maps(request, inputs, operands_of(request, inputs))
    rng = np.random.default_rng(0)
    B[~np.isnan(B)] = rng.standard_normal((~np.isnan(B)).sum())
    A[~np.isnan(A)] = rng.standard_normal((~np.isnan(A)).sum()) / 128**0.5
    model.put_maps(view, B, A)
    call.launch("chain")
    got, want = chunk_model.from_tiles(model.to_float64(view.starts)), model.chain(request, inputs, B, A)
    made = ~np.isnan(want)
    assert made.any()
    assert np.array_equal(np.isnan(got), ~made)
    assert error(got[made], want[made]) < CHAIN_BOUND


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_output(
    emulated: list[str],
    lengths: None,
    multiprocessors: None,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    paired: bool,
) -> None:
    monkeypatch.setattr(
        segments_kernels, "output_is_paired", lambda items, blocks, composes: paired and blocks == 2
    )
    inputs = CASES[case]()
    request = request_of("chunk_kda", inputs, output_final_state=True, checkpoint_every=64, **BOUNDED_MODEL)
    call, work = FormCall("segments", request, inputs), operands_of(request, inputs)
    view = model.views(request, call.workspace)
    model.put_operands(view.operands, work)
    starts = model.chain(request, inputs, *model.maps(request, inputs, work))
    view.starts.copy_(torch.from_numpy(chunk_model.to_tiles(starts)))
    call.launch("output")
    o, final, kept = model.output(request, inputs, work, starts)
    got = call.outputs
    assert got.final_state is not None
    assert got.checkpoints is not None
    assert error(got.o, o) < WALK_BOUND
    assert error(got.final_state, np.swapaxes(final, -1, -2)) < WALK_BOUND
    flat = model.to_float64(got.checkpoints).reshape(-1, request.HV, 128, 128)
    assert error(flat[: len(kept)], np.swapaxes(np.stack(kept), -1, -2)) < WALK_BOUND
    assert not flat[len(kept) :].any()


# --- the whole against the oracle ----------------------------------------------------------------------------------


@pytest.mark.every_other
@BOTH
@pytest.mark.parametrize("T", [1, 64, 127, 128, 129, 257])
def test_lengths(emulated: list[str], T: int, options: dict[str, Any]) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **options)
    names = [name.split("-")[0] for name in emulated]
    assert names == (["prepare", "maps", "chain", "output"] if T > 128 else ["prepare", "output"])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("paired", [False, True], ids=["alone", "in pairs"])
@pytest.mark.parametrize("T", [129, 257, 700])
def test_output_that_composes_start_states(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int, paired: bool
) -> None:
    """No launch chains segments; the same bits."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(segments_kernels, "output_is_paired", lambda items, blocks, composes: paired)
    inputs, options = draw(T, B=1 + T % 2, seed=T), BOUNDED_MODEL | {"checkpoint_every": 64}
    chained = check(inputs, **options)
    compose(monkeypatch, True)
    emulated.clear()
    composed = check(inputs, **options)
    assert [name.split("-")[0] for name in emulated] == ["prepare", "maps", "output"]
    assert torch.equal(composed.o, chained.o)
    assert torch.equal(composed.final_state, chained.final_state)
    assert torch.equal(composed.checkpoints, chained.checkpoints)


@pytest.mark.parametrize(
    ("T", "H", "given", "composes"),
    [
        (8192, 8, (), True),
        (8192, 16, (), True),
        (8192, 4, (), True),
        (16384, 4, (), False),
        pytest.param(131072, 8, (), False, marks=pytest.mark.exhaustive),
        (8192, 8, ("initial_state",), False),
        (8192, 8, ("cu_seqlens",), False),
    ],
)
def test_when_output_composes(
    monkeypatch: pytest.MonkeyPatch, T: int, H: int, given: tuple[str, ...], composes: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    token = torch.empty(1, T, H, 128, dtype=torch.bfloat16)
    more: dict[str, torch.Tensor] = {
        "initial_state": torch.empty(1, H, 128, 128),
        "cu_seqlens": torch.tensor([0, 64, T]),
    }
    inputs = ChunkInputs(token, token, token, token, token[..., 0], **{name: more[name] for name in given})
    request = request_of("chunk_kda", inputs, **SAFE_LOG)
    launches = FormCall("segments", request, inputs).names
    assert launches == ["prepare", "maps", "output"] if composes else "chain" in launches


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packs_of_hard_lengths(emulated: list[str], index: torch.dtype) -> None:
    lengths = [0, 1, 15, 17, 0, 63, 64, 129, 0, 257]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=index)
    inputs = draw(sum(lengths), cu_seqlens=cu, initial_state=state(len(lengths), 1))
    got = check(inputs, checkpoint_every=64, **(BOUNDED_MODEL if index == torch.int32 else MODEL))
    assert got.final_state is not None
    assert inputs.initial_state is not None
    assert torch.equal(got.final_state[0], inputs.initial_state[0])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("composes", [False, True], ids=["chained", "composed"])
def test_shorter_segments_later(emulated: list[str], monkeypatch: pytest.MonkeyPatch, composes: bool) -> None:
    """Ends of every kind of segment, inside of each, and behind them; checkpoints."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    use_segments(monkeypatch, SHORTER_LATER)
    compose(monkeypatch, composes)
    for T in (192, 193, 384, 448, 500, 576, 700, 705, 960):
        check(draw(T, seed=T), checkpoint_every=64, **BOUNDED_MODEL)
    assert any(name.startswith("chain-") for name in emulated) != composes


@pytest.mark.exhaustive
@BOTH
def test_longer_segments_behind(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """From inside the short ones to the second long one; packs begin again with short ones; states and checkpoints."""
    use_segments(monkeypatch, LONGER_BEHIND)
    for T in (64, 128, 129, 256, 384, 385, 577, 700):
        check(draw(T, seed=T, initial_state=state(1, 1)), checkpoint_every=64, **options)
    lengths = [0, 129, 1, 330, 128, 129]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    inputs = draw(sum(lengths), 1, 2, cu_seqlens=cu, initial_state=state(len(lengths), 2))
    check(inputs, checkpoint_every=128, **options)


@pytest.mark.exhaustive
def test_longer_segments_behind_keep_bits(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever follows, and alone as in a pack, whose later sequences begin with short segments again."""
    use_segments(monkeypatch, LONGER_BEHIND)
    check_later_tokens_change_no_bit(run, BOUNDED_MODEL)
    inputs = draw(1000, cu_seqlens=torch.tensor([0, 350, 1000]), initial_state=state(2, 1))
    names, initial = ("q", "k", "v", "g", "beta"), inputs.initial_state
    assert initial is not None
    whole = run(inputs, output_final_state=True, **BOUNDED_MODEL)
    assert whole.final_state is not None
    for n, (begin, end) in enumerate([(0, 350), (350, 1000)]):
        part = {x: getattr(inputs, x)[:, begin:end] for x in names}
        alone = inputs._replace(cu_seqlens=None, initial_state=initial[n : n + 1], **part)
        got = run(alone, output_final_state=True, **BOUNDED_MODEL)
        assert torch.equal(got.o, whole.o[:, begin:end])
        assert got.final_state is not None
        assert torch.equal(got.final_state[0], whole.final_state[n])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    """Checkpoints that begin inside segments, at their ends and one in three."""
    inputs = draw(200, 1, 2, initial_state=state(1, 2, dtype=dtype))
    got = check(inputs, checkpoint_every=128 if v_first else 192, state_v_first=v_first, **BOUNDED_MODEL)
    assert got.final_state is not None
    assert got.final_state.dtype == dtype


@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_longer_than_two_rings(emulated: list[str], monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Of stages in a segment, of maps in the chain: who is a ring ahead must not mistake one phase for another."""
    use_segments(monkeypatch, chunks)
    check(draw(64 * (8 if chunks == 1 else 10), seed=chunks), 1.5, **BOUNDED_MODEL)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("gate", ["init", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    """Slow ones: what a segment hands on is most of the next one's state."""
    options = (BOUNDED_MODEL if gate == "init" else SAFE_LOG) if gate != "mixed" else {}
    check(draw(300, gate=gate, initial_state=state(1, 1)), **options)


@pytest.mark.parametrize("options", [SAFE_LOG, {}], ids=["bounded", "unbounded"])
def test_near_collinear_keys(emulated: list[str], options: dict[str, Any]) -> None:
    d = Draw(3)
    inputs = draw(300, gate="slow", initial_state=d.normal(1, 1, 128, 128, dtype=torch.float32))
    keys = d.normal(1, 1, 1, 128, dtype=torch.float32) + 1e-2 * d.normal(1, 300, 1, 128, dtype=torch.float32)
    unit = torch.nn.functional.normalize(keys, dim=-1).to(torch.bfloat16)
    check(inputs._replace(k=unit, beta=torch.full((1, 300, 1), 0.9975)), **options)


def test_grouped_values_and_strides(emulated: list[str]) -> None:
    check_grouped_values_and_strides(check)


def test_gate_and_beta_in_float16(emulated: list[str]) -> None:
    check_gate_and_beta_in_float16(check)


@BOTH
def test_later_tokens_change_no_bit(emulated: list[str], options: dict[str, Any]) -> None:
    """Also where they make a segment the last no more."""
    check_later_tokens_change_no_bit(run, options)


def test_a_sequence_alone_and_in_a_pack(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits: segments begin at the same tokens. And NaN in its neighbours reaches nothing."""
    cu = torch.tensor([0, 50, 250, 290])
    inputs = draw(290, cu_seqlens=cu)
    names = ("q", "k", "v", "g", "beta")
    alone = run(
        inputs._replace(cu_seqlens=None, **{n: getattr(inputs, n)[:, 50:250] for n in names}), **BOUNDED_MODEL
    ).o
    for n in names:
        getattr(inputs, n)[:, :50] = getattr(inputs, n)[:, 250:] = float("nan")
    assert torch.equal(run(inputs, **BOUNDED_MODEL).o[:, 50:250], alone)


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(270)
    want = run(inputs, **BOUNDED_MODEL).o
    monkeypatch.setenv(EVERY_LANE, "1")
    assert torch.equal(run(inputs, **BOUNDED_MODEL).o, want)


def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies."""
    inputs, plain = draw(270), emulator.run
    found = []
    for seed in range(3):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        found.append(run(inputs, output_final_state=True, **BOUNDED_MODEL))
    assert all(
        torch.equal(x.o, found[0].o) and torch.equal(x.final_state, found[0].final_state) for x in found
    )


@pytest.mark.exhaustive
@BOTH
@pytest.mark.parametrize("gate", ["random", "init"])
@pytest.mark.parametrize("seed", range(3))
def test_the_contract_s_length(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, seed: int, gate: str, options: dict[str, Any]
) -> None:
    use_segments(monkeypatch, 8)
    check(draw(2048, gate=gate, seed=seed), 1.0 if gate == "random" else 2.0, **options)


# --- which calls, and what is compiled -----------------------------------------------------------------------------


def test_few_heads_go_in_segments(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their length, as a choice by length would change bits when tokens are appended."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    for H, T in ((1, 1), (1, 200)):
        inputs = draw(T, H, H)
        emulated.clear()
        chunk_forward.forward(request_of("chunk_kda", inputs, **BOUNDED_MODEL), inputs)
        assert emulated[-1].startswith("output")
    use = choice.use_segments
    h100, h200 = 3.35e12, 4.9e12
    for rate, bounded, most in ((h100, True, 17), (h200, True, 22), (h100, False, 22), (h200, False, 22)):
        device = Figures("sm_90a", 132, lambda cluster: 0, lambda rate=rate: rate)
        assert [n for n in range(1, 100) if use(n, bounded, device)] == [*range(1, most + 1)]
    assert not use(16, True, Figures("sm_90a", 66, lambda cluster: 0, lambda: h200))


@pytest.mark.parametrize(("rate", "in_segments"), [(3.35e12, False), (4.9e12, True)], ids=["H100", "H200"])
def test_where_memory_is_fast_more_heads_go_in_segments(
    monkeypatch: pytest.MonkeyPatch, rate: float, in_segments: bool
) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "memory_rate", lambda index: rate)
    for heads, expected in ((17, True), (18, in_segments), (22, in_segments), (23, False)):
        token = torch.empty(1, 64, heads, 128, dtype=torch.bfloat16)
        inputs = ChunkInputs(token, token, token, token, token[..., 0])
        request = request_of("chunk_kda", inputs, **SAFE_LOG)
        assert (chosen(request).form == "segments") == expected, heads


def test_a_memory_rate_is_what_clock_and_bus_give() -> None:
    class Dll:
        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
            value._obj.value = {36: 3_201_000, 37: 6144}[attribute]  # an H200's
            return 0

    found = driver.Driver.__new__(driver.Driver)
    found._dll = Dll()
    assert found.memory_rate(0) == 4_916_736_000_000


def test_the_benchmark_times_what_a_call_launches(emulated: list[str]) -> None:
    from benchmarks import segment_launches

    inputs = draw(300, 1, 1)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    steps = segment_launches.launches(request, inputs)
    assert list(steps) == ["prepare", "maps", "chain", "output"]
    timed = list(emulated)
    segments_forward(request, inputs)
    assert emulated[len(timed) :] == timed


def test_blocks_share_states_while_multiprocessors_are_idle() -> None:
    assert [segments_kernels.output_blocks(n, 132) for n in (1, 66, 67, 128)] == [2, 2, 1, 1]
    assert [chain_blocks(n, 132) for n in (1, 16, 17, 27)] == [8, 8, 4, 4]
    paired = segments_kernels.output_is_paired
    assert [paired(n, 2, False) for n in (8, 9, 14, 15)] == [False, True, True, False]
    assert [paired(n, 2, True) for n in (3, 4, 14, 22)] == [False, True, True, True]
    assert not paired(12, 1, False)


def test_output_begins_early_where_the_chain_leaves_most_multiprocessors_idle(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    early = [segments_kernels.output_begins_early(8 * heads, 132) for heads in (1, 4, 5, 16)]
    assert early == [True, True, False, False]
    flag = FLAGS["EARLY_OUTPUT"]
    for heads in (2, 6):
        inputs = draw(300, heads, heads)
        request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
        call = FormCall("segments", request, inputs)
        assert call.names[2:] == ["chain", "output"]
        assert bool(int(call.numbers["segment_flags"]) & flag) == (heads == 2)


@pytest.mark.parametrize("T", [330, 700])
def test_how_many_blocks_share_a_state_changes_no_bit(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int
) -> None:
    inputs = draw(T, initial_state=state(1, 1))

    def outputs(multiprocessors: int, paired: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)
        monkeypatch.setattr(segments_kernels, "output_is_paired", lambda items, blocks, composes: paired)
        got = run(inputs, output_final_state=True, **BOUNDED_MODEL)
        assert got.final_state is not None
        assert ("CLUSTER2" in emulated[-1]) == paired
        return got.o, got.final_state

    few = outputs(1)
    for many in (outputs(132), outputs(132, paired=True)):
        assert torch.equal(few[0], many[0])
        assert torch.equal(few[1], many[1])


def test_checkpoints_have_the_bits_of_calls_that_end_there(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of segments and where they begin."""
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(2))
    inputs = draw(330, initial_state=state(1, 1))
    kept = run(inputs, checkpoint_every=64, **BOUNDED_MODEL).checkpoints
    assert kept is not None
    assert kept.shape[:2] == (1, 6)
    for j in range(1, 6):
        tokens = {name: getattr(inputs, name)[:, : 64 * j] for name in ("q", "k", "v", "g", "beta")}
        end = run(inputs._replace(**tokens), output_final_state=True, **BOUNDED_MODEL).final_state
        assert end is not None
        assert torch.equal(kept[:, j], end), j


def test_segments_depend_on_heads_and_place_alone() -> None:
    heads = (1, 4, 6, 8, 10, 12, 16, 20, 27)
    lengths = [segment_lengths.choose_lengths(n, 132, packed=False) for n in heads]
    assert [x.first for x in lengths] == [10, 10, 13, 17, 18, 21, 32, 32, 43]
    assert [x.later for x in lengths] == [8, 8, 10, 16, 23, 27, 32, 48, 43]
    assert [x.middle for x in lengths] == [16, 16, 16, 16, 22, 27, 32, 48, 43]
    assert [x.long for x in lengths] == [32, 32, 32, 32, 32, 32, 32, 48, 43]
    assert [x.segments(128) for x in lengths] == [14, 14, 11, 8, 6, 5, 4, 3, 3]
    packed = [segment_lengths.choose_lengths(n, 132, packed=True) for n in heads]
    assert [x.first for x in packed] == [10, 10, 12, 16, 22, 26, 32, 43, 43]
    assert not any(x.later_segments for x in packed)  # which have slots for segments as long as the first
    for x in (*lengths, *packed):
        of_8192_tokens = [x.of(j) for j in range(x.segments(128))]
        assert sum(of_8192_tokens[:-1]) < 128 <= sum(of_8192_tokens)


def test_as_many_segments_as_their_lengths_make() -> None:
    for lengths in (
        *(LONGER_BEHIND, SegmentLengths(11, 4, 6, 3, 16, 2, 20), SegmentLengths.growing(10, 13, 16, 2, 20)),
        SegmentLengths.uniform(3),
    ):
        begins = [0]
        for j in range(100):
            begins.append(begins[-1] + lengths.of(j))
        for chunks in range(1, 200):
            assert lengths.segments(chunks) == sum(begin < chunks for begin in begins)


def test_the_benchmark_reads_lengths_as_it_says() -> None:
    from benchmarks.segment_lengths import parse

    assert parse("shipped") is None
    assert parse("20x1,28x2,27") == SegmentLengths(20, 1, 28, 2, 27, 16, 32)
    assert parse("32x1,48") == SegmentLengths(32, 1, 48, 0, 48, 16, 48)
    assert parse("16") == SegmentLengths(16, 0, 16, 0, 16, 16, 32)


def test_the_benchmark_cuts_segments_as_it_is_told(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.segment_lengths import in_segments, parse

    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    inputs = draw(700, 1, 1, gate="init")  # slow decays: where segments begin then shows in the bits
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)

    def output(text: str) -> torch.Tensor:
        return in_segments(request, inputs, parse(text))().o

    told = {text: output(text) for text in ("2x1,3x2,4", "5")}
    assert not torch.equal(*told.values())
    for text, got in told.items():
        use_segments(monkeypatch, parse(text))
        assert torch.equal(run(inputs, **BOUNDED_MODEL).o, got), text


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "kernel",
    [
        segments_kernels.maps_kernel(),
        *map(segments_kernels.output_kernel, (1, 2)),
        segments_kernels.output_kernel(2, paired=True),
    ],
)
def test_products_overlap(kernel: Kernel) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(kernel.source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
