"""The scan of the hand-written backward, emulated, against its model."""

from __future__ import annotations

import re
from typing import Any

import chunk_backward_model as model
import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, launch, worst
from cuda_calls import BOUNDED_MODEL, Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.backward.kernels import scan_kernel
from kdacore_cuda.forms.backward.launches import launches_of
from kdacore_cuda.runtime import device_figures, torch_launch
from kdacore_cuda.runtime.program import Launch

OUTPUTS = ("h", "u", "dh", "dr")
BOUND = 3.5e-3
"""Relative, of each chunk's matrix: a few roundings to bfloat16, and those of the states before."""


def scan_and_compare(
    inputs: ChunkInputs,
    *,
    warpgroups: int = 2,
    v_first: bool = False,
    d_final: torch.Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> dict[str, model.F64]:
    """One launch, held to the model."""
    options = BOUNDED_MODEL | {"output_final_state": True, "state_v_first": v_first} | options
    request = request_of("chunk_kda", inputs, **options)
    work = {name: rounded(name, x) for name, x in model.prepare(request, inputs).items()}
    do = Draw(seed + 100).normal(*inputs.v.shape)
    want, d_initial = model.scan(request, inputs, work, do, d_final)
    given = {name: work[name] for name in ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "last")}
    wanted: dict[str, Any] = dict.fromkeys(OUTPUTS)
    arrays = {"d_o": guarded(do)}
    if inputs.initial_state is not None:
        wanted["d_h0"] = (tuple(inputs.initial_state.shape), inputs.initial_state.dtype)
    if d_final is not None:
        arrays["d_ht"] = d_final
    got = launch(scan_kernel(warpgroups), request, inputs, given, wanted, device, **arrays)
    where = filled(request, inputs)
    for name in OUTPUTS:
        assert worst(got[name], want[name], where) < BOUND, name
        elsewhere = np.ones(got[name].shape[:2], bool)
        elsewhere[tuple(np.transpose(where))] = False
        assert np.isnan(got[name][elsewhere]).all(), name
    if d_initial is not None:
        assert error(got["d_h0"], d_initial) < BOUND
    return got


def rounded(name: str, x: model.F64) -> model.F64:
    return model.to_float64(torch.from_numpy(x).to(torch.float32 if name == "last" else torch.bfloat16))


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN before and behind them."""
    buffer = torch.full((x.numel() + 2 * 64 * 128,), float("nan"), dtype=x.dtype)
    inside = buffer[64 * 128 : -64 * 128].view(x.shape)
    inside.copy_(x)
    return inside


def states(n: int, hv: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return Draw(seed).normal(n, hv, 128, 128, dtype=dtype)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("T", [1, 64, 200])
def test_dense(emulated: list[str], T: int, warpgroups: int) -> None:
    scan_and_compare(draw(T), warpgroups=warpgroups)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_many_chunks(emulated: list[str], warpgroups: int) -> None:
    """Rings run round more than twice."""
    d_final = states(1, 1, torch.float32, 1)
    scan_and_compare(draw(9 * 64 + 5, seed=3), warpgroups=warpgroups, d_final=d_final)


@pytest.mark.parametrize("gate", ["init", "slow", "fast"])
def test_gates(emulated: list[str], gate: str) -> None:
    """States that live long, and such that are gone within a chunk."""
    inputs = draw(250, gate=gate, seed=4, initial_state=states(1, 1, torch.float32, 5))
    plain = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    scan_and_compare(
        inputs,
        d_final=states(1, 1, torch.float32, 6),
        **({} if gate == "init" else dict.fromkeys(plain, False)),
    )


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["both", "initial", "final"])
def test_states(emulated: list[str], dtype: torch.dtype, v_first: bool, given: str) -> None:
    """Also two value heads a head, two sequences, a last chunk of six rows."""
    initial = None if given == "final" else states(2, 2, dtype, 5)
    # The final state has the type of the initial one, float32 without.
    d_final = None if given == "initial" else states(2, 2, dtype if given == "both" else torch.float32, 6)
    inputs = draw(70, 1, 2, B=2, initial_state=initial)
    scan_and_compare(inputs, v_first=v_first, d_final=d_final, warpgroups=1 + v_first)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed(emulated: list[str], index: torch.dtype) -> None:
    """Slots that no sequence fills stay as they are, also the operands', which are NaN there."""
    cu = torch.tensor([0, 0, 1, 63, 64, 65, 130], dtype=index)
    inputs = draw(130, 1, 1, cu_seqlens=cu, initial_state=states(6, 1, torch.float32, 8))
    got = scan_and_compare(inputs, d_final=states(6, 1, torch.float32, 9))
    assert np.array_equal(got["d_h0"][0], model.to_float64(states(6, 1, torch.float32, 9))[0])  # no token


def test_empty_sequence_without_final_gradient(emulated: list[str]) -> None:
    cu = torch.tensor([0, 0, 3], dtype=torch.int32)
    inputs = draw(3, cu_seqlens=cu, initial_state=states(2, 1, torch.bfloat16, 8))
    assert not scan_and_compare(inputs)["d_h0"][0].any()


def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies, and however blocks share the states."""
    inputs = draw(200, initial_state=states(1, 1, torch.float32, 2))
    d_final = states(1, 1, torch.float32, 3)
    plain = emulator.run
    found = []
    for seed, warpgroups in ((1, 2), (2, 2), (3, 1), (4, 1)):
        monkeypatch.setattr(emulator, "run", lambda *a, seed=seed, **k: plain(*a, **{**k, "seed": seed}))
        found.append(scan_and_compare(inputs, warpgroups=warpgroups, d_final=d_final))
    for again in found[1:]:
        assert all(np.array_equal(again[name], found[0][name], equal_nan=True) for name in again)


@pytest.mark.exhaustive
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_compiles_without_spills(warpgroups: int) -> None:
    log = compile_kernel(scan_kernel(warpgroups).source, "sm_90a").log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log


def test_few_heads_have_a_block_for_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each walk, forward and in reverse; so few that both directions find a multiprocessor for each block."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    found = {}
    for heads in (13, 33, 34, 64):
        request = request_of("chunk_kda", draw(1, heads, heads), **BOUNDED_MODEL)
        first = launches_of(request, InputGrads(*[True] * len(InputGrads._fields))).first
        (scan,) = (x for x in first.program.steps if isinstance(x, Launch) and x.name == "scan")
        found[heads] = scan.kernel.source.macros["WARPGROUPS"], first.numbers["scan_blocks"]
    assert found == {13: (1, 52), 33: (1, 132), 34: (2, 68), 64: (2, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_on_the_device(packed: bool, warpgroups: int) -> None:
    """More blocks than run at once, and the same bits every time."""
    if packed:
        cu = torch.tensor([0, 0, 1, 63, 64, 65, 130, 900], dtype=torch.int32)
        inputs = draw(900, 4, 8, cu_seqlens=cu, initial_state=states(7, 8, torch.float32, 8))
    else:
        inputs = draw(70, 8, 80, initial_state=states(1, 80, torch.float32, 8))
    N = 7 if packed else 1
    d_final = states(N, inputs.v.shape[2], torch.float32, 9)
    found = [
        scan_and_compare(inputs, warpgroups=warpgroups, d_final=d_final, device="cuda") for _ in range(2)
    ]
    for again in found[1:]:
        assert all(np.array_equal(again[name], found[0][name], equal_nan=True) for name in again)
