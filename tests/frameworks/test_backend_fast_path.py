"""A backend's shorter way (``OpImpl.fast_path``): when it is taken, and that a call gives the same without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kdacore
from kdacore import config
from kdacore.acceleration import torch_arrays as torch_recent
from kdacore.arrays.torch.private import _public, allocator
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, InputGrads, OpImpl, Outputs

NAME = "with-fast-path"
pytestmark = pytest.mark.skipif(torch_recent.TensorGuards is None, reason="this torch has no such check")


class Plugin:
    """Notes which way a call went; both double v."""

    def __init__(self) -> None:
        self.went: list[str] = []
        self.willing = True

    def _forward(self, request: Any, inputs: Any) -> Outputs:
        self.went.append("forward")
        return Outputs(2 * inputs.v, inputs.initial_state if request.output_final_state else None)

    def _backward(self, request: Any, inputs: Any, saved: Any, grads: Any) -> Any:
        return InputGrads(
            *map(torch.zeros_like, inputs[:2]), 2 * grads.o, *map(torch.zeros_like, inputs[3:5])
        )

    def _repeat(self, request: Any, inputs: Any) -> Any:
        self.went.append("repeat")

        def step(arrays: tuple[Any, ...]) -> Any:
            self.went.append("step")
            state = arrays[7] if request.output_final_state else None
            return (2 * arrays[2], state, None) if self.willing else None

        return step

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        op = OpImpl(
            self._forward,
            self._backward,
            serves=FEATURES,
            verified_archs=frozenset({"*"}),
            fast_path=self._repeat,
        )
        ops = {"fused_recurrent_kda": op}
        return [Backend(name=NAME, version="0", kinds=("torch",), ops=ops, auto_kinds=())]


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    made = Plugin()
    REGISTRY.register(made, NAME)
    yield made
    REGISTRY.unregister(NAME)


def call(v: torch.Tensor, **options: Any) -> Any:
    q, k, g = (torch.ones(1, 3, 2, 8) for _ in range(3))
    return kdacore.fused_recurrent_kda(q, k, v, -g, torch.ones(1, 3, 2), backend=NAME, **options)


def test_the_third_call_takes_it(plugin: Plugin) -> None:
    state = torch.zeros(1, 2, 8, 8)
    for i in range(4):
        v = torch.full((1, 3, 2, 8), float(i))
        o, final = call(v, initial_state=state, output_final_state=True, inplace_state=True)
        assert torch.equal(o, 2 * v) and final is state
    assert plugin.went == ["forward", "repeat", "forward", "step", "step"]


def test_what_it_declines_goes_through_forward_and_is_recorded_once(plugin: Plugin) -> None:
    v = torch.ones(1, 3, 2, 8)
    for _ in range(3):
        call(v)
    plugin.willing = False
    with kdacore.record_selections() as ran:
        assert torch.equal(call(v)[0], 2 * v)
    assert plugin.went[-2:] == ["step", "forward"]
    plugin.willing = True
    with kdacore.record_selections() as also:
        call(v)
    assert [s.backend for s in ran] == [s.backend for s in also] == [NAME]


def test_other_strides_have_their_own(plugin: Plugin) -> None:
    wide = torch.ones(1, 3, 2, 16)[..., :8]
    for _ in range(3):
        call(torch.ones(1, 3, 2, 8))
    for _ in range(2):
        call(wide)
    assert plugin.went[-3:] == ["repeat", "forward", "step"]


def test_gradients_go_through_forward(plugin: Plugin) -> None:
    for _ in range(4):
        v = torch.ones(1, 3, 2, 8, requires_grad=True)
        call(v)[0].sum().backward()
        assert torch.equal(v.grad, torch.full_like(v, 2.0))  # type: ignore[arg-type]
    assert set(plugin.went) == {"forward"}


def test_values_to_be_checked_go_through_forward(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    checking = dataclasses.replace(config.get(), validate_values=True)
    monkeypatch.setattr(config, "get", lambda: checking)
    for _ in range(4):
        call(torch.ones(1, 3, 2, 8), use_qk_l2norm_in_kernel=True)
    assert set(plugin.went) == {"forward"}


@pytest.mark.parametrize("make", [allocator, _public])
def test_allocating(make: Any) -> None:
    found = make("cpu")((2, 3), (1, 2), torch.bfloat16)
    assert found.shape == (2, 3) and found.stride() == (1, 2) and found.dtype == torch.bfloat16
    assert found.device.type == "cpu" and not found.requires_grad
