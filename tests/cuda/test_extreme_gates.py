"""Gates at the ends of float32, emulated on the CPU: every form of the kernels gives what float64 gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from emulated_backend import HOPPER
from extreme_gates import (
    BF16,
    EVERY_KIND,
    INF,
    KINDS,
    LARGEST,
    LENGTHS,
    NOTHING,
    assert_bias_gradient,
    beyond,
    draw,
    draw_scalar,
    expected,
    expected_gradients,
    expected_pools,
    options_of,
)

from kdacore.types import ChunkInputs, Device, OutputGrads, RecurrentInputs, Request
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.chunk_numbers import UNBOUNDED_FLOOR
from kdacore_cuda.forms.recurrent import forward as recurrent
from kdacore_cuda.runtime import torch_launch
from kdacore_reference.oracle import oracle_backward, oracle_forward

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive
EACH_KIND = pytest.mark.parametrize(
    "kind", ["bounded", "softplus", pytest.param("wide bound", marks=exhaustive)]
)
GIVEN: dict[str, Any] = MODEL | {"use_gate_in_kernel": False, "output_final_state": True}


def on_hopper(inputs: Any, options: dict[str, Any], device: Device = HOPPER) -> Request:
    return dataclasses.replace(request_of("chunk_kda", inputs, **options), device=device)


def check_forward(inputs: ChunkInputs, kind: str, device: Device = HOPPER) -> None:
    """Outputs and states of every head, within twice the bounds: calls this short are a hard case."""
    options = options_of(kind)
    request = on_hopper(inputs, options, device)
    got, want = chunk_forward.forward(request, inputs), expected(request, inputs, options)
    assert not beyond(2 * O_BOUND, got.o, want.o, 2)
    assert not beyond(2 * STATE_BOUND, got.final_state, want.final_state, 1)


FORMS = {
    "in segments": (9, 70, 132, "prepare-"),
    "clusters of four": (24, 40, 132, "CLUSTER4"),
    "clusters of two": (9, 150, 6, "MANY_SHORT0"),
    "many short": (9, 40, 2, "MANY_SHORT1"),
}
"""By the form of the forward: value heads, tokens, multiprocessors, part of a kernel's name."""


MORE = {("clusters of four", "softplus"), ("many short", "bounded")}
"""Forms and kinds of gates that differ from others in how the work is divided, not in the gate."""


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(f, k, marks=[exhaustive] if k == "wide bound" or (f, k) in MORE else [])
        for f in FORMS
        for k in KINDS
    ],
)
def test_forward(emulated: list[str], monkeypatch: pytest.MonkeyPatch, form: str, kind: str) -> None:
    HV, T, multiprocessors, name = FORMS[form]
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)
    check_forward(draw(T, HV), kind)
    assert any(name in kernel for kernel in emulated), emulated


@pytest.mark.parametrize("kind", ["softplus", pytest.param("wide bound", marks=exhaustive)])
def test_forward_in_dataflow(emulated: list[str], kind: str) -> None:
    check_forward(draw(40, 17), kind)
    assert any(kernel.startswith("prepare_units") for kernel in emulated)


@EACH_KIND
@pytest.mark.parametrize("HV", [9, pytest.param(24, marks=exhaustive)])
def test_forward_of_packs(emulated: list[str], kind: str, HV: int) -> None:
    cu = torch.tensor(np.cumsum([0, *LENGTHS]))
    state = torch.randn(len(LENGTHS), HV, 128, 128, generator=torch.Generator().manual_seed(1))
    check_forward(draw(sum(LENGTHS), HV, cu_seqlens=cu, initial_state=state, dtype=torch.float32), kind)


@EVERY_KIND
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=exhaustive)])
def test_forward_of_narrow_heads(emulated: list[str], kind: str, arch: str) -> None:
    """K = V = 64: the kernel for every architecture."""
    check_forward(draw(40, K=64), kind, dataclasses.replace(HOPPER, arch=arch))
    assert "K_DIM64" in emulated[0]


@pytest.mark.every_other
@EACH_KIND
@pytest.mark.parametrize("HV", [9, 24])
def test_checkpoints(emulated: list[str], kind: str, HV: int) -> None:
    """At tokens inside of a chunk, which are made by kernels of their own."""
    pool = torch.randn(8, HV, 128, 128, generator=torch.Generator().manual_seed(3))
    inputs = draw(
        50,
        HV,
        initial_state=pool,
        state_indices=torch.tensor([1]),
        checkpoint_offsets=torch.tensor([10, 20, 40]),
        checkpoint_indices=torch.tensor([5, 6, 7]),
    )
    options = options_of(kind) | {"inplace_state": True}
    request = on_hopper(inputs, options)
    want = expected_pools(request, inputs, options)
    chunk_forward.forward(request, inputs)
    rows = [1, 5, 6, 7]
    assert not beyond(2 * STATE_BOUND, pool[rows], want.pool[rows], 1)
    assert any(kernel.startswith("checkpoint_tail" if HV == 24 else "prepare_marked") for kernel in emulated)


@pytest.mark.every_other
@EVERY_KIND
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("v_first", [False, True])
def test_recurrent(emulated: list[str], kind: str, T: int, v_first: bool) -> None:
    x, options = draw(T), options_of(kind) | {"state_v_first": v_first}
    state = torch.randn(1, 9, 128, 128, generator=torch.Generator().manual_seed(2))
    inputs = RecurrentInputs(x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, initial_state=state)
    request = request_of("fused_recurrent_kda", inputs, **options)
    want, got = expected(request, inputs, options), recurrent.forward(request, inputs)
    assert not beyond(O_BOUND, got.o, want.o, 2)
    assert not beyond(1e-4, got.final_state, want.final_state, 1)


@pytest.mark.parametrize("kind", ["softplus", "wide bound"])
def test_recurrent_gate_of_a_head(emulated: list[str], kind: str) -> None:
    inputs, options = draw_scalar(10), options_of(kind)
    request = request_of("fused_recurrent_gated_delta_rule", inputs, **options)
    want, got = expected(request, inputs, options), recurrent.forward(request, inputs)
    assert not beyond(O_BOUND, got.o, want.o, 2)
    assert not beyond(1e-4, got.final_state, want.final_state, 1)


def check_gradients(inputs: ChunkInputs, kind: str, size: float = 1.0) -> Any:
    """Of every head, within twice the bound of short calls."""
    options = KINDS[kind]
    request = on_hopper(inputs, options)
    given = OutputGrads(size * Draw(9).normal(*inputs.v.shape), None)
    floor = None if kind == "bounded" else UNBOUNDED_FLOOR
    got = chunk_backward.backward(request, inputs, (), given)
    want = expected_gradients(request, inputs, options, given, floor)
    for name in ("q", "k", "v", "g", "beta"):
        assert not beyond(1.6e-2, getattr(got, name), getattr(want, name), 2), name
    assert_bias_gradient(got.dt_bias, want)
    off = np.abs(got.A_log.numpy().astype(np.float64) - want.A_log)
    assert (off <= 3e-2 * np.maximum(want.rate_size, NOTHING)).all(), off
    return got


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=exhaustive)], ids=str)
def test_gradients(emulated: list[str], kind: str, dtype: torch.dtype) -> None:
    check_gradients(draw(70, dtype=dtype), kind)


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_gradients_of_packs(emulated: list[str], kind: str) -> None:
    cu = torch.tensor(np.cumsum([0, *LENGTHS]))
    check_gradients(draw(sum(LENGTHS), cu_seqlens=cu), kind)


def test_gradients_saturate(emulated: list[str]) -> None:
    """They are larger than any number where the rate is and the inputs are 0."""
    inputs = draw(70)
    inputs.g.zero_()
    inputs.dt_bias.zero_()
    got = check_gradients(inputs, "bounded", size=1e4)
    steep = inputs.A_log > 88
    assert steep.any()
    assert (got.g[:, :, steep].float().abs().amax(-1) == BF16).any()
    assert (got.dt_bias[steep].abs() == torch.finfo(torch.float32).max).any()


def poison(inputs: ChunkInputs, name: str) -> ChunkInputs:
    """NaN in the second sequence and first head, or of that head."""
    x = getattr(inputs, name).clone()
    if name == "g":
        x[:, 40, 0, 5] = float("nan")
    else:
        x[0] = float("nan")
    return inputs._replace(**{name: x})


POISONED = [
    ("g", "bounded"),
    ("g", "softplus"),
    ("g", "wide bound"),
    ("A_log", "bounded"),
    ("dt_bias", "softplus"),
]


@pytest.mark.parametrize("HV", [3, pytest.param(24, marks=exhaustive)])
@pytest.mark.parametrize(("name", "kind"), POISONED)
def test_nan_stays(emulated: list[str], kind: str, HV: int, name: str) -> None:
    """In its sequence and head, where it is seen; all else has the bits of a call without it."""
    lengths = [33, 31, 6]
    inputs = draw(70, HV, cu_seqlens=torch.tensor(np.cumsum([0, *lengths])))
    poisoned, options = poison(inputs, name), options_of(kind)
    request = on_hopper(inputs, options)
    clean, got = chunk_forward.forward(request, inputs), chunk_forward.forward(request, poisoned)
    own = slice(33, 64) if name == "g" else slice(0, 70)
    assert got.o[:, own.start + 10 : own.stop, 0].isnan().all()
    assert got.final_state[1, 0].isnan().any()
    assert torch.equal(clean.o[:, :, 1:], got.o[:, :, 1:])
    assert torch.equal(clean.final_state[:, 1:], got.final_state[:, 1:])
    if name == "g":
        rest = [*range(33), *range(64, 70)]
        assert torch.equal(got.o[:, rest], clean.o[:, rest])
        assert torch.equal(got.final_state[[0, 2]], clean.final_state[[0, 2]])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=[exhaustive] if case in POISONED[1:3] else [], id="-".join(case))
        for case in POISONED
    ],
)
def test_nan_stays_in_gradients(emulated: list[str], kind: str, name: str) -> None:
    lengths = [33, 31, 6]
    inputs = draw(70, 3, cu_seqlens=torch.tensor(np.cumsum([0, *lengths])))
    poisoned, options = poison(inputs, name), KINDS[kind]
    request = on_hopper(inputs, options)
    given = OutputGrads(Draw(9).normal(*inputs.v.shape), None)
    clean, got = (chunk_backward.backward(request, x, (), given) for x in (inputs, poisoned))
    assert got.A_log[0].isnan() and got.dt_bias[0].isnan().any()
    assert torch.equal(got.A_log[1:], clean.A_log[1:]) and torch.equal(got.dt_bias[1:], clean.dt_bias[1:])
    rest = [*range(33), *range(64, 70)]
    for field in ("q", "k", "v", "g", "beta"):
        mine, other = getattr(got, field), getattr(clean, field)
        assert torch.equal(mine[:, :, 1:], other[:, :, 1:]), field
        if name == "g":
            assert torch.equal(mine[:, rest], other[:, rest]), field
    assert got.g[:, 33:64, 0].isnan().any()


def test_gradients_of_a_float16_gate_saturate(emulated: list[str]) -> None:
    """Kernels write them in float32."""
    inputs = draw(40, dtype=torch.float32)
    inputs.g.zero_()
    inputs.dt_bias.zero_()
    given = OutputGrads(Draw(9).normal(*inputs.v.shape), None)
    wide, narrow = (
        chunk_backward.backward(on_hopper(x, KINDS["bounded"]), x, (), given).g
        for x in (inputs, inputs._replace(g=inputs.g.half()))
    )
    assert torch.isfinite(narrow).all()
    assert torch.equal(narrow, wide.clamp(-65504, 65504).half())
    assert (narrow[:, :, inputs.A_log > 88].abs() == 65504).any()


# --- log decays that are given --------------------------------------------------------------------------------------


def given(T: int) -> ChunkInputs:
    """Log decays without end, or as low as numbers go, in some channels, in all, and at the first token."""
    x = draw(T, 9)
    g = -torch.rand(1, T, 9, 128, generator=torch.Generator().manual_seed(2))
    g[:, ::3, 0::3, ::2] = -INF
    g[:, ::2, 1::3] = -LARGEST
    g[:, 1::5, 2::3, :7] = -1e30
    g[:, 0] = -INF
    return x._replace(g=g, A_log=None, dt_bias=None)


def finite(x: Any) -> Any:
    """What the oracle is given in their place, whose sums stay numbers."""
    return x._replace(g=x.g.clamp(min=-1e30))


def test_given_log_decays(emulated: list[str]) -> None:
    x = given(70)
    request = dataclasses.replace(on_hopper(x, GIVEN), needs_grad=True)
    grads = OutputGrads(Draw(3).normal(*x.v.shape), None)
    got, want = chunk_forward.forward(request, x), oracle_forward(request, finite(x))
    assert not beyond(2 * O_BOUND, got.o, want.o, 2)
    assert not beyond(2 * STATE_BOUND, got.final_state, want.final_state, 1)
    found = chunk_backward.backward(request, x, got.saved, grads)
    for name, exact in oracle_backward(request, finite(x), grads)._asdict().items():
        if exact is not None:
            assert error(getattr(found, name), exact) < 2 * 8e-3, name


def test_given_log_decays_of_single_steps(emulated: list[str]) -> None:
    x = RecurrentInputs(*given(5)[:5])
    request = dataclasses.replace(request_of("fused_recurrent_kda", x, **GIVEN), device=HOPPER)
    got, want = recurrent.forward(request, x), oracle_forward(request, finite(x))
    assert not beyond(2 * O_BOUND, got.o, want.o, 2)
    assert not beyond(2 * STATE_BOUND, got.final_state, want.final_state, 1)
