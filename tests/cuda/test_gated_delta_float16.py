"""``chunk_gated_delta_rule`` with float16 q, k and v, emulated on the CPU: against the oracle, numbers near the ends of
float16, as servers call it, equal bits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL, Draw, check_outputs, oracle, request_of
from gated_delta_backward_calls import WHOLE, carry, hold, leave_uncut, output_grads, training
from gated_delta_backward_calls import check as check_gradients_of
from gated_delta_backward_calls import run as run_backward
from gated_delta_calls import (
    NAN,
    OP,
    TOKENS,
    WAYS,
    all_same_bits,
    check_servers,
    choose_records,
    draw,
    names_of,
    pack,
    run,
    state,
)
from gated_delta_calls import check as check_call
from jax_emulation import Device
from pool_checks import pool_of, same_bits
from test_jax_gated_delta import check_launches

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs
from kdacore_cuda import gated_delta_variant, unsupported_calls
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.gated_delta import backward_segments, kernels, segments
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_reference.oracle import oracle_backward

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
HALF, MORE = torch.float16, pytest.mark.exhaustive
CLOSER = 0.5
"""Of the bounds for short calls: float16 operands have three bits more than bfloat16 ones."""


@pytest.fixture(params=[1, 2], ids=["half a state a block", "a whole state a block"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    carry(monkeypatch, request.param)
    return int(request.param)


def check(inputs: ChunkInputs, **options: Any) -> Outputs:
    """The output is float16, and its error half of what is allowed."""
    got = check_call(inputs, CLOSER, **options)
    assert got.o.dtype == HALF
    return got


def check_gradients(inputs: ChunkInputs, **options: Any) -> InputGrads:
    return check_gradients_of(inputs, loose=1.0, **options)


def all_of_float16(launched: list[str]) -> bool:
    """Every kernel that reads q, k or v, or what was made of them."""
    others = ("chain", "segment_chain", "gate_sums")
    return all("HALF_F161" in name for name in launched if name.split("-")[0] not in others)


# --- the forward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129])
def test_lengths(emulated: list[str], warpgroups: int, T: int) -> None:
    check(draw(T, B=1 + T % 2, seed=T, of=HALF), **MODEL)
    assert names_of(emulated) == ["chunk_records", "walk_records"]
    assert all_of_float16(emulated)


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    check(draw(200, gate=gate, of=HALF, initial_state=state(1, 2)), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), pytest.param((96, 48), marks=MORE)], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_groups_and_head_dims(emulated: list[str], dims: tuple[int, int], group: int) -> None:
    inputs = draw(130, 2, 2 * group, dims=dims, of=HALF)
    check(inputs, allow_neg_eigval=True, **MODEL)
    check_gradients(inputs, **MODEL)
    form = "SIZE64-HALF" if dims == (64, 64) else "NARROW1-HALF"
    assert all_of_float16(emulated) and all(form in x for x in emulated if "gate_sums" not in x)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states(emulated: list[str], warpgroups: int, v_first: bool, dtype: torch.dtype) -> None:
    inputs = draw(140, B=2, of=HALF, initial_state=state(2, 2, dtype=dtype))
    loose = CLOSER if dtype == torch.float32 else 1.0  # states are rounded to eight bits
    got = check_call(inputs, loose, checkpoint_every=64, state_v_first=v_first, **MODEL)
    assert got.final_state is not None and got.final_state.dtype == dtype
    check_gradients(inputs, state_v_first=v_first, **MODEL)


def test_gates_and_betas_of_other_types(emulated: list[str]) -> None:
    inputs = draw(100, of=HALF)
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs._replace(**{n: getattr(inputs, n).to(dtype) for n in ("g", "beta", "dt_bias")})
        check(given, **MODEL)
        check_gradients(given, **MODEL)


def test_nearly_equal_keys(emulated: list[str]) -> None:
    inputs = draw(200, gate="fast", of=HALF, initial_state=state(1, 2))
    k = inputs.k[:, :1] + 0.05 * inputs.k
    inputs = inputs._replace(k=k, beta=torch.full_like(inputs.beta, 6.0))
    check_call(inputs, 1.0, **MODEL | {"use_gate_in_kernel": False})


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    inputs, noise = draw(270, of=HALF), draw(270, seed=7, of=HALF)
    whole = run(inputs, checkpoint_every=64, **MODEL)
    for cut in (40, 128, 200):
        short = inputs._replace(**{n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS})
        assert same_bits(run(short, **MODEL).o, whole.o[:, :cut])
        mixed = {n: torch.cat([getattr(inputs, n)[:, :cut], getattr(noise, n)[:, cut:]], 1) for n in TOKENS}
        assert same_bits(run(inputs._replace(**mixed), **MODEL).o[:, :cut], whole.o[:, :cut])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_at_once(emulated: list[str], dtype: torch.dtype) -> None:
    """Two pools of strided rows, sequences without slots, new ones, and rows behind the pack."""
    states, other = pool_of(8, 128, dtype), pool_of(9, 128, dtype, seed=2)
    states[0] = states[6] = other[0] = NAN
    inputs = pack(
        (70, 0, 17, 65, 1, 33, 0),
        21,
        gate="random",
        of=HALF,
        initial_state=states,
        state_indices=torch.tensor([4, 0, 0, 2, 6, 7, -1]),
        has_initial_state=torch.tensor([True, True, True, True, False, False, False]),
        write_indices=torch.tensor([8, 1, 2, 3, 4, 0, 5], dtype=torch.int32),
        write_pool=other,
    )
    want = check_servers(inputs, inplace_state=True, null_index=0, output_final_state=True)
    assert want.written.nonzero()[0].tolist() == [3, 4, 8]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("packed", [False, True])
def test_records_beside_walks(emulated: list[str], monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """The bits of the launches one after the other."""
    inputs = pack((130, 0, 40, 3), 70, H=2, HV=4, of=HALF) if packed else draw(200, 2, 4, of=HALF)
    found: list[Outputs] = []
    for way, kernels_of in WAYS.items():
        emulated.clear()
        choose_records(monkeypatch, way)
        found.append(check(inputs, **MODEL))
        assert names_of(emulated) == kernels_of and all_of_float16(emulated)
    assert all_same_bits(*found)


# --- the ends of float16 -------------------------------------------------------------------------------------------


def test_keys_of_zero_with_large_values(emulated: list[str]) -> None:
    """What such a token writes is beyond float16 before it is multiplied with its key: no NaN comes of it."""
    inputs = draw(130, of=HALF)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, ::7], v[:, ::7] = 0, 3e4
    inputs = inputs._replace(k=k, v=v)
    r = request_of(OP, inputs, output_final_state=True, **MODEL)
    check_outputs(gated_delta.forward(r, inputs), oracle(r, inputs), 2.0)
    got = run_backward(training(inputs, **MODEL), inputs, OutputGrads(Draw(3, HALF).normal(*v.shape), None))
    assert all(x.isfinite().all() for x in got if x is not None)


@pytest.mark.parametrize("size", [1e-2, 1e2], ids=str)
def test_values_of_other_sizes(emulated: list[str], size: float) -> None:
    inputs = draw(200, of=HALF, initial_state=size * state(1, 2))
    check(inputs._replace(v=(size * inputs.v.float()).half()), **MODEL)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1e2], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_gradients_of_other_sizes(emulated: list[str], size: float, norm: bool) -> None:
    """As losses are averaged over tokens, or scaled. Products of small gradients with the factors of queries and keys
    have as many bits."""
    inputs = draw(200, of=HALF, initial_state=state(1, 2))
    if not norm:
        unit = {n: torch.nn.functional.normalize(getattr(inputs, n).float(), dim=-1).half() for n in "qk"}
        inputs = inputs._replace(**unit)
    r = training(inputs, output_final_state=True, **MODEL | {"use_qk_l2norm_in_kernel": norm})
    one = output_grads(r, inputs)
    grads = OutputGrads((size * one.o.float()).half(), size * one.final_state)
    hold(run_backward(r, inputs, grads), oracle_backward(r, inputs, grads), inputs, 1.0)


# --- the backward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_lengths_of_gradients(emulated: list[str], warpgroups: int, T: int) -> None:
    check_gradients(draw(T, B=1 + T % 2, seed=T, of=HALF), **MODEL)
    assert names_of(emulated) == WHOLE
    assert all_of_float16(emulated)


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gradients_of_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    inputs = draw(150, gate=gate, of=HALF, initial_state=state(1, 2))
    if gate not in ("init", "random"):
        inputs = inputs._replace(beta=inputs.beta.sigmoid())
    check_gradients(inputs, **options)


@pytest.mark.first_cases(1)
def test_gradients_of_a_padded_pack(emulated: list[str], warpgroups: int) -> None:
    lengths = (0, 1, 31, 64, 65, 0, 40)
    inputs = pack(lengths, 40, of=HALF, initial_state=state(7, 2))
    got = check_gradients(inputs, **MODEL)
    for name in TOKENS:
        assert not getattr(got, name)[:, sum(lengths) :].any(), name


def test_later_tokens_without_a_gradient_change_no_bit(emulated: list[str]) -> None:
    inputs, other = draw(200, of=HALF), draw(200, seed=9, of=HALF)
    r = training(inputs, **MODEL)
    grads = output_grads(r, inputs)
    grads.o[:, 100:] = 0
    later = {n: torch.cat([getattr(inputs, n)[:, :100], getattr(other, n)[:, 100:]], 1) for n in TOKENS}
    first, second = run_backward(r, inputs, grads), run_backward(r, inputs._replace(**later), grads)
    for name in TOKENS:
        a, b = getattr(first, name), getattr(second, name)
        assert same_bits(a[:, :100], b[:, :100]) and not a[:, 100:].any(), name


@pytest.mark.exhaustive
def test_what_the_forward_saves(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, warpgroups: int
) -> None:
    """Gradients from it have the bits of those that are computed without."""
    leave_uncut(monkeypatch)
    inputs = draw(130, 1, 3, B=2, of=HALF, initial_state=state(2, 3))
    r = training(inputs, output_final_state=True, disable_recompute=True, **MODEL)
    out, grads = gated_delta.forward(r, inputs), output_grads(r, inputs)
    check_outputs(out, oracle(r, inputs), CLOSER)
    got = run_backward(r, inputs, grads, out.saved)
    assert names_of(emulated) == ["chunk_records", "walk_records_keeping", *WHOLE[1:]]
    hold(got, oracle_backward(r, inputs, grads), inputs, 1.0)
    same_gradients(got, run_backward(r, inputs, grads))


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
def test_segments(emulated: list[str], monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    for module in (segments, backward_segments):
        monkeypatch.setattr(module, "choose_lengths", lambda *given: SegmentLengths(1, 0, 2, 1, 1, 2, 3))
    if packed:
        inputs = pack((0, 1, 128, 129, 0, 450), 30, of=HALF, initial_state=state(6, 2, dtype=torch.bfloat16))
    else:
        inputs = draw(450, of=HALF, initial_state=state(1, 2))
    check(inputs, checkpoint_every=64, **MODEL)
    check_gradients(inputs, **MODEL)
    assert {"walk_later_segments", "walk_outer_segments", "walk_inner_segments"} < {*names_of(emulated)}
    assert all_of_float16(emulated)


def test_from_jax(emulated: list[str], from_jax: Device) -> None:
    """q and k are normalised before: gradients behind norms in the kernel are declined."""
    inputs = draw(100, 1, 2, of=HALF, initial_state=state(1, 2, dtype=torch.bfloat16))
    unit = {name: torch.nn.functional.normalize(getattr(inputs, name), dim=-1) for name in ("q", "k")}
    options = {"use_qk_l2norm_in_kernel": False, "output_final_state": True, "state_v_first": True}
    check_launches(emulated, from_jax, inputs._replace(**unit), MODEL | options)


@MORE
@pytest.mark.parametrize("gate", ["random", "init"])
def test_the_contract_s_length(emulated: list[str], gate: str) -> None:
    """Errors are a quarter of those of bfloat16."""
    inputs = draw(2048, gate=gate, seed=1, of=HALF)
    got = check_call(inputs, 0.25, **MODEL)
    assert got.o.dtype == HALF
    check_gradients_of(inputs, loose=0.5, **MODEL)


# --- which kernels -------------------------------------------------------------------------------------------------


def test_gradients_behind_norms_of_tiny_rows_are_declined() -> None:
    """Their factors reach 1000: in the conformance suite's case of tiny rows half of the gradient of q was lost."""
    for of, needs_grad, norm in itertools.product((HALF, torch.bfloat16), (False, True), (False, True)):
        options = {**MODEL, "use_qk_l2norm_in_kernel": norm}
        r = dataclasses.replace(request_of(OP, draw(20, of=of), **options), needs_grad=needs_grad)
        declined = unsupported_calls.float16_gradients(r) is not None
        assert declined == (of == HALF and needs_grad and norm)


def test_other_dtypes_are_declined() -> None:
    for dtype in (torch.float32, torch.bfloat16, HALF):
        r = request_of(OP, draw(20, of=dtype), **MODEL)
        assert (unsupported_calls.gated_delta_dtype(r) is None) == (dtype != torch.float32)


OF_HALF = gated_delta_variant.Variant(float16=True)
KERNELS = {
    "walk": lambda: kernels.walk_kernel(1, of=OF_HALF),
    "whole state": lambda: kernels.walk_kernel(2, of=OF_HALF),
    "keeping": lambda: kernels.walk_kernel(1, True, OF_HALF),
    "beside": lambda: kernels.walk_beside_kernel(OF_HALF),
    "backward": lambda: kernels.backward_walk_kernel(1, True, OF_HALF),
    "grads": lambda: kernels.grads_kernel(OF_HALF),
    "first": lambda: kernels.first_segments_kernel(OF_HALF),
    "later": lambda: kernels.later_segments_kernel(OF_HALF),
    "outer": lambda: kernels.outer_segments_kernel(OF_HALF),
    "inner": lambda: kernels.inner_segments_kernel(OF_HALF),
}
_USUAL = ("walk", "backward", "grads")


@pytest.mark.parametrize("name", [x if x in _USUAL else pytest.param(x, marks=MORE) for x in KERNELS])
def test_products_overlap(name: str) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(KERNELS[name]().source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
    assert "injected" not in log
