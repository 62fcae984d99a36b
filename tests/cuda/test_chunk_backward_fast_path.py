"""Cached chunk calls with gradients: the bits of an uncached backward, from other arrays and through autograd, and no
reference to the first ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import BOUNDED_MODEL, MODEL, request_of
from emulated_backend import NAME, Plugin
from test_chunk_forward_fast_path import draw, packed, strided

import kdacore
from kdacore.arrays.torch.eager import TORCH
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, FastGradients, OutputGrads
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.runtime import device_figures, torch_launch

EVERY = (True,) * 8


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, kernels for sm_90a, the fused forward."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(2))


def made(inputs: ChunkInputs, wanted: tuple[bool, ...] = EVERY, **options: Any) -> FastGradients | None:
    request = request_of("chunk_kda", inputs, **{**BOUNDED_MODEL, **options})
    given = tuple(w and x is not None for w, x in zip(wanted, inputs, strict=False))
    return chunk_backward.make_fast_gradients(request, inputs, given)


def wanted_gradients(inputs: ChunkInputs, do: Any, dht: Any, **options: Any) -> Any:
    request = request_of("chunk_kda", inputs, **{**BOUNDED_MODEL, **options})
    return chunk_backward.backward(request, inputs, (), OutputGrads(do, dht))


CASES = {
    "dense": lambda seed: draw(2, 70, seed=seed),
    "grouped, strided": lambda seed: strided(draw(1, 70, 1, 2, seed)),
    "packed, states": packed,
    "no parameters": lambda seed: draw(T=70, seed=seed, A_log=None, dt_bias=None),
}


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_the_shorter_way_gives_the_same_bits(emulated: list[str], name: str) -> None:
    first, second = CASES[name](0), CASES[name](1)
    options: dict[str, Any] = {"output_final_state": name == "packed, states"}
    if first.A_log is None:
        options |= {**MODEL, "use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None}
        first, second = (x._replace(g=-x.g.abs()) for x in (first, second))
    step = made(first, **options)
    assert step is not None
    do = torch.randn_like(second.v).contiguous()
    dht = torch.randn(3, 2, 128, 128) if options["output_final_state"] else None
    emulated.clear()
    got = step.backward(tuple(second), (), do, dht)
    launches = list(emulated)
    same_gradients(got, wanted_gradients(second, do, dht, **options))
    assert emulated[len(launches) :] == launches
    assert got is not None and all(x is None or x.is_contiguous() for x in got)
    assert len({x.untyped_storage().data_ptr() for x in got if x is not None}) == sum(
        x is not None for x in got
    )


def test_the_same_bits_in_segments(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches in the place of the scan, with workspaces of their own."""
    monkeypatch.setattr(chunk_backward_segments, "backward_segment_chunks", lambda *given: 1)
    first, second = draw(T=130, seed=0), draw(T=130, seed=1)
    step = made(first)
    assert step is not None
    do = torch.randn_like(second.v)
    emulated.clear()
    got = step.backward(tuple(second), (), do, None)
    launches = list(emulated)
    same_gradients(got, wanted_gradients(second, do, None))
    assert emulated[len(launches) :] == launches and len(launches) == 6


def test_gradients_of_the_results_in_any_form(emulated: list[str]) -> None:
    """Absent, expanded, off 16 bytes, and of the state alone."""
    inputs = draw(T=70, initial_state=torch.randn(1, 1, 128, 128))
    step = made(inputs, output_final_state=True)
    assert step is not None
    shape = tuple(inputs.v.shape)
    moved = torch.empty(inputs.v.numel() + 1, dtype=torch.bfloat16)[1:].view(shape)
    moved.copy_(torch.randn(shape))
    assert moved.data_ptr() % 16
    one = torch.ones((), dtype=torch.bfloat16).expand(shape)
    state = torch.randn(1, 1, 128, 128)
    for do, dht in ((None, state.mT), (one, None), (moved, state)):
        got = step.backward(tuple(inputs), (), do, dht)
        same_gradients(got, wanted_gradients(inputs, do, dht, output_final_state=True))


def test_gradients_that_are_not_wanted(emulated: list[str]) -> None:
    inputs = packed(0)
    do = torch.randn_like(inputs.v)
    every = wanted_gradients(inputs, do, None)
    for left_out in (("A_log", "initial_state"), ("dt_bias", "q", "beta"), ("A_log", "dt_bias", "g", "v")):
        wanted = tuple(name not in left_out for name in every._fields)
        step = made(inputs, wanted)
        assert step is not None
        got = step.backward(tuple(inputs), (), do, None)
        same_gradients(got, every._replace(**dict.fromkeys(left_out)))


def test_what_takes_the_longer_way(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be copied or widened, arrays off 16 bytes, another current device."""
    inputs = draw(T=10)
    ragged = torch.stack([inputs.v, inputs.v], -1)[..., 0]
    assert made(inputs._replace(v=ragged)) is None
    assert made(inputs._replace(g=inputs.g.half())) is None
    step = made(inputs)
    assert step is not None
    do = torch.randn_like(inputs.v)
    for name in ("q", "k", "v", "g"):
        x = getattr(inputs, name)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert step.backward(tuple(inputs._replace(**{name: moved})), (), do, None) is None
    monkeypatch.setattr(torch_launch, "current_device", lambda: 3)
    elsewhere = made(inputs)
    assert elsewhere is not None and elsewhere.backward(tuple(inputs), (), do, None) is None
    assert not emulated


def test_nothing_is_kept(emulated: list[str]) -> None:
    inputs = draw(T=10)
    step, held = made(inputs), weakref.ref(inputs.q)
    assert step is not None
    del inputs
    assert held() is None


@pytest.fixture
def registered() -> Iterator[None]:
    REGISTRY.register(Plugin(), NAME)
    yield
    REGISTRY.reset()


@pytest.mark.usefixtures("registered")
def test_public_calls(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third on they take the shorter way, and give the gradients of the first."""
    ways: list[str] = []
    for function in ("forward", "backward"):
        module = chunk_forward if function == "forward" else chunk_backward
        ordinary = getattr(module, function)

        def counted(*arguments: Any, function: str = function, ordinary: Any = ordinary) -> Any:
            ways.append(function)
            return ordinary(*arguments)

        monkeypatch.setattr(module, function, counted)
    options = {**BOUNDED_MODEL, "output_final_state": True, "backend": NAME}
    x = draw(T=20, initial_state=torch.randn(1, 1, 128, 128))
    do, dht = torch.randn_like(x.v), torch.randn(1, 1, 128, 128)
    runs = []
    for _ in range(4):
        given = {
            n: a.clone().requires_grad_(a.is_floating_point())
            for n, a in x._asdict().items()
            if a is not None
        }
        o, state = kdacore.chunk_kda(**given, **options)
        torch.autograd.backward([o, state], [do, dht])
        runs.append([o, state, *[a.grad for a in given.values() if a.requires_grad]])
    assert ways == ["forward", "backward"] * 2
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert TORCH.seen_calls.calls["chunk_kda"][0].fast_call is not None
