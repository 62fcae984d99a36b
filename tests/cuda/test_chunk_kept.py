"""What a forward keeps for its backward under disable_recompute, emulated: results against the float64 oracle, kept
arrays and gradients bit for bit those that a backward without it computes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from chunk_backward_calls import draw, filled, same_gradients
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of
from emulated_backend import NAME, Plugin, run_emulated
from single_launches import WORKSPACE, launch, make_workspace, plan_of
from test_chunk_backward_conformance import served
from test_chunk_backward_scan import guarded

import kdacore
from kdacore.dispatch import torch_operators
from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import kernels
from kdacore_cuda.forms.backward.kernels import scan_kernel, scan_outputs_kernel, walk_warpgroups
from kdacore_cuda.forms.backward.workspace import SAVED, saved_buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.saving_forward import launches as kept_launches
from kdacore_cuda.runtime import device_figures, torch_launch
from kdacore_reference.oracle import oracle_backward

exhaustive = pytest.mark.exhaustive
GRADIENTS = 1.6e-2
"""Relative: contract section 4 for 16-bit inputs, twice that on calls as short as these."""


@pytest.fixture(autouse=True)
def many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, kernels for sm_90a, and one chain per head, as with many heads."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments_backward", lambda *given: False)


def kept_request(inputs: ChunkInputs, **options: Any) -> Request:
    """A call that needs gradients and may keep what it likes."""
    request = request_of("chunk_kda", inputs, **{**BOUNDED_MODEL, "disable_recompute": True, **options})
    return dataclasses.replace(request, needs_grad=True)


def run(request: Request, inputs: ChunkInputs) -> tuple[Outputs, InputGrads, OutputGrads]:
    """Forward and backward with random gradients of the results."""
    out = chunk_forward.forward(request, inputs)
    d = Draw(17)
    d_final = (
        d.normal(*request.state_shape, dtype=out.final_state.dtype) if out.final_state is not None else None
    )
    grads = OutputGrads(guarded(d.normal(*inputs.v.shape)), d_final)
    return out, chunk_backward.backward(request, inputs, out.saved, grads), grads


def recomputed(request: Request, inputs: ChunkInputs, do: torch.Tensor) -> dict[str, torch.Tensor]:
    """The workspace as the backward's own prepare and scan leave it."""
    plan = plan_of(request)
    work = make_workspace(plan, inputs.q, *WORKSPACE)
    launch(kernels.prepare_kernel(plan.float_gate, plan.bounded), plan, inputs, work)
    launch(scan_kernel(1), plan, inputs, work | {"d_o": do})
    return work


def check(inputs: ChunkInputs, launched: list[str], *, gradients_too: bool = True, **options: Any) -> Outputs:
    """Results against the oracle, kept arrays and gradients bit for bit against what is recomputed.

    Args:
        gradients_too: hold gradients to the oracle as well. Not where a draw has sums that cancel, as the single number
            of A_log; they have the bits of a recomputing backward, which its own tests hold to the oracle.
    """
    request = kept_request(inputs, **options)
    launched.clear()
    out, got, grads = run(request, inputs)
    names = [name.split("-")[0] for name in launched]
    assert names[:4] == ["prepare", "scan_outputs", "scan", "grads"]
    check_outputs(out, oracle(request, inputs), 2.0)  # the contract's factor for short sequences
    exact = oracle_backward(request, inputs, grads) if gradients_too else InputGrads(*[None] * 8)
    for name in InputGrads._fields:
        assert getattr(exact, name) is None or error(getattr(got, name), getattr(exact, name)) < GRADIENTS, (
            name
        )
    same_gradients(got, chunk_backward.backward(request, inputs, (), grads))

    (buffer,) = out.saved
    units = int(plan_of(request).numbers["units"])
    assert buffer.dtype == torch.uint8 and buffer.shape == (units * 133376,)
    kept = {name: buffer[at:] for name, at in saved_buffer(units)[0].items()}
    assert grads.o is not None
    for name, x in recomputed(request, inputs, grads.o).items():
        if name in ("dh", "dr"):
            continue
        mine = kept[name][: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for at in filled(request, inputs):
            assert torch.equal(mine[at], x[at]), name
    return out


def states(n: int, hv: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(5).normal(n, hv, 128, 128, dtype=dtype)


def test_dense(emulated: list[str]) -> None:
    """A ring runs round, a last chunk of eight tokens. Drawn so that the gradient of A_log, one number here, is not
    what is left of terms that cancel."""
    check(draw(4 * 64 + 8, seed=1, initial_state=states(1, 1)), emulated, output_final_state=True)


def test_the_bounds_where_they_are_stated(emulated: list[str]) -> None:
    """The contract's are those of 2048 tokens; the state after a few dozen, which other tests have, is less exact."""
    inputs = draw(2048, seed=1)
    request = kept_request(inputs, output_final_state=True)
    check_outputs(chunk_forward.forward(request, inputs), oracle(request, inputs), 1.0)
    assert emulated == ["prepare-G_FLOAT0-BOUNDED1", "scan_outputs-WARPGROUPS1"]


def test_unbounded_gates_and_grouped_heads(emulated: list[str]) -> None:
    check(draw(70, 1, 2), emulated, **MODEL, safe_gate=False, lower_bound=None)


def test_pack_of_hard_lengths(emulated: list[str]) -> None:
    """States V first, float32 gates, and NaN in rows that belong to no sequence: their outputs are zero."""
    cu = torch.tensor([0, 0, 1, 16, 80, 145], dtype=torch.int64)
    inputs = draw(145, cu_seqlens=cu, initial_state=states(5, 1), seed=1)
    inputs = inputs._replace(g=inputs.g.float())
    options = {"output_final_state": True, "state_v_first": True}
    want = check(inputs, emulated, **options)
    longer = {
        name: torch.cat([x := getattr(inputs, name), torch.full_like(x[:, :20], float("nan"))], 1)
        for name in ("q", "k", "v", "g", "beta")
    }
    behind = inputs._replace(**longer)
    got = chunk_forward.forward(kept_request(behind, **options), behind)
    assert torch.equal(got.o[:, :145], want.o) and not got.o[:, 145:].any()
    assert got.final_state is not None and torch.equal(got.final_state, want.final_state)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 128, 500])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("gate", ["random", "init"])
@exhaustive
def test_lengths(emulated: list[str], T: int, bounded: bool, gate: str) -> None:
    options = {} if bounded else {"safe_gate": False, "lower_bound": None}
    check(draw(T, gate=gate), emulated, gradients_too=False, output_final_state=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
@exhaustive
def test_states(emulated: list[str], dtype: torch.dtype, v_first: bool) -> None:
    inputs = draw(70, 2, 4, B=2, initial_state=states(2, 4, dtype))
    check(inputs, emulated, output_final_state=True, state_v_first=v_first)


@pytest.mark.parametrize("cut", [17, pytest.param(64, marks=exhaustive), pytest.param(65, marks=exhaustive)])
def test_later_tokens_do_not_show(emulated: list[str], cut: int) -> None:
    inputs = draw(100)
    later = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for x in later.values():
        x[:, cut:] = Draw(9).normal(*x[:, cut:].shape, dtype=x.dtype)
    changed = inputs._replace(**later)
    a, b = (chunk_forward.forward(kept_request(x), x).o for x in (inputs, changed))
    assert torch.equal(a[:, :cut], b[:, :cut]) and not torch.equal(a[:, cut:], b[:, cut:])


def test_bits_do_not_depend_on_how_blocks_share_a_state(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw(200, initial_state=states(1, 1))
    found = []
    for warpgroups in (1, 2):
        monkeypatch.setattr(kernels, "walk_warpgroups", lambda *args, n=warpgroups: n)
        emulated.clear()
        found.append(run(kept_request(inputs, output_final_state=True), inputs))
        assert [f"WARPGROUPS{warpgroups}" in name for name in emulated[:4]] == [False, True, True, False]
    (first, grads, _), (second, others, _) = found
    assert torch.equal(first.o, second.o) and torch.equal(first.final_state, second.final_state)
    assert torch.equal(first.saved[0], second.saved[0])
    same_gradients(grads, others)


def test_what_nobody_wrote_is_not_read(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN wherever memory is not initialised, also in a pack's unused slots of the buffer."""
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = plain(self, *args, **kwargs)
        return made.fill_(255 if made.dtype == torch.uint8 else float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    cu = torch.tensor([0, 3, 67], dtype=torch.int32)
    inputs = draw(67, cu_seqlens=cu)
    out, got, _ = run(kept_request(inputs), inputs)
    assert out.o.isfinite().all()
    assert all(x is None or x.isfinite().all() for x in got)


def test_the_shorter_way_gives_the_same_bits(emulated: list[str]) -> None:
    cu = torch.tensor([0, 0, 70, 100], dtype=torch.int32)
    first, second = (
        draw(110, 1, 2, gate="init", seed=n, cu_seqlens=cu, initial_state=states(3, 2)) for n in (0, 1)
    )
    request = kept_request(first, output_final_state=True)
    wanted = tuple(x is not None for x in first[:8])
    step = chunk_backward.make_fast_gradients(request, first, wanted)
    assert step is not None
    emulated.clear()
    results = step.forward(tuple(second))
    assert results is not None
    o, state, checkpoints, *saved = results
    out, want, grads = run(request, second)
    got = step.backward(tuple(second), tuple(saved), grads.o, grads.final_state)
    names = [name.split("-")[0] for name in emulated]
    forward, backward = ["prepare", "scan_outputs"], ["scan", "grads", "groups", "groups", "sums"]
    assert names == [*forward, *forward, *backward, *backward]
    assert checkpoints is None and torch.equal(o, out.o) and torch.equal(state, out.final_state)
    same_gradients(got, want)
    # What was kept may come back as a copy, from either way; where it cannot be read, nothing is launched.
    moved = torch.empty(saved[0].numel() + 1, dtype=torch.uint8)[1:]
    moved.copy_(saved[0])
    emulated.clear()
    assert step.backward(tuple(second), (moved,), grads.o, None) is None
    assert step.backward(tuple(second), (), grads.o, None) is None and not emulated
    same_gradients(chunk_backward.backward(request, second, (moved,), grads), want)


@pytest.fixture
def registered() -> Any:
    REGISTRY.register(Plugin(), NAME)
    yield
    REGISTRY.reset()


@pytest.mark.usefixtures("registered")
@exhaustive
def test_the_suite_whatever_is_asked_for(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case with gradients, as if all of them said disable_recompute."""
    saves = choice.saves_operands
    monkeypatch.setattr(
        choice,
        "saves_operands",
        lambda r, count: saves(dataclasses.replace(r, disable_recompute=True), count),
    )
    monkeypatch.setattr(chosen, "_plans", {})
    short = [dataclasses.replace(case, factor=2.0) for case in served()]  # as `check`
    run_emulated(short, emulated, "scan_outputs")


@pytest.mark.usefixtures("registered")
def test_public_calls(emulated: list[str]) -> None:
    """Ordinary calls, then recognised ones, and a graph that is gone through twice: always the same gradients, which
    are those of a call that keeps nothing."""
    x = draw(20, initial_state=states(1, 1))
    do, runs = torch.randn_like(x.v), []
    for keep in (False, True, True, True, True):
        given = {n: a.clone() for n, a in x._asdict().items() if a is not None}
        leaves = [a.requires_grad_() for a in given.values()]
        emulated.clear()
        o, _ = kdacore.chunk_kda(**given, **BOUNDED_MODEL, disable_recompute=keep, backend=NAME)
        assert any(name.startswith("scan_outputs") for name in emulated) == keep
        emulated.clear()
        for _ in range(1 + keep):
            runs.append(torch.autograd.grad(o, leaves, do, retain_graph=True))
        assert any(name.startswith("prepare") for name in emulated) != keep
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    with torch.no_grad():
        emulated.clear()
        kdacore.chunk_kda(**given, **BOUNDED_MODEL, disable_recompute=True, backend=NAME)
        assert not any(name.startswith("scan_outputs") for name in emulated)


def test_operators_keep_nothing() -> None:
    """A compiled graph hands no arrays from forward to backward."""
    inputs, opdef = draw(20), OPS["chunk_kda"]
    options = tuple(name == "disable_recompute" or None for name in opdef.options)
    arguments = torch_operators.flat_arguments(opdef, inputs, options, None)
    bound = torch_operators.Bound("chunk", arguments)
    assert dict(zip(opdef.options, bound.options, strict=True))["disable_recompute"] is False


def keeps(request: Request) -> bool:
    return chosen(request).saves == "operands"


def test_which_calls_keep_something(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(70, 8, 16)
    request = kept_request(inputs)
    assert keeps(request)
    for changed in (
        {"disable_recompute": False},
        {"needs_grad": False},
        {"kind": "jax"},
        {"traced": True},
        {"checkpoint_every": 64},
        {"T": 0},
    ):
        assert not keeps(dataclasses.replace(request, **changed)), changed
    monkeypatch.undo()
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    kept = [h for h in range(1, 20) if keeps(dataclasses.replace(request, HV=h, N=1))]
    assert kept == list(range(13, 20))
    few = dataclasses.replace(request, HV=2, batch_invariant=True)
    assert keeps(few)  # computed as one of many


def test_memory() -> None:
    """Bytes of a chunk and value head: 2084 a token. The places are those of the buffer."""
    places, size = saved_buffer(3)
    assert size == 3 * 133376 == 3 * 64 * 2084
    assert list(places) == list(SAVED) and all(at % 256 == 0 for at in places.values())
    assert saved_buffer(8192 * 64 // 64)[1] == 1092616192  # B1 T8192 H64


@pytest.mark.exhaustive
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_compiles_without_spills(warpgroups: int) -> None:
    log = compile_kernel(scan_outputs_kernel(warpgroups).source, "sm_90a").log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H", "HV"), [(1000, 16, 16), (2000, 32, 64), (700, 40, 80)])
@pytest.mark.parametrize("bounded", [True, False])
def test_on_the_device(monkeypatch: pytest.MonkeyPatch, T: int, H: int, HV: int, bounded: bool) -> None:
    """The same gradients with and without what is kept, bit for bit and every time, from two inputs in turns; outputs
    within the bound of those of a call that keeps nothing, on each side of the exact ones."""
    monkeypatch.undo()
    options: dict[str, Any] = BOUNDED_MODEL if bounded else MODEL
    found: list[list[Any]] = [[], []]
    for turn in range(6):
        x = draw(T, H, HV, gate="init", seed=turn % 2, initial_state=states(1, HV))
        given = {n: a.cuda().requires_grad_() for n, a in x._asdict().items() if a is not None}
        do = Draw(3).normal(*x.v.shape).cuda()
        each = []
        for keep in (False, True):
            o, _ = kdacore.chunk_kda(**given, **options, disable_recompute=keep, backend="cuda")
            each.append((o.detach(), *torch.autograd.grad(o, list(given.values()), do)))
        assert error(each[1][0].cpu(), each[0][0].double().cpu().numpy()) < 2 * 4.5e-3
        assert all(torch.equal(a, b) for a, b in zip(each[0][1:], each[1][1:], strict=True))
        found[turn % 2].append(each[1])
    for runs in found:
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    assert [walk_warpgroups(heads, 132) for heads in (13, 64, 66, 67, 96)] == [1, 1, 1, 2, 2]
    calls = {heads: kept_request(draw(1, heads, heads)) for heads in (13, 66, 67)}
    found = {heads: kept_launches.launches_of(r).numbers["output_blocks"] for heads, r in calls.items()}
    assert found == {13: 26, 66: 132, 67: 67}


def test_the_benchmark_launches_what_a_call_launches(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import kept_training

    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 8)
    inputs = draw(70, 2, 2)
    kept = kept_request(inputs)
    plain = dataclasses.replace(kept, disable_recompute=False)
    steps = kept_training.steps_of(plain, kept, inputs, OutputGrads(torch.zeros_like(inputs.v), None))
    emulated.clear()
    steps["kept training"]()
    prepare, outputs, reverse, grads, _ = emulated
    assert prepare.startswith("prepare") and grads.startswith("grads")
    for step, name in (("outputs", outputs), ("reverse", reverse)):
        for warpgroups in (1, 2):
            emulated.clear()
            steps[f"kept {step}, {warpgroups} warpgroups"]()
            assert (emulated == [name]) == (warpgroups == 1) and len(emulated) == 1
