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

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
OP, NAN, LOOSE = "chunk_kda", float("nan"), 2.0
GRADIENT_BOUND = 8e-3
"""Contract section 4 for the gradients of 16-bit inputs."""
MORE = pytest.mark.exhaustive
DIMS = [(64, 64), (128, 256), (96, 192), (80, 112)]
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


@pytest.fixture(params=[*DIMS[:2], *(pytest.param(x, marks=MORE) for x in DIMS[2:])], ids=str)
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
    gate: str = "random",
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
    return OutputGrads(d.normal(*inputs.v.shape), 0.1 * d.normal(*r.state_shape, dtype=torch.float32))


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
    if r.state_dtype != "float32":
        grads = grads._replace(final_state=grads.final_state.to(torch.bfloat16))
    got = gradients.backward(r, inputs, (), grads)
    hold(got, oracle_backward(r, inputs, grads), inputs)
    return got


# --- the backward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [70, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_gradients(emulated: list[str], dims: tuple[int, int], model: dict[str, Any], T: int) -> None:
    check_gradients(among_nans(draw(T, dims, 2, 2, B=1 + T % 2, seed=T)), **model)
    assert names_of(emulated) == BACKWARD


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
