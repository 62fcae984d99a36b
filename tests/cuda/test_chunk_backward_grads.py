"""The gradients kernel of the hand-written backward, emulated on the CPU, against its model in float64."""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate
from typing import Any

import chunk_backward_model as model
import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, launch
from cuda_calls import BOUNDED_MODEL, Draw, error, request_of

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.backward.kernels import grads_kernel
from kdacore_cuda.kernel_parameters import SUM_SCALE
from kdacore_cuda.request_encoding import has_bounded_gate
from kdacore_cuda.runtime import torch_launch
from kdacore_reference.oracle import to_float64

BOUND, PART_BOUND = 8e-3, 1e-2
"""Contract section 4 for the gradients of 16-bit inputs."""
NOT_IN_KERNEL = {
    "use_gate_in_kernel": False,
    "use_qk_l2norm_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
}
LOG = BOUNDED_MODEL | NOT_IN_KERNEL
UNBOUNDED = {"safe_gate": False, "lower_bound": None}
"""Gates without a bound: softplus, or log decays as they are."""
WORK = ("rows", "last", "u", "dr", "h", "dh")
SPILL_BYTES = {True: 56, False: 60}
"""Allowance for spill stores of one thread, by bounded gates: 16 warps a multiprocessor leave 128 registers,
88 (and with a bound 16 decays) are accumulators and operands while pairs are summed. What is spilled is to fit in
the L1 that 227 KB of shared memory leave.
"""
exhaustive = pytest.mark.exhaustive
LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65]


def scanned(
    request: Request, inputs: ChunkInputs, do: torch.Tensor, final: float = 1.0
) -> dict[str, model.F64]:
    """The workspace that the kernel reads, matrices rounded as it holds them."""
    d_final = Draw(5).normal(request.N, request.HV, 128, 128) * (final * float(do.float().abs().mean()))
    work = model.prepare(request, inputs)
    work |= model.scan(request, inputs, work, do, d_final)[0]
    for name in ("u", "dr", "h", "dh"):
        work[name] = to_float64(torch.from_numpy(work[name]).to(torch.bfloat16))
    return {name: work[name] for name in WORK}


def run(
    request: Request, inputs: ChunkInputs, work: dict[str, model.F64], do: torch.Tensor
) -> dict[str, model.F64]:
    B, T, HV = request.B, request.T, request.HV
    grouped = request.HV != request.H
    slots = model.num_slots(request)
    wide = torch.float32 if grouped else torch.bfloat16
    wanted: dict[str, Any] = {
        "dq": ((B, T, HV, 128), wide),
        "dk": ((B, T, HV, 128), wide),
        "dv": ((B, T, HV, 128), torch.bfloat16),
        "dg": ((B, T, HV, 128), inputs.g.dtype),
        "dbeta": ((B, T, HV), inputs.beta.dtype),
    }
    if inputs.A_log is not None:
        wanted["dA_part"] = ((slots, HV), torch.float32)
    if inputs.dt_bias is not None:
        wanted["dbias_part"] = ((slots, HV, 128), torch.float32)
    kernel = grads_kernel(inputs.g.dtype == torch.float32, grouped, has_bounded_gate(request))
    got = launch(kernel, request, inputs, work, wanted, d_o=do)
    return {name: x / SUM_SCALE if name.endswith("_part") else x for name, x in got.items()}


def check(inputs: ChunkInputs, scale: float = 1.0, **options: Any) -> None:
    """A call against the model; what no token or chunk fills must stay as it was."""
    request = request_of("chunk_kda", inputs, **(BOUNDED_MODEL | options))
    do = Draw(7).normal(*inputs.v.shape) * scale
    work = scanned(request, inputs, do)
    want = model.grads(request, inputs, work, do)
    got = run(request, inputs, work, do)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert error(got[name], want[name]) < BOUND, name
    where = tuple(np.array(filled(request, inputs)).T)
    for name in ("dA_part", "dbias_part"):
        if name in got:
            assert error(got[name][where], want[name][where]) < PART_BOUND, name
            rest = np.ones(got[name].shape[:2], bool)
            rest[where] = False
            assert np.isnan(got[name][rest]).all()


@pytest.fixture(autouse=True)
def few(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes several units."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 2)


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("bounded", "gate", "float_gate"),
    [
        *(
            (bounded, gate, False)
            for bounded in (True, False)
            for gate in ("random", "init", "slow", "fast", "spread")
        ),
        *(
            pytest.param(bounded, gate, True, marks=exhaustive)
            for bounded in (True, False)
            for gate in ("random", "fast")
        ),
        (False, "mixed", False),  # -60 is beyond every bound
    ],
)
def test_gates(bounded: bool, gate: str, float_gate: bool) -> None:
    inputs = draw(150, gate=gate)
    raw = gate in ("random", "init")
    kind = torch.float32 if float_gate else torch.bfloat16
    check(inputs._replace(g=inputs.g.to(kind)), **({} if raw else LOG) | ({} if bounded else UNBOUNDED))


def test_low_bound() -> None:
    """A bound below -5 is none."""
    check(draw(100), safe_gate=False, lower_bound=-20.0)


@pytest.mark.parametrize("T", [1, 64, 65])
def test_lengths(T: int) -> None:
    """Two sequences; what a single token gives to its decay needs a state before it."""
    check(draw(T, B=2, initial_state=Draw(9).normal(2, 1, 128, 128, dtype=torch.float32)))


@pytest.mark.parametrize("index", [pytest.param(torch.int32, marks=exhaustive), torch.int64])
@pytest.mark.parametrize("options", [{}, UNBOUNDED])
def test_packed(index: torch.dtype, options: dict[str, Any]) -> None:
    """Also slots that no sequence fills."""
    cu = torch.tensor([0, *accumulate(LENGTHS)], dtype=index)
    check(draw(int(cu[-1]), 1, 2, cu_seqlens=cu), **options)


def test_many_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's next unit is several sequences on, some of them empty."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 5)
    cu = torch.tensor([0, *accumulate([0, 1, 0, 0, 2, 65, 1, 0, 5, 1, 0, 0, 0, 0, 0, 0, 7, 1])])
    check(draw(int(cu[-1]), cu_seqlens=cu))


@pytest.mark.parametrize("float_gate", [False, pytest.param(True, marks=exhaustive)])
@pytest.mark.parametrize("options", [{}, pytest.param(UNBOUNDED, marks=exhaustive)])
def test_grouped_heads(float_gate: bool, options: dict[str, Any]) -> None:
    inputs = draw(70, 2, 4)
    check(inputs._replace(g=inputs.g.to(torch.float32 if float_gate else torch.bfloat16)), **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.float32, {"use_beta_sigmoid_in_kernel": False}),
        (torch.bfloat16, {"allow_neg_eigval": True}),
        (torch.float16, {}),
    ],
)
def test_beta(kind: torch.dtype, options: dict[str, bool]) -> None:
    check(draw(40, beta=Draw(2).uniform(1, 40, 1).to(kind)), **options)


def test_without_norm() -> None:
    d = Draw(3)
    inputs = draw(70, q=d.unit(1, 70, 1, 128), k=d.unit(1, 70, 1, 128))
    check(inputs, use_qk_l2norm_in_kernel=False)


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_without_gate_parameters(absent: tuple[str, ...]) -> None:
    check(draw(150, 2, 2)._replace(**dict.fromkeys(absent)))


@pytest.mark.parametrize(("A_log", "bias"), [(2.0, 5.5), (2.0, 7.0), (-13.0, 0.5), (-15.0, 0.5)])
def test_limits_of_usual_gates(A_log: float, bias: float) -> None:
    """Rates and biases on either side of those for which the kernel takes fewer instructions (the second and the last
    are beyond)."""
    d = Draw(12)
    near = (d.normal(1, 70, 1, 128, dtype=torch.float32) - bias).to(torch.bfloat16)
    rates = {"A_log": torch.tensor([A_log]), "dt_bias": torch.full((1, 128), bias)}
    check(draw(70)._replace(g=near, **rates))


def test_bias_of_16_bits() -> None:
    check(draw(40, 1, 2, dt_bias=Draw(4).normal(2, 128)))


def test_strided_inputs() -> None:
    """Heads and tokens of one array side by side, as a fused projection writes them."""
    d = Draw(6)
    fused = d.normal(2, 70, 2, 5, 128)
    q, k, v, g, _ = fused.unbind(3)
    beta = d.normal(2, 70, 2, 3)[..., 1]
    check(draw(70, 2, 2, B=2)._replace(q=q, k=k, v=v, g=g, beta=beta))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("scale", [1e-6, 1e5])
@pytest.mark.parametrize("gate", ["random", "slow"])
@pytest.mark.parametrize("options", [{}, UNBOUNDED])
def test_small_and_large_gradients(scale: float, gate: str, options: dict[str, Any]) -> None:
    check(draw(100, gate=gate), scale, **({} if gate == "random" else LOG) | options)


def test_no_gradient_of_outputs() -> None:
    """That of the final state alone."""
    inputs = draw(65)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    do = torch.zeros_like(inputs.v)
    work = model.prepare(request, inputs)
    work |= model.scan(request, inputs, work, do, Draw(5).normal(1, 1, 128, 128))[0]
    for name in ("u", "dr", "h", "dh"):
        work[name] = to_float64(torch.from_numpy(work[name]).to(torch.bfloat16))
    work = {name: work[name] for name in WORK}
    want, got = model.grads(request, inputs, work, do), run(request, inputs, work, do)
    for name in ("dk", "dv", "dg", "dbeta"):
        assert error(got[name], want[name]) < BOUND, name


def test_what_nobody_wrote_is_not_read() -> None:
    """NaN in the slots that no sequence fills, and in the tokens around a sequence."""
    cu = torch.tensor([0, 5, 70], dtype=torch.int32)
    inputs = draw(70, cu_seqlens=cu)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    do = Draw(7).normal(*inputs.v.shape)
    work = scanned(request, inputs, do)
    clean = run(request, inputs, work, do)
    inside = slice(5, 70)
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(inputs, name)
        x[:, :5] = float("nan")
    do[:, :5] = float("nan")
    poisoned = run(request, inputs, work, do)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.array_equal(clean[name][:, inside], poisoned[name][:, inside]), name


@pytest.mark.parametrize("heads", [(1, 1), pytest.param((1, 2), marks=exhaustive)])
def test_earlier_tokens_do_not_see_later_gradients(heads: tuple[int, int]) -> None:
    """dq of a token depends on gradients of its own output and of none after it, to the last bit."""
    inputs = draw(64, *heads)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    do = Draw(7).normal(*inputs.v.shape)
    full = run(request, inputs, scanned(request, inputs, do), do)
    for t in (20, 40):
        changed = do.clone()
        changed[:, t:] = 0
        got = run(request, inputs, scanned(request, inputs, do) | later(request, inputs, changed), changed)
        assert np.array_equal(got["dq"][:, :t], full["dq"][:, :t])


@pytest.mark.parametrize(("t", "options"), [(0, {}), (20, {}), (41, {}), (20, UNBOUNDED), (41, UNBOUNDED)])
def test_later_tokens_do_not_show(t: int, options: dict[str, Any]) -> None:
    """Where nothing after token t has a gradient, no gradient up to t depends on what is there, to the last bit."""
    d = Draw(11)
    initial = d.normal(1, 1, 128, 128, dtype=torch.float32)
    inputs = draw(64, initial_state=initial, beta=d.normal(1, 64, 1, dtype=torch.float32))
    inputs = inputs._replace(g=inputs.g.float() + 0.01 * d.normal(1, 64, 1, 128, dtype=torch.float32))
    other = inputs._replace(v=inputs.v.clone(), g=inputs.g.clone(), k=inputs.k.clone())
    other.v[:, t + 1 :] *= 30
    other.g[:, t + 1 :] += 3
    other.k[:, t + 1 :] = d.normal(1, 63 - t, 1, 128)
    do = d.normal(*inputs.v.shape)
    do[:, t + 1 :] = 0
    got = []
    for x in (inputs, other):
        request = request_of("chunk_kda", x, **(BOUNDED_MODEL | options))
        got.append(run(request, x, scanned(request, x, do, final=0.0), do))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.array_equal(got[0][name][:, : t + 1], got[1][name][:, : t + 1]), name


def later(request: Request, inputs: ChunkInputs, do: torch.Tensor) -> dict[str, model.F64]:
    """dr and dh of another gradient of the outputs."""
    work = scanned(request, inputs, do)
    return {name: work[name] for name in ("dr", "dh")}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=exhaustive), 3])
def test_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever order warps run in and copies land in, and however many units a block has."""
    inputs = draw(150, 1, 2)
    inputs = inputs._replace(g=inputs.g.to(torch.float32 if seed == 3 else torch.bfloat16))
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    do = Draw(7).normal(*inputs.v.shape)
    work = scanned(request, inputs, do)
    first = run(request, inputs, work, do)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: seed)
    monkeypatch.setattr(emulator, "run", partial(emulator.run, seed=seed))
    again = run(request, inputs, work, do)
    for name, x in first.items():
        assert np.array_equal(x, again[name], equal_nan=True), name


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("float_gate", [False, pytest.param(True, marks=exhaustive)])
@pytest.mark.parametrize("bounded", [True, pytest.param(False, marks=exhaustive)])
def test_compiled(bounded: bool, float_gate: bool, grouped: bool) -> None:
    log = compile_kernel(grads_kernel(float_gate, grouped, bounded).source, "sm_90a").log
    assert "serialized" not in log
    found = re.search(r"(\d+) bytes spill stores", log)
    assert found is not None, log
    assert int(found[1]) <= SPILL_BYTES[bounded]
