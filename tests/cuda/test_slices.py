"""``chunk_kda`` on slices of a row that ranks share, emulated on the CPU, against the oracle on the whole row."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from emulated_backend import NAME, Plugin
from slice_ranks import TOKENS, Row

import kdacore
from kdacore.parallel import local_group
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.segments.segment_lengths import slice_segment_chunks
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_cuda.forms.slices import functions as slices
from kdacore_cuda.forms.slices import launches as slices_launches
from kdacore_cuda.runtime import device_figures, executor, torch_launch
from kdacore_reference.oracle import oracle_backward, oracle_forward

pytestmark = pytest.mark.usefixtures("poison")

GRADIENT_BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice each bound on calls as short as these."""
SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


def use_segments(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    monkeypatch.setattr(slices_launches, "slice_segment_chunks", lambda *args: chunks)


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


def check_forward(inputs: ChunkInputs, ranks: int, **options: Any) -> None:
    want = oracle_forward(request_of("chunk_kda", inputs, output_final_state=True, **options), inputs)
    o, final = Row(inputs, ranks, output_final_state=True, **options).outputs()
    assert error(o, want.o) < 2 * O_BOUND
    assert final is not None
    exact = np.asarray(want.final_state)
    exact = np.swapaxes(exact, -1, -2) if options.get("state_v_first") else exact
    assert error(final, exact) < 2 * STATE_BOUND


def check_gradients(
    inputs: ChunkInputs, ranks: int, *, final: bool = True, kept: bool = False, **options: Any
) -> InputGrads:
    request = request_of("chunk_kda", inputs, output_final_state=final, **options)
    d = Draw(17)
    do = d.normal(*inputs.v.shape)
    if inputs.cu_seqlens is not None:
        do[:, int(inputs.cu_seqlens[-1]) :] = 0  # padding
    grads = OutputGrads(do, d.normal(*request.state_shape, dtype=torch.float32) if final else None)
    want = oracle_backward(request, inputs, grads)
    got = Row(inputs, ranks, kept, output_final_state=final, **options).gradients(grads)
    for name in InputGrads._fields:
        mine, exact = getattr(got, name), getattr(want, name)
        if exact is None:
            continue
        exact = np.asarray(exact)
        if name == "initial_state" and options.get("state_v_first"):
            exact = np.swapaxes(exact, -1, -2)
        assert error(mine, exact) < 2 * GRADIENT_BOUND, name
    return got


def pack(lengths: list[int], T: int, index: torch.dtype = torch.int32, **more: Any) -> ChunkInputs:
    """Sequences of these lengths and padding up to T."""
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=index)
    return draw(T, 1, 1, cu_seqlens=cu, initial_state=state(len(lengths), 1), **more)


CROSSING = [0, 30, 0, 400, 17, 0, 193, 70, 0]
"""On 3 ranks of 256: an empty first sequence, one that skips no rank, one that ends inside the last; padding."""
SKIPPING = [3, 700, 65]
"""On 4 ranks of 192: one that has the second and third rank whole, and ends inside the last."""

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


@pytest.mark.first_cases(1)
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


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
def test_blocks_that_share_states_give_the_same_bits(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    inputs, found = draw(300, initial_state=state(1, 1)), []
    for multiprocessors in (1, 1000):
        monkeypatch.setattr(torch_launch, "multiprocessors", lambda index, n=multiprocessors: n)
        row = Row(inputs, 2, kept, output_final_state=True, **BOUNDED_MODEL)
        grads = row.gradients(OutputGrads(Draw(3).normal(*inputs.v.shape), state(1, 1)))
        found.append([*row.outputs(), *row.transitions, *(x for x in grads if x is not None)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    """On the same rank and on ranks before."""
    inputs = draw(512)
    options = {**BOUNDED_MODEL}
    before = Row(inputs, 2, **options).outputs()[0]
    changed = inputs._replace(**{n: getattr(inputs, n).clone() for n in TOKENS})
    for n in TOKENS:
        getattr(changed, n)[:, 300:] = getattr(changed, n)[:, 300:].flip(1)
    assert torch.equal(Row(changed, 2, **options).outputs()[0][:, :300], before[:, :300])


def test_calls_with_cp(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function, ranks as threads: a pack with bfloat16 states, and its gradients."""
    REGISTRY.register(Plugin(), NAME)
    plain, one_at_a_time = executor.start_of, threading.Lock()

    def start_of(*program: Any) -> Any:
        start = plain(*program)

        def locked(*call: Any) -> None:
            with one_at_a_time:  # the emulator serves one
                start(*call)

        return locked

    monkeypatch.setattr(executor, "start_of", start_of)
    inputs = pack(CROSSING, 768, torch.int64)
    assert inputs.initial_state is not None
    inputs = inputs._replace(initial_state=inputs.initial_state.mT.bfloat16().contiguous())
    options = {**BOUNDED_MODEL, "state_v_first": True, "output_final_state": True}
    request = request_of("chunk_kda", inputs, **options)
    d = Draw(3)
    do, d_final = d.normal(*inputs.v.shape), d.normal(*request.state_shape)
    do[:, sum(CROSSING) :] = 0
    group = local_group(3)

    def run(rank: int) -> list[torch.Tensor]:
        rows = slice(256 * rank, 256 * rank + 256)
        names = [n for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()]
        leaves = {
            n: (getattr(inputs, n)[:, rows] if n in TOKENS else getattr(inputs, n)).clone().requires_grad_()
            for n in names
        }
        with kdacore.record_selections() as selections, torch.autograd.set_multithreading_enabled(False):
            o, final = kdacore.chunk_kda(
                **leaves, cu_seqlens=inputs.cu_seqlens, **options, cp=group[rank], backend=NAME
            )
            given = d_final if rank == 1 else torch.zeros_like(d_final)
            grads = torch.autograd.grad([o, final], list(leaves.values()), [do[:, rows], given])
        assert [s.backend for s in selections] == [NAME]
        return [o.detach(), final.detach(), *grads]

    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(run, range(3)))
    finally:
        REGISTRY.reset()
    assert {name.split("-")[0] for name in emulated} >= {"transition", "slice_starts", "slice_gradient"}
    want, exact = oracle_forward(request, inputs), oracle_backward(request, inputs, OutputGrads(do, d_final))
    assert error(torch.cat([x[0] for x in found], 1), want.o) < 2 * O_BOUND
    assert all(error(x[1], want.final_state) < 2 * STATE_BOUND for x in found)
    names = [n for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()]
    for i, name in enumerate(names, 2):
        parts = [x[i].float() for x in found]
        whole = torch.cat(parts, 1) if name in TOKENS else torch.stack(parts).sum(0)
        assert error(whole, getattr(exact, name)) < 2 * GRADIENT_BOUND, name


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
    assert len(PACKAGED) == 2 + 4 + 2 + 2 * len(ENTRIES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", PACKAGED, ids=lambda k: k.name)
def test_compiles_without_spills(kernel: KernelSource) -> None:
    log = compile_kernel(kernel, "sm_90a")
    assert log.usage().spills == 0
    assert "serialized" not in log.log
    assert "setmaxnreg ignored" not in log.log
