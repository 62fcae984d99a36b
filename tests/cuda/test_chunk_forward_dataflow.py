"""``chunk_kda`` in two launches side by side, emulated on the CPU: records, flags, the whole against the oracle."""

from __future__ import annotations

from itertools import count
from typing import Any

import chunk_forward_segments_model as segments_model
import emulator
import program_launches
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of
from form_calls import FormCall, dataflow_forward
from forward_checks import (
    TOKENS,
    check_gate_and_beta_in_float16,
    check_grouped_values_and_strides,
    check_later_tokens_change_no_bit,
)

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.dataflow import kernels as chunk_forward_dataflow_kernels
from kdacore_cuda.runtime import device_figures, torch_launch

pytestmark = pytest.mark.usefixtures("poison")

SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}
BOTH = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])


@pytest.fixture(params=[5, 132], ids=["few multiprocessors", "many"])
def multiprocessors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With few, a block computes many units one after another."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: request.param)
    return int(request.param)


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return dataflow_forward(request_of("chunk_kda", inputs, **options), inputs)


def check(inputs: ChunkInputs, loose: float = 2.0, **options: Any) -> Outputs:
    """Run, compare with the oracle, return what was computed. Short sequences: the contract's hard-case factor."""
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    got = dataflow_forward(request, inputs)
    check_outputs(got, oracle(request, inputs), loose)
    return got


@pytest.mark.first_cases(1)
@BOTH
@pytest.mark.parametrize(
    "gate", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)], ids=str
)
def test_records_are_those_of_segments(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    gate: torch.dtype,
    options: dict[str, Any],
) -> None:
    """Bit for bit if gates are unbounded, else roundings apart, as the segments' prepare is another there; and each
    raises its flags, which the walk clears."""
    inputs = draw(330, 1, 2, B=2)
    inputs = inputs._replace(g=inputs.g.to(gate))
    request = request_of("chunk_kda", inputs, **options)
    call, other = (FormCall(form, request, inputs) for form in ("dataflow", "segments"))
    monkeypatch.setattr(program_launches, "numbers", count(77))
    call.launch("prepare")
    other.launch("prepare")
    assert call.blocks("prepare") == (1 if multiprocessors == 5 else 24)
    flags_at = int(call.numbers["flags_at"])
    records, others = (x.workspace[:flags_at] for x in (call, other))
    if options == MODEL:
        assert torch.equal(records, others)
    got, want = (segments_model.get_operands(x.view(12, 2, -1)) for x in (records, others))
    for name, x in want.items():
        assert error(got[name], x) < 5e-3, name
    flags = call.workspace[flags_at:].view(torch.int64)
    assert len(flags) == 24 * chunk_forward_dataflow_kernels.WALK_BLOCKS
    assert (flags == 77).all()
    monkeypatch.setattr(program_launches, "numbers", count(77))
    call.launch("walk")
    assert not flags.any()


@pytest.mark.every_other
@BOTH
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 129, 257])
def test_lengths(emulated: list[str], T: int, options: dict[str, Any]) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **options)
    assert [name.split("-")[0] for name in emulated] == ["prepare_units", "walk"]


def test_longer_than_two_rings(emulated: list[str], multiprocessors: int) -> None:
    """Of stages, of places for outputs, of units by turns."""
    check(draw(64 * 8 + 3, B=2), 1.5, **BOUNDED_MODEL)


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    inputs = draw(200, 1, 2, B=2, initial_state=state(2, 2, dtype=dtype))
    got = check(inputs, checkpoint_every=128 if v_first else 64, state_v_first=v_first, **BOUNDED_MODEL)
    assert got.final_state is not None
    assert got.final_state.dtype == dtype


@pytest.mark.parametrize("gate", ["init", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = (BOUNDED_MODEL if gate == "init" else SAFE_LOG) if gate != "mixed" else {}
    check(draw(300, gate=gate, initial_state=state(1, 1)), **options)


def test_grouped_values_and_strides(emulated: list[str]) -> None:
    check_grouped_values_and_strides(check)


def test_gate_and_beta_in_float16(emulated: list[str]) -> None:
    check_gate_and_beta_in_float16(check)


@BOTH
def test_later_tokens_change_no_bit(emulated: list[str], options: dict[str, Any]) -> None:
    check_later_tokens_change_no_bit(run, options)


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str], multiprocessors: int) -> None:
    inputs = draw(150, B=2)
    want = run(inputs, **BOUNDED_MODEL).o[0]
    for n in TOKENS:
        getattr(inputs, n)[1] = float("nan")
    assert torch.equal(run(inputs, **BOUNDED_MODEL).o[0], want)


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(270)
    want = run(inputs, **BOUNDED_MODEL).o
    monkeypatch.setenv(EVERY_LANE, "1")
    assert torch.equal(run(inputs, **BOUNDED_MODEL).o, want)


def test_same_bits_in_any_order(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    """Of threads and copies."""
    inputs, plain = draw(270, B=2), emulator.run
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
def test_the_contract_s_length(emulated: list[str], gate: str, options: dict[str, Any]) -> None:
    check(draw(2048, gate=gate), 1.0 if gate == "random" else 2.0, **options)


# --- which calls, and what is compiled -----------------------------------------------------------------------------


def test_which_calls(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By sequences and heads alone, whatever their length, as a choice by length would change bits when tokens are
    appended. Packs may have one long sequence."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    for T in (1, 70):
        inputs = draw(T, 1, 17)
        emulated.clear()
        chunk_forward.forward(request_of("chunk_kda", inputs, **MODEL), inputs)
        assert emulated[-1].startswith("walk")
    use = choice.use_dataflow
    found = {bounded: [n for n in range(100) if use(n, bounded, 132)] for bounded in (True, False)}
    assert found == {True: [], False: [*range(16, 23)]}


def test_what_goes_another_way(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs, which may have one long sequence, and what the kernels do not have."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: True)
    plain = draw(70, initial_state=state(1, 1))
    indices = torch.zeros(1, dtype=torch.int32)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "pack": ({"cu_seqlens": torch.tensor([0, 70])}, {}),
        "in place": ({}, {"inplace_state": True}),
        "rows": ({"state_indices": indices}, {"inplace_state": True}),
        "mask": ({"has_initial_state": torch.tensor([True])}, {}),
    }
    for name, (arrays, options) in {"plain": ({}, {}), **cases}.items():
        inputs = plain._replace(**arrays)
        request = request_of("chunk_kda", inputs, output_final_state=True, **options, **BOUNDED_MODEL)
        assert (chosen(request).form == "dataflow") == (name == "plain"), name


def test_outputs_of_the_caller(emulated: list[str]) -> None:
    inputs = draw(70)
    want = run(inputs, **BOUNDED_MODEL)
    out = torch.empty_like(want.o)
    got = run(inputs._replace(out=out), **BOUNDED_MODEL)
    assert got.o is out
    assert torch.equal(out, want.o)


def test_every_block_finds_a_multiprocessor() -> None:
    blocks = chunk_forward_dataflow_kernels.prepare_blocks
    for heads in range(17, 28):
        assert blocks(10**6, heads, 132) + 2 * heads == 132
    assert blocks(3, 17, 132) == 3
    assert blocks(10**6, 2, 3) == 1


def test_products_overlap() -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(chunk_forward_dataflow_kernels.walk_kernel().source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
