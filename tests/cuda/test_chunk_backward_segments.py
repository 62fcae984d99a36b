"""The backward in segments, emulated on the CPU: each launch against its model, the whole against the oracle."""

from __future__ import annotations

from typing import Any

import chunk_backward_model as chunk_model
import chunk_backward_segments_model as model
import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, launch, worst
from chunk_backward_model import F64
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of
from emulated_backend import NAME, Plugin, run_emulated
from single_launches import in_segments

from kdacore.registry import REGISTRY
from kdacore.testing import matrix
from kdacore.testing.serving import judge
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE, KernelSource
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import kernels as chunk_backward_kernels
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.segments.segment_lengths import backward_segment_chunks
from kdacore_cuda.runtime import torch_launch
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.usefixtures("poison")

BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice that on calls as short as these."""
SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}
WALK_BOUND, CHAIN_BOUND = 3.5e-3, 1e-5
"""Relative, of a matrix: some roundings to bfloat16 and those of the states before; two parts of 8 bits."""
TOKENS = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


def use_segments(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    monkeypatch.setattr(chunk_backward_segments, "backward_segment_chunks", lambda *given: chunks)


def state(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 17) -> torch.Tensor:
    return Draw(seed).normal(*shape, 128, 128, dtype=dtype)


# --- each launch against its model ---------------------------------------------------------------------------------

PACK = [0, 0, 1, 130, 0, 128, 300]


def packed(N: int = len(PACK)) -> ChunkInputs:
    """Sequences without tokens, of one segment, of exactly one, of three."""
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32)
    return draw(sum(PACK), 1, 1, cu_seqlens=cu, initial_state=state(N, 1))


CASES = {
    "dense": lambda: draw(330, 1, 2, B=2, initial_state=state(2, 2)),
    "packed": packed,
}
MULTIPROCESSORS = pytest.mark.parametrize("multiprocessors", [1, 1000], ids=["busy device", "idle device"])
"""Where they are many, two blocks share a state."""


class Launches:
    """One call's launches on given workspaces, and the arrays that they leave."""

    def __init__(self, inputs: ChunkInputs, **options: Any) -> None:
        self.inputs = inputs
        self.request = request_of("chunk_kda", inputs, output_final_state=True, **BOUNDED_MODEL | options)
        self.plan = in_segments(self.request)
        self.do = Draw(5).normal(*inputs.v.shape)
        self.d_final = Draw(6).normal(*self.request.state_shape, dtype=torch.float32)
        self.memory = self.plan.workspace(inputs.q, self.request.HV)

    def work(self) -> dict[str, F64]:
        """What prepare should leave, rounded to what the workspace holds."""
        exact = chunk_model.prepare(self.request, self.inputs)
        return {
            name: chunk_model.to_float64(
                torch.from_numpy(x).to(torch.float32 if name == "last" else torch.bfloat16)
            )
            for name, x in exact.items()
        }

    def run(self, name: str, given: dict[str, F64], wanted: dict[str, Any]) -> dict[str, F64]:
        ((_, kernel, blocks),) = (x for x in self.plan.launches if x[0] == name)
        arrays = {"d_o": self.do, "d_ht": self.d_final, **self.memory}
        sizes = self.plan.sizes
        return launch(kernel, self.request, self.inputs, given, wanted, blocks=blocks, sizes=sizes, **arrays)


def hold(got: F64, want: F64, bound: float) -> None:
    """Every matrix within the bound; NaN exactly where the model left NaN."""
    made = ~np.isnan(want[..., 0, 0])
    assert made.any()
    assert np.array_equal(np.isnan(got[..., 0, 0]), ~made)
    for at in np.argwhere(made):
        assert error(got[tuple(at)], want[tuple(at)]) < bound, at


@pytest.mark.every_other
@MULTIPROCESSORS
@pytest.mark.parametrize("case", CASES)
def test_maps(emulated: list[str], monkeypatch: pytest.MonkeyPatch, case: str, multiprocessors: int) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)
    call = Launches(CASES[case]())
    work = call.work()
    names = ("kg", "qg", "w", "u", "aqk", "last")  # not kg_low and inv
    call.run("maps", {name: work[name] for name in names}, {})
    want = model.maps(call.request, call.inputs, work, call.do, call.d_final)
    hold(model.get_maps(call.memory["maps"]), want.A, WALK_BOUND)
    for name, exact in (("starts", want.starts), ("ends", want.ends)):
        hold(states_in(call.memory[name], exact.shape), exact, WALK_BOUND)
    assert f"WARPGROUPS{1 if multiprocessors > 1 else 2}" in emulated[0]


def states_in(memory: torch.Tensor, shape: tuple[int, ...]) -> chunk_model.F64:
    """Of the workspace, as matrices."""
    return chunk_model.from_tiles(chunk_model.to_float64(memory).reshape(shape))


LONG = {"dense": lambda: draw(64 * 8 + 5, initial_state=state(1, 1)), "packed": packed}


@pytest.mark.every_other
@MULTIPROCESSORS
@pytest.mark.parametrize("case", LONG)
def test_chain(emulated: list[str], monkeypatch: pytest.MonkeyPatch, case: str, multiprocessors: int) -> None:
    """Nine segments: the ring goes round twice."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)
    use_segments(monkeypatch, 1 if case == "dense" else 2)
    call = Launches(LONG[case]())
    made = model.maps(call.request, call.inputs, call.work(), call.do, call.d_final)
    rng = np.random.default_rng(0)
    for x, size in zip(made, (128**-0.5, 1.0, 1.0), strict=True):
        x[~np.isnan(x)] = size * rng.standard_normal((~np.isnan(x)).sum())
    call.memory["maps"].copy_(model.put_maps(made.A))
    call.memory["starts"].copy_(torch.from_numpy(chunk_model.to_tiles(made.starts)).flatten(2))
    call.memory["ends"].copy_(torch.from_numpy(chunk_model.to_tiles(made.ends)).flatten(2))
    call.run("chain", {}, {})
    for name, exact in zip(("starts", "ends"), model.chain(call.request, call.inputs, made), strict=True):
        hold(states_in(call.memory[name], exact.shape), exact, CHAIN_BOUND)


@pytest.mark.every_other
@MULTIPROCESSORS
@pytest.mark.parametrize("case", CASES)
def test_scan(emulated: list[str], monkeypatch: pytest.MonkeyPatch, case: str, multiprocessors: int) -> None:
    """From exact starts and ends: what one chain per head leaves."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)
    call = Launches(CASES[case]())
    work = call.work()
    made = model.maps(call.request, call.inputs, work, call.do, call.d_final)
    starts, ends = model.chain(call.request, call.inputs, made)
    call.memory["starts"].copy_(torch.from_numpy(chunk_model.to_tiles(starts)).flatten(2))
    call.memory["ends"].copy_(torch.from_numpy(chunk_model.to_tiles(ends)).flatten(2))
    want, d_h0 = chunk_model.scan(call.request, call.inputs, work, call.do, call.d_final)
    assert call.inputs.initial_state is not None
    wanted: dict[str, Any] = dict.fromkeys(("h", "u", "dh", "dr"))
    wanted["d_h0"] = (tuple(call.inputs.initial_state.shape), torch.float32)
    names = ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "last")
    got = call.run("scan", {name: work[name] for name in names}, wanted)
    where = filled(call.request, call.inputs)
    for name, exact in want.items():
        assert worst(got[name], exact, where) < WALK_BOUND, name
        elsewhere = np.ones(exact.shape[:2], bool)
        elsewhere[tuple(np.transpose(where))] = False
        assert np.isnan(got[name][elsewhere]).all(), name
    assert d_h0 is not None
    assert error(got["d_h0"], d_h0) < WALK_BOUND


# --- the whole against the oracle ----------------------------------------------------------------------------------


def grads_of(request: Request, inputs: ChunkInputs, *, final: bool = True) -> OutputGrads:
    d = Draw(17)
    do = d.normal(*inputs.v.shape)
    return OutputGrads(do, d.normal(*request.state_shape, dtype=torch.float32) if final else None)


def run(inputs: ChunkInputs, *, final: bool = True, **options: Any) -> InputGrads:
    request = request_of("chunk_kda", inputs, output_final_state=final, **options)
    return chunk_backward.backward(request, inputs, (), grads_of(request, inputs, final=final))


def check(inputs: ChunkInputs, *, final: bool = True, loose: float = 2.0, **options: Any) -> InputGrads:
    """Run, compare every gradient with the oracle, return what was computed."""
    request = request_of("chunk_kda", inputs, output_final_state=final, **options)
    want = oracle_backward(request, inputs, grads_of(request, inputs, final=final))
    got = run(inputs, final=final, **options)
    for name in InputGrads._fields:
        mine, exact = getattr(got, name), getattr(want, name)
        assert (mine is None) == (exact is None), name
        if mine is not None:
            given = getattr(inputs, name)
            assert mine.dtype == given.dtype and mine.shape == given.shape, name
            assert error(mine, exact) < loose * BOUND, name
    return got


@pytest.mark.parametrize("T", [1, 128, 129, 257])
def test_lengths(emulated: list[str], T: int) -> None:
    # Drawn so that the gradient of A_log, one number here, is not what is left of terms that cancel.
    check(draw(T, B=1 + T % 2, seed=T + 1, initial_state=state(1 + T % 2, 1)), **BOUNDED_MODEL)
    names = [name.split("-")[0] for name in emulated][1:-2]
    assert names == (["segment_maps", "segment_chain", "scan"] if T > 128 else ["scan"])
    assert "IN_SEGMENTS1" in emulated[-3]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pack_of_hard_lengths_with_states(emulated: list[str], index: torch.dtype) -> None:
    lengths = [0, 1, 15, 17, 0, 63, 64, 129, 0, 257]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=index)
    inputs = draw(sum(lengths), cu_seqlens=cu, initial_state=state(len(lengths), 1))
    got = check(inputs, state_v_first=True, **(BOUNDED_MODEL if index == torch.int32 else MODEL))
    # No token: the final state is the initial one.
    request = request_of("chunk_kda", inputs, output_final_state=True, state_v_first=True, **BOUNDED_MODEL)
    final = grads_of(request, inputs).final_state
    assert got.initial_state is not None
    assert final is not None
    assert torch.equal(got.initial_state[0], final[0])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("v_first", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    """Two value heads a head; with and without a gradient of the final state."""
    inputs = draw(300, 1, 2, initial_state=state(1, 2, dtype=dtype))
    request = request_of("chunk_kda", inputs, output_final_state=True, state_v_first=v_first, **BOUNDED_MODEL)
    for final in (None, state(1, 2, dtype=dtype, seed=3)):
        grads = OutputGrads(Draw(17).normal(*inputs.v.shape), final)
        want = oracle_backward(request, inputs, grads)
        got = chunk_backward.backward(request, inputs, (), grads)
        for name in InputGrads._fields:
            assert error(getattr(got, name), getattr(want, name)) < 2 * BOUND, name


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("gate", ["init", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    """Slow ones: what a segment hands on is most of the next one's state."""
    options = (BOUNDED_MODEL if gate == "init" else SAFE_LOG) if gate != "mixed" else {}
    check(draw(300, gate=gate, initial_state=state(1, 1)), **options)


def test_near_collinear_keys(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's case, which made kg's second part necessary in the scan; the walks that give B' leave it out."""
    use_segments(monkeypatch, 1)
    REGISTRY.register(Plugin(), NAME)
    try:
        wanted = [c for c in matrix.plan(NAME, device="cpu", kinds=("torch",)).cases if c.mode == "eager"]
        cases = [c for c in wanted if c.id.startswith("chunk_kda-gradients-collinear") and not judge(c)]
        run_emulated(cases, emulated, "segment_chain")
    finally:
        REGISTRY.reset()


def test_near_collinear_keys_are_as_in_one_chain(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harder case, in which the scan is beyond the bound: segments add nothing to its errors."""
    d = Draw(3)
    inputs = draw(300, gate="slow", initial_state=d.normal(1, 1, 128, 128, dtype=torch.float32))
    keys = d.normal(1, 1, 1, 128, dtype=torch.float32) + 1e-2 * d.normal(1, 300, 1, 128, dtype=torch.float32)
    unit = torch.nn.functional.normalize(keys, dim=-1).to(torch.bfloat16)
    inputs = inputs._replace(k=unit, beta=torch.full((1, 300, 1), 0.9975))
    request = request_of("chunk_kda", inputs, output_final_state=True, **SAFE_LOG)
    want = oracle_backward(request, inputs, grads_of(request, inputs))
    found = []
    for chunks in (1, 100):
        use_segments(monkeypatch, chunks)
        got = run(inputs, **SAFE_LOG)
        found.append({n: error(getattr(got, n), getattr(want, n)) for n in (*TOKENS, "initial_state")})
    assert all(found[0][name] < 1.05 * found[1][name] for name in found[0]), found


def test_grouped_heads_float32_gates_and_strides(emulated: list[str]) -> None:
    d = Draw(5)
    wide = d.normal(2, 140, 3, 256)
    g = d.normal(2, 140, 2, 128, dtype=torch.float32)
    check(draw(140, 1, 2, B=2, q=wide[:, :, 1:2, :128], g=g), **BOUNDED_MODEL)


@pytest.mark.parametrize("chunks", [1, 3])
def test_longer_than_two_rings(emulated: list[str], monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Of stages in a segment, of maps in the chain: who is a ring ahead must not mistake one phase for another."""
    use_segments(monkeypatch, chunks)
    check(draw(64 * (8 if chunks == 1 else 10), seed=chunks), **BOUNDED_MODEL)


# --- bits ----------------------------------------------------------------------------------------------------------


def test_nothing_flows_back(emulated: list[str]) -> None:
    """No gradient of the outputs: every gradient is exactly zero."""
    inputs = draw(300, initial_state=state(1, 1))
    request = request_of("chunk_kda", inputs, output_final_state=True, **BOUNDED_MODEL)
    got = chunk_backward.backward(request, inputs, (), OutputGrads(None, None))
    for name, x in got._asdict().items():
        assert x is not None and not x.any(), name


@pytest.mark.parametrize(
    ("cut", "options"), [(40, MODEL), (128, BOUNDED_MODEL), (200, BOUNDED_MODEL)], ids=["40", "128", "200"]
)
def test_what_follows_changes_no_bit(emulated: list[str], cut: int, options: dict[str, Any]) -> None:
    """A loss of a prefix, with other tokens behind it or none, also where these make more segments."""
    inputs, noise = draw(330, initial_state=state(1, 1)), draw(330, seed=9)
    do = Draw(3).normal(1, 330, 1, 128)
    do[:, cut:] = 0
    mixed = {n: torch.cat([getattr(inputs, n)[:, :cut], getattr(noise, n)[:, cut:]], 1) for n in TOKENS}
    alone = {n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS}
    found = []
    for tokens in ({}, mixed, alone):
        mine = inputs._replace(**tokens)
        request = request_of("chunk_kda", mine, **options)
        grads = OutputGrads(do[:, : mine.q.shape[1]].contiguous(), None)
        found.append(chunk_backward.backward(request, mine, (), grads))
    for other in found[1:]:
        for name in TOKENS:
            a, b = getattr(found[0], name), getattr(other, name)
            assert torch.equal(a[:, :cut], b[:, :cut]) and not b[:, cut:].any(), name
        for name in ("A_log", "dt_bias", "initial_state"):
            assert torch.equal(getattr(found[0], name), getattr(other, name)), name


def test_a_sequence_alone_and_in_a_pack(emulated: list[str]) -> None:
    """The same bits: segments begin at the same tokens. And NaN in its neighbours reaches nothing."""
    cu = torch.tensor([0, 50, 250, 290])
    inputs = draw(290, cu_seqlens=cu)
    do = Draw(17).normal(1, 290, 1, 128)
    own = {n: getattr(inputs, n)[:, 50:250].contiguous() for n in TOKENS}
    single = inputs._replace(cu_seqlens=None, **own)
    request = request_of("chunk_kda", single, **BOUNDED_MODEL)
    alone = chunk_backward.backward(request, single, (), OutputGrads(do[:, 50:250].contiguous(), None))
    for n in TOKENS:
        getattr(inputs, n)[:, :50] = getattr(inputs, n)[:, 250:] = float("nan")
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    together = chunk_backward.backward(request, inputs, (), OutputGrads(do, None))
    for n in TOKENS:
        assert torch.equal(getattr(together, n)[:, 50:250], getattr(alone, n)), n


def test_how_many_blocks_share_a_state_changes_no_bit(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw(330, initial_state=state(1, 1))
    found = []
    for warpgroups, blocks in ((1, 8), (2, 4)):
        monkeypatch.setattr(chunk_backward_kernels, "walk_warpgroups", lambda walks, count, n=warpgroups: n)
        monkeypatch.setattr(chunk_backward_segments, "chain_blocks", lambda items, count, n=blocks: n)
        found.append(run(inputs, **BOUNDED_MODEL))
    assert [sum(part in name for name in emulated) for part in ("WARPGROUPS1", "WARPGROUPS2", "ROWS")] == [
        2,
        2,
        2,
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies."""
    inputs, plain = draw(330), emulator.run
    found = []
    for seed in range(3):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        found.append(run(inputs, **BOUNDED_MODEL))
    for other in found[1:]:
        assert all(x is None or torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(330, initial_state=state(1, 1))
    want = run(inputs, **BOUNDED_MODEL)
    monkeypatch.setenv(EVERY_LANE, "1")
    assert all(torch.equal(a, b) for a, b in zip(want, run(inputs, **BOUNDED_MODEL), strict=True))


@pytest.mark.exhaustive
def test_the_suites_gradients_in_short_segments(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_segments(monkeypatch, 1)
    REGISTRY.register(Plugin(), NAME)
    try:
        wanted = [c for c in matrix.plan(NAME, device="cpu", kinds=("torch",)).cases if c.mode == "eager"]
        cases = [c for c in wanted if c.check in matrix.DIFFERENTIATES and not judge(c)]
        assert len(cases) > 25
        run_emulated(cases, emulated, "grads")
    finally:
        REGISTRY.reset()


# --- which calls, and what is compiled -----------------------------------------------------------------------------


def test_few_heads_go_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their length, as a choice by length would change bits when tokens are appended."""
    choose = choice.use_segments_backward
    assert [choose(n, 132) for n in (1, 8, 12, 13, 16, 64)] == [True] * 3 + [False] * 3
    assert not choose(8, 66)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    for T in (1, 5000):
        inputs = draw(T)
        request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
        sizes = in_segments(request).sizes
        assert (sizes["segment"], sizes["segments"]) == (2, -(-T // 128))


def test_segments_depend_on_heads_alone() -> None:
    assert [backward_segment_chunks(n) for n in (1, 6, 7, 12)] == [16, 16, 32, 32]


@pytest.mark.parametrize(
    ("H", "chunks", "warpgroups"), [(4, 16, [2, 1]), (8, 32, [1, 1]), (10, 32, [2, 2])], ids=str
)
def test_blocks_share_states_while_multiprocessors_are_idle(
    monkeypatch: pytest.MonkeyPatch, H: int, chunks: int, warpgroups: list[int]
) -> None:
    """At 8192 tokens, as measured: of the maps, and of the scan."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    use_segments(monkeypatch, chunks)
    inputs = ChunkInputs(
        *(torch.empty(1, 8192, H, 128, dtype=torch.bfloat16) for _ in range(4)), torch.empty(1, 8192, H)
    )
    launched = in_segments(request_of("chunk_kda", inputs)).launches
    blocks = {name: count for name, _, count in launched}
    kernels = {name: kernel for name, kernel, _ in launched}
    assert [dict(kernels[name].source.defines)["WARPGROUPS"] for name in ("maps", "scan")] == warpgroups
    segments = 128 // chunks
    assert blocks["maps"] == 3 * (segments - 1) * H * 2 // warpgroups[0]
    assert blocks["chain"] == 16 * H if 16 * H <= 132 else 8 * H
    assert blocks["scan"] == 2 * segments * H * 2 // warpgroups[1]


PACKAGED = [
    kernel
    for kernel in packaged_kernels("sm_90a")
    if kernel.macros["IN_SEGMENTS"]
    or (kernel.entry in ("segment_maps", "segment_chain") and not kernel.macros["OF_SLICE"])
]
"""The backward's kernels for segments."""


def test_the_kernels_for_segments_are_packaged() -> None:
    assert len(PACKAGED) == 3 * 2


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kernel", PACKAGED, ids=lambda k: k.name)
def test_compiles_without_spills(kernel: KernelSource) -> None:
    log = compile_kernel(kernel, "sm_90a")
    assert log.usage().spills == 0
    assert "serialized" not in log.log
    assert "setmaxnreg ignored" not in log.log


def test_the_benchmark_times_what_a_call_launches(emulated: list[str]) -> None:
    from benchmarks import backward_launches

    inputs = draw(300)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    grads = grads_of(request, inputs, final=False)
    steps = backward_launches.cuda_steps(request, inputs, grads)
    assert list(steps) == ["prepare", "maps", "chain", "scan", "gradients", "all"]
    timed = list(emulated)
    steps["all"]()
    assert emulated[len(timed) :][: len(timed)] == timed
