"""Cached calls of ``chunk_gated_delta_rule`` with gradients: the bits of an uncached backward, and through autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL
from emulated_backend import NAME, registered
from gated_delta_backward_calls import EVERY, WHOLE, leave_uncut, output_grads, run, training
from gated_delta_calls import OP, draw, names_of, state

import kdacore
from kdacore.types import ChunkInputs, FastGradients, OutputGrads, Request
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients
from kdacore_cuda.runtime import torch_launch

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncut(monkeypatch)


def made(
    inputs: ChunkInputs, wanted: tuple[bool, ...] = EVERY, **options: Any
) -> tuple[Request, FastGradients]:
    r = training(inputs, **MODEL | options)
    given = tuple(w and x is not None for w, x in zip(wanted, inputs, strict=False))
    step = gradients.make_fast_gradients(r, inputs, given)
    assert step is not None
    return r, step


def strided(x: ChunkInputs) -> ChunkInputs:
    """Rows of q, k and v side by side, g and beta in columns of one array."""
    H = x.q.shape[2]
    wide = torch.cat([x.q, x.k, x.v], 2)
    gates = torch.stack([x.g, x.beta], -1).flatten(2)
    return x._replace(
        q=wide[:, :, :H],
        k=wide[:, :, H : 2 * H],
        v=wide[:, :, 2 * H :],
        g=gates[..., ::2],
        beta=gates[..., 1::2],
    )


CASES = {
    "dense": lambda seed: draw(70, 1, 2, B=2, seed=seed),
    "grouped, strided": lambda seed: strided(draw(70, 1, 3, seed=seed)),
    "packed, states": lambda seed: draw(
        100, seed=seed, cu_seqlens=torch.tensor([0, 0, 70, 90]), initial_state=state(3, 2)
    ),
    "gates of float32": lambda seed: (x := draw(70, seed=seed))._replace(g=x.g.float(), beta=x.beta.float()),
    "gates of float16": lambda seed: (x := draw(70, seed=seed))._replace(g=x.g.half()),
}


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_shorter_way_gives_the_same_bits(emulated: list[str], name: str, saves: bool) -> None:
    first, second = CASES[name](0), CASES[name](1)
    options = {"output_final_state": name == "packed, states", "disable_recompute": saves}
    r, step = made(first, **options)
    grads = output_grads(r, second)
    emulated.clear()
    results = step.forward(tuple(second))
    assert results is not None
    got = step.backward(tuple(second), results[3:], grads.o, grads.final_state)
    count = len(emulated)
    out = gated_delta.forward(r, second)
    same_gradients(got, run(r, second, grads, out.saved))
    assert emulated[count:] == emulated[:count]
    assert torch.equal(results[0], out.o) and len(results[3:]) == saves
    assert got is not None and all(x is None or x.is_contiguous() for x in got)
    memory = [x.untyped_storage().data_ptr() for x in got if x is not None]
    assert len(set(memory)) == len(memory)


def test_gradients_of_the_results_in_any_form(emulated: list[str]) -> None:
    """Absent, expanded, off 16 bytes, and of the state alone."""
    inputs = draw(70, initial_state=state(1, 2))
    r, step = made(inputs, output_final_state=True)
    shape = tuple(inputs.v.shape)
    moved = torch.empty(inputs.v.numel() + 1, dtype=torch.bfloat16)[1:].view(shape)
    moved.copy_(torch.randn(shape))
    assert moved.data_ptr() % 16
    one, d_state = torch.ones((), dtype=torch.bfloat16).expand(shape), torch.randn(1, 2, 128, 128)
    for d_o, d_ht in ((None, d_state.mT), (one, None), (moved, d_state)):
        same_gradients(step.backward(tuple(inputs), (), d_o, d_ht), run(r, inputs, OutputGrads(d_o, d_ht)))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_that_are_not_wanted(emulated: list[str], packed: bool) -> None:
    inputs = CASES["packed, states" if packed else "dense"](0)
    r = training(inputs, **MODEL)
    d_o = torch.randn_like(inputs.v)
    every = run(r, inputs, OutputGrads(d_o, None))
    for left_out in (
        ("A_log", "initial_state"),
        ("dt_bias", "q", "beta"),
        ("A_log", "dt_bias", "g", "v", "k"),
    ):
        _, step = made(inputs, tuple(name not in left_out for name in every._fields))
        emulated.clear()
        got = step.backward(tuple(inputs), (), d_o, None)
        same_gradients(got, every._replace(**dict.fromkeys(left_out)))
        assert names_of(emulated) == (WHOLE[:3] if "dt_bias" in left_out and "A_log" in left_out else WHOLE)


def test_what_takes_the_longer_way(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be copied, arrays off 16 bytes, nothing where something was saved, another current device."""
    inputs = draw(10)
    ragged = torch.stack([inputs.v, inputs.v], -1)[..., 0]
    r = training(inputs, **MODEL)
    assert gradients.make_fast_gradients(r, inputs._replace(v=ragged), EVERY) is None
    _, step = made(inputs)
    d_o = torch.randn_like(inputs.v)
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert step.backward(tuple(inputs._replace(**{name: moved})), (), d_o, None) is None
    _, saving = made(inputs, disable_recompute=True)
    assert saving.backward(tuple(inputs), (), d_o, None) is None
    monkeypatch.setattr(torch_launch, "current_device", lambda: 3)
    _, elsewhere = made(inputs)
    assert elsewhere.backward(tuple(inputs), (), d_o, None) is None
    assert not emulated


def test_gates_need_no_alignment(emulated: list[str]) -> None:
    inputs = draw(70)
    r, step = made(inputs)
    d_o = torch.randn_like(inputs.v)
    want = run(r, inputs, OutputGrads(d_o, None))
    g = torch.empty(inputs.g.numel() + 1, dtype=inputs.g.dtype)[1:].view(inputs.g.shape)
    g.copy_(inputs.g)
    assert g.data_ptr() % 16
    same_gradients(step.backward(tuple(inputs._replace(g=g)), (), d_o, None), want)


def test_public_calls(emulated: list[str]) -> None:
    """Ordinary calls, recognised ones, and such that save: always the same gradients."""
    x = draw(20, initial_state=state(1, 2))
    d_o, d_state, runs = torch.randn_like(x.v), torch.randn(1, 2, 128, 128), []
    with registered(OP):
        for keep in (False, False, False, True, True, True):
            given = {
                n: a.clone().requires_grad_(a.is_floating_point())
                for n, a in x._asdict().items()
                if a is not None
            }
            options: dict[str, Any] = {"output_final_state": True, "disable_recompute": keep, "backend": NAME}
            emulated.clear()
            o, final = kdacore.chunk_gated_delta_rule(**given, **MODEL, **options)
            torch.autograd.backward([o, final], [d_o, d_state])
            forward = "walk_records_keeping" if keep else "walk_records"
            assert names_of(emulated) == ["chunk_records", forward, *WHOLE[keep:]]
            runs.append([o, final, *[a.grad for a in given.values()]])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
