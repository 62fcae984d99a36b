"""Cached chunk forward calls: the bits of an uncached call, from other arrays, and no reference to the first ones."""

from __future__ import annotations

import weakref
from typing import Any

import chunk_backward_calls
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, request_of

from kdacore.types import ChunkInputs, FastCall
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.runtime import device_figures


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, kernels for sm_90a, segments of two chunks; in segments where a test asks for it."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: False)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(2))


def draw(B: int = 1, T: int = 150, H: int = 1, HV: int = 1, seed: int = 0, **more: Any) -> ChunkInputs:
    return chunk_backward_calls.draw(T, H, HV, B=B, gate="init", seed=seed, **more)


def strided(x: ChunkInputs) -> ChunkInputs:
    """Token arrays that lie between others."""
    apart = {name: torch.stack([y, y], 1)[:, 0] for name, y in zip(x._fields[:5], x[:5], strict=True)}
    return x._replace(**apart)


def packed(seed: int) -> ChunkInputs:
    cu = torch.tensor([0, 0, 70, 150], dtype=torch.int32)
    return draw(1, 150, 1, 2, seed, cu_seqlens=cu, initial_state=torch.randn(3, 2, 128, 128))


CASES = {
    "dense": lambda seed: draw(2, seed=seed),
    "grouped, strided": lambda seed: strided(draw(1, 70, 1, 2, seed)),
    "packed, states": packed,
    "no parameters": lambda seed: draw(seed=seed, A_log=None, dt_bias=None),
}


@pytest.mark.every_other
@pytest.mark.parametrize("way", ["fused", "segments", "side by side"])
@pytest.mark.parametrize("name", CASES)
def test_the_shorter_way_gives_the_same_bits(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    if way == "side by side" and name == "packed, states":
        pytest.skip("packs go another way")
    monkeypatch.setattr(choice, "use_segments", lambda *given: way == "segments")
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: way == "side by side")
    first, second = CASES[name](0), CASES[name](1)
    bare = first.A_log is None
    options = {**MODEL, "use_gate_in_kernel": False} if bare else BOUNDED_MODEL
    if bare:
        first, second = (x._replace(g=-x.g.abs()) for x in (first, second))
    request = request_of("chunk_kda", first, **options, output_final_state=name != "dense")
    step = chunk_forward.make_fast_call(request, first)
    assert step is not None
    emulated.clear()
    got = step(tuple(second))
    assert got is not None
    launches = list(emulated)
    want = chunk_forward.forward(request, second)
    assert emulated[len(launches) :] == launches and (len(launches) > 1) == (way != "fused")
    assert torch.equal(got[0], want.o)
    assert (got[1] is None) == (want.final_state is None)
    assert got[1] is None or torch.equal(got[1], want.final_state)


def made(inputs: ChunkInputs, **options: Any) -> FastCall | None:
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL, **options)
    return chunk_forward.make_fast_call(request, inputs)


def test_nothing_is_kept(emulated: list[str]) -> None:
    inputs = draw(T=10)
    step, held = made(inputs), weakref.ref(inputs.q)
    assert step is not None
    del inputs
    assert held() is None


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_arrays_off_16_bytes_go_the_longer_way(emulated: list[str], name: str) -> None:
    inputs = draw(T=10)
    step = made(inputs)
    assert step is not None
    x = getattr(inputs, name)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert moved.data_ptr() % 16
    assert step(tuple(inputs._replace(**{name: moved}))) is None
    assert not emulated


def test_what_takes_the_longer_way(emulated: list[str]) -> None:
    """What would be copied or widened."""
    inputs = draw(T=10)
    ragged = torch.stack([inputs.v, inputs.v], -1)[..., 0]
    state = torch.randn(1, 1, 128, 128).transpose(-1, -2)
    assert made(inputs._replace(v=ragged)) is None
    assert made(inputs._replace(g=inputs.g.half())) is None
    assert made(inputs._replace(initial_state=state)) is None


@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints_of_every_block(emulated: list[str], packed: bool) -> None:
    """Rows that no sequence has are zero."""
    cu = torch.tensor([0, 64, 200]) if packed else None
    inputs = draw(T=200, cu_seqlens=cu)
    request = request_of("chunk_kda", inputs, checkpoint_every=64, **BOUNDED_MODEL)
    step = chunk_forward.make_fast_call(request, inputs)
    assert step is not None
    got, want = step(tuple(inputs)), chunk_forward.forward(request, inputs)
    assert got is not None and torch.equal(got[0], want.o)
    assert torch.equal(got[2], want.checkpoints)
    assert not packed or not got[2][4:].any()


def test_states_between_others_go_the_longer_way_side_by_side(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels find a sequence's state by its number alone."""
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: True)
    apart = torch.randn(2, 3, 128, 128)[:, 1:2]
    assert made(draw(2, T=10, initial_state=apart.contiguous())) is not None
    inputs = draw(2, T=10, initial_state=apart)
    assert made(inputs) is None
    request = request_of("chunk_kda", inputs, output_final_state=True, **BOUNDED_MODEL)
    got = chunk_forward.forward(request, inputs)
    want = chunk_forward.forward(request, inputs._replace(initial_state=apart.contiguous()))
    assert torch.equal(got.o, want.o)
