"""``chunk_kda`` with head dims other than 128, emulated on the CPU: kernels read and write the caller's arrays as they
lie. Against the oracle, the bits of calls that are filled up with zeros, and what lies around arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of
from pool_checks import same_bits

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import choice, fitted_head_dims
from kdacore_cuda.forms import chunk_forward, own_head_dims
from kdacore_cuda.forms.backward import gradients, kernels
from kdacore_cuda.forms.fused import kernels as fused_kernels
from kdacore_reference.oracle import oracle_backward

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(1)]
OP, NAN, LOOSE = "chunk_kda", float("nan"), 2.0
GRADIENT_BOUND = 8e-3
"""Contract section 4 for the gradients of 16-bit inputs."""
DIMS = [(96, 192), (64, 64), (128, 256), (80, 112)]
TOKENS = ("q", "k", "v", "g", "beta")
BACKWARD = ["prepare", "scan", "grads", "sums"]
GROUPED = [*BACKWARD[:3], "groups", "groups", "sums"]


@pytest.fixture(autouse=True)
def nothing_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no call counts as one of few heads, which are."""

    def fail(*given: Any) -> None:
        raise AssertionError("arrays are copied")

    monkeypatch.setattr(fitted_head_dims, "_Fit", fail)
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    monkeypatch.setattr(choice, "use_segments_backward", lambda *given: False)
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    monkeypatch.setattr(choice, "saves_maps", lambda *given: False)


@pytest.fixture(params=DIMS, ids=str)
def dims(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(params=[1, 2], ids=["half a state a block", "a whole state a block"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernels, "walk_warpgroups", lambda *given: request.param)
    return int(request.param)


def draw(
    T: int,
    dims: tuple[int, int],
    H: int = 1,
    HV: int = 2,
    *,
    B: int = 1,
    gate: str = "init",
    seed: int = 0,
    **more: Any,
) -> ChunkInputs:
    (K, V), d = dims, Draw(seed)
    q, k, v = d.normal(B, T, H, K), d.normal(B, T, H, K), d.normal(B, T, HV, V)
    return ChunkInputs(q, k, v, beta=d.normal(B, T, HV), **d.gate(gate, B, T, HV, K))._replace(**more)


def pack(lengths: tuple[int, ...], more: int, dims: tuple[int, int], **given: Any) -> ChunkInputs:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    inputs = draw(sum(lengths) + more, dims, cu_seqlens=offsets, **given)
    if more:
        for name in TOKENS:
            getattr(inputs, name)[:, -more:] = NAN
    return inputs


def state(N: int, HV: int, matrix: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(4).normal(N, HV, *matrix, dtype=dtype)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same rows, with NaN in front of and behind each."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 32), NAN, dtype=x.dtype)
    wide[..., 16:-16] = x
    return wide[..., 16:-16]


def among_nans(inputs: ChunkInputs) -> ChunkInputs:
    return inputs._replace(**{n: surrounded(getattr(inputs, n)) for n in ("q", "k", "v", "g")})


def training(inputs: ChunkInputs, **options: Any) -> Request:
    return replace(request_of(OP, inputs, **options), needs_grad=True)


def output_grads(r: Request, inputs: ChunkInputs) -> OutputGrads:
    d = Draw(5)
    states = 0.1 * d.normal(*r.state_shape, dtype=getattr(torch, r.state_dtype))
    return OutputGrads(d.normal(*inputs.v.shape), states)


def hold(got: InputGrads, want: Any, inputs: ChunkInputs) -> None:
    """Of every input, in its shape and dtype, within the bound."""
    for name, x, exact in zip(InputGrads._fields, got, want, strict=True):
        given = getattr(inputs, name)
        assert (x is None) == (given is None), name
        if x is not None:
            assert (x.dtype, x.shape) == (given.dtype, given.shape), name
            assert error(x, exact) < LOOSE * GRADIENT_BOUND, name


def names_of(launched: list[str]) -> list[str]:
    """Without their macros, of kernels for other head dims."""
    assert all("NARROW1" in name for name in launched)
    return [name.partition("-")[0] for name in launched]


def check_gradients(inputs: ChunkInputs, **options: Any) -> InputGrads:
    r = training(inputs, output_final_state=True, **options)
    grads = output_grads(r, inputs)
    got = gradients.backward(r, inputs, (), grads)
    hold(got, oracle_backward(r, inputs, grads), inputs)
    return got


# --- the backward --------------------------------------------------------------------------------------------------


# Drawn so that the gradient of A_log, one number a head, is not what is left of terms that cancel.
@pytest.mark.parametrize(("T", "seed"), [(70, 90), (1, 21), (63, 83), (64, 84), (65, 1), (130, 150)])
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_lengths_of_gradients(
    emulated: list[str], dims: tuple[int, int], model: dict[str, Any], T: int, seed: int
) -> None:
    check_gradients(among_nans(draw(T, dims, 3, 3, B=1 + T % 2, seed=seed)), **model)
    assert names_of(emulated) == BACKWARD


@pytest.mark.exhaustive
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_groups_and_states(
    emulated: list[str], warpgroups: int, dims: tuple[int, int], v_first: bool, dtype: torch.dtype
) -> None:
    matrix = dims[::-1] if v_first else dims
    inputs = draw(100, dims, 2, 6, B=2, initial_state=state(2, 6, matrix, dtype))
    check_gradients(among_nans(inputs), state_v_first=v_first, **BOUNDED_MODEL)
    assert names_of(emulated) == GROUPED


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_gradients_of_a_padded_pack(
    emulated: list[str], dims: tuple[int, int], model: dict[str, Any]
) -> None:
    """With a gate in float32 and a flat bias."""
    lengths = (0, 1, 31, 64, 65, 0, 40)
    inputs = pack(lengths, 40, dims, seed=1, HV=3, initial_state=state(7, 3, dims))
    assert inputs.dt_bias is not None
    inputs = inputs._replace(g=inputs.g.float(), dt_bias=inputs.dt_bias.reshape(-1))
    got = check_gradients(inputs, **model)
    for name in TOKENS:
        assert not getattr(got, name)[:, sum(lengths) :].any(), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("H", [1, 2])
def test_gradients_of_log_gates(emulated: list[str], dims: tuple[int, int], H: int) -> None:
    """Without parameters of a gate, and without norms."""
    inputs = draw(130, dims, H, gate="slow")
    inputs = inputs._replace(q=inputs.q / dims[0], k=inputs.k / dims[0], beta=inputs.beta.sigmoid())
    check_gradients(inputs)


def padded(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Zeros behind the last axes."""
    whole = torch.zeros(*x.shape[: -len(sizes)], *sizes, dtype=x.dtype)
    whole[(..., *(slice(size) for size in x.shape[-len(sizes) :]))] = x
    return whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), (80, 112)], ids=str)
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_bits_of_a_call_filled_up_with_zeros(
    emulated: list[str], clusters: int, dims: tuple[int, int], model: dict[str, Any]
) -> None:
    """Of results, checkpoints and gradients, of values in one block."""
    K, V = dims
    states = state(1, 2, dims)
    inputs = draw(150, dims, 1, 2, initial_state=states)
    names = {"q": (K,), "k": (K,), "v": (V,), "g": (K,), "dt_bias": (K,), "initial_state": dims}
    wide = inputs._replace(**{n: padded(getattr(inputs, n), *[128 for _ in x]) for n, x in names.items()})
    options = model | {"scale": K**-0.5, "output_final_state": True}
    r, wide_r = (training(x, checkpoint_every=64, **options) for x in (inputs, wide))
    got, want = chunk_forward.forward(r, inputs), chunk_forward.forward(wide_r, wide)
    assert same_bits(got.o, want.o[..., :V])
    for x, y in ((got.final_state, want.final_state), (got.checkpoints, want.checkpoints)):
        assert x is not None and y is not None and same_bits(x, y[..., :K, :V])
    r, wide_r = training(inputs, **options), training(wide, **options)
    grads = output_grads(r, inputs)
    assert grads.o is not None and grads.final_state is not None
    of_wide = OutputGrads(padded(grads.o, 128), padded(grads.final_state, 128, 128))
    narrow, filled = gradients.backward(r, inputs, (), grads), gradients.backward(wide_r, wide, (), of_wide)
    for name, x, y in zip(narrow._fields, narrow, filled, strict=True):
        assert same_bits(x, y[(..., *(slice(size) for size in names.get(name, ())))]), name


@pytest.mark.parametrize("dims", [(64, 64), (128, 256)], ids=str)
def test_later_tokens_without_a_gradient_change_no_bit(emulated: list[str], dims: tuple[int, int]) -> None:
    inputs, other = draw(200, dims), draw(200, dims, seed=9)
    d_o = Draw(3).normal(*inputs.v.shape)
    d_o[:, 100:] = 0
    r = training(inputs, **BOUNDED_MODEL)
    later = {n: torch.cat([getattr(inputs, n)[:, :100], getattr(other, n)[:, 100:]], 1) for n in TOKENS}
    grads = OutputGrads(d_o, None)
    first, second = (gradients.backward(r, x, (), grads) for x in (inputs, inputs._replace(**later)))
    for name in TOKENS:
        a, b = getattr(first, name), getattr(second, name)
        assert same_bits(a[:, :100], b[:, :100]) and not a[:, 100:].any(), name


@pytest.mark.exhaustive
def test_what_the_forward_saves(emulated: list[str], warpgroups: int, dims: tuple[int, int]) -> None:
    """Gradients from it have the bits of those that are computed without."""
    inputs = pack((70, 0, 64, 5), 9, dims, HV=2, initial_state=state(4, 2, dims))
    r = training(inputs, output_final_state=True, disable_recompute=True, **MODEL)
    out, grads = chunk_forward.forward(r, inputs), output_grads(r, inputs)
    check_outputs(out, oracle(r, inputs), LOOSE)
    assert not out.o[:, -9:].any()
    got = gradients.backward(r, inputs, out.saved, grads)
    assert names_of(emulated) == ["prepare", "scan_outputs", *GROUPED[1:]]
    hold(got, oracle_backward(r, inputs, grads), inputs)
    same_gradients(got, gradients.backward(r, inputs, (), grads))


# --- the forward ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2, 4], ids=["clusters of two", "clusters of four"])
def clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of a cluster, and that the kernels are those of Hopper."""
    size = int(request.param)
    monkeypatch.setattr(choice, "has_hopper_kernel", lambda K, arch: K == 128)
    monkeypatch.setattr(own_head_dims, "has_hopper_kernel", lambda K, arch: K == 128)
    monkeypatch.setattr(fused_kernels, "has_hopper_kernel", lambda K, arch: K == 128)
    monkeypatch.setattr(choice, "cluster_size", lambda *given: size)
    return size


def check_forward(inputs: ChunkInputs, **options: Any) -> Any:
    r = training(inputs, output_final_state=True, **options)
    got = chunk_forward.forward(r, inputs)
    check_outputs(got, oracle(r, inputs), LOOSE)
    return got


@pytest.mark.parametrize("T", [70, 1, 31, 33, 64, 130])
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_forward(
    emulated: list[str], clusters: int, dims: tuple[int, int], model: dict[str, Any], T: int
) -> None:
    check_forward(among_nans(draw(T, dims, 1, 2, B=1 + T % 2, seed=T)), **model)
    assert names_of(emulated) == ["chunk_forward"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_checkpoints(
    emulated: list[str], clusters: int, dims: tuple[int, int], v_first: bool, dtype: torch.dtype
) -> None:
    """Of groups, in either layout, and a flat bias."""
    matrix = dims[::-1] if v_first else dims
    inputs = draw(140, dims, 2, 4, B=2, initial_state=state(2, 4, matrix, dtype))
    assert inputs.dt_bias is not None
    got = check_forward(
        inputs._replace(dt_bias=inputs.dt_bias.reshape(-1)),
        checkpoint_every=64,
        state_v_first=v_first,
        **MODEL,
    )
    assert got.final_state.dtype == dtype


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_packs_that_clusters_share(
    emulated: list[str], clusters: int, dims: tuple[int, int], model: dict[str, Any], monkeypatch: Any
) -> None:
    """Fewer clusters than sequences and heads, so that one is cut in two; a gate in float32; a given output."""
    monkeypatch.setattr(choice, "resident_clusters", lambda *given: 3)
    inputs = pack((70, 0, 17, 65, 1, 33), 21, dims, initial_state=state(6, 2, dims))
    out = torch.full(inputs.v.shape, 7.0, dtype=torch.bfloat16)
    given = inputs._replace(g=inputs.g.float())
    got = check_forward(given, **model)
    assert not got.o[:, -21:].any()
    r = training(given._replace(out=out), **model)
    assert chunk_forward.forward(r, given._replace(out=out)).o is out
    assert same_bits(out[:, :-21], got.o[:, :-21]) and (out[:, -21:] == 7).all()


@pytest.mark.parametrize("dims", [(64, 64), (128, 256)], ids=str)
def test_later_tokens_change_no_bit(emulated: list[str], clusters: int, dims: tuple[int, int]) -> None:
    inputs, noise = draw(170, dims), draw(170, dims, seed=7)
    whole = chunk_forward.forward(training(inputs, **MODEL), inputs).o
    for cut in (40, 128):
        later = {n: torch.cat([getattr(inputs, n)[:, :cut], getattr(noise, n)[:, cut:]], 1) for n in TOKENS}
        mixed = inputs._replace(**later)
        assert same_bits(chunk_forward.forward(training(mixed, **MODEL), mixed).o[:, :cut], whole[:, :cut])
