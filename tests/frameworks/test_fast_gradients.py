"""A backend's shorter way with gradients (``OpImpl.fast_gradients``): when it is taken, that everything else is refused
or served as without it, and that gradients are the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kdacore
from kdacore.acceleration import torch_arrays
from kdacore.arrays.torch.eager import TORCH
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, FastGradients, InputGrads, OpImpl, Outputs

NAME = "with-fast-gradients"
pytestmark = pytest.mark.skipif(torch_arrays.TensorGuards is None, reason="this torch has no such check")
SHAPE = (1, 3, 2, 8)


class Plugin:
    """``o = 2 v``, ``final_state = initial_state``; notes which way calls went. ``saves``: what is saved is used."""

    def __init__(self) -> None:
        self.went: list[str] = []
        self.wanted: list[tuple[bool, ...]] = []
        self.willing_forward = self.willing_backward = True
        self.saves = False
        self.spoil: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda grads: grads

    def _saved(self, v: Any) -> tuple[Any, ...]:
        return (torch.full((2,), 2.0),) if self.saves else ()

    def _forward(self, request: Any, inputs: Any) -> Outputs:
        self.went.append("forward")
        state = inputs.initial_state.clone() if request.output_final_state else None
        checkpoints = torch.zeros(request.checkpoint_shape) if request.checkpoint_every else None
        return Outputs(2 * inputs.v, state, checkpoints, self._saved(inputs.v))

    def _gradients(self, inputs: Any, saved: Any, do: Any, dstate: Any) -> tuple[Any, ...]:
        factor = saved[0][0] if self.saves and saved else 2.0
        found = [None if x is None else torch.zeros(tuple(x.shape)) for x in inputs[:8]]
        if do is not None:
            found[2] = factor * do
        if dstate is not None:
            found[7] = 1.0 * dstate
        return tuple(found)

    def _backward(self, request: Any, inputs: Any, saved: Any, grads: Any) -> InputGrads:
        self.went.append("backward")
        return InputGrads(*self._gradients(inputs, saved, grads.o, grads.final_state))

    def _fast(self, request: Any, inputs: Any, wanted: tuple[bool, ...]) -> FastGradients:
        self.went.append("made")
        self.wanted.append(wanted)

        def forward(arrays: tuple[Any, ...]) -> Any:
            self.went.append("fast forward")
            if not self.willing_forward:
                return None
            state = arrays[7].clone() if request.output_final_state else None
            checkpoints = torch.zeros(request.checkpoint_shape) if request.checkpoint_every else None
            return (2 * arrays[2], state, checkpoints, *self._saved(arrays[2]))

        def backward(arrays: tuple[Any, ...], saved: tuple[Any, ...], do: Any, dstate: Any) -> Any:
            self.went.append("fast backward")
            assert not torch.is_grad_enabled() and len(arrays) == len(inputs_of(request))
            if not self.willing_backward:
                return None
            found = self._gradients(arrays, saved, do, dstate)
            return self.spoil(tuple(g if w else None for g, w in zip(found, wanted, strict=True)))

        return FastGradients(forward, backward)

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        op = OpImpl(
            self._forward,
            self._backward,
            serves=FEATURES,
            verified_archs=frozenset({"*"}),
            fast_gradients=self._fast,
        )
        ops = {"chunk_kda": op, "fused_recurrent_kda": op}
        return [Backend(name=NAME, version="0", kinds=("torch",), ops=ops, auto_kinds=())]


def inputs_of(request: Any) -> tuple[str, ...]:
    from kdacore.ops import OPS

    return OPS[request.op].arrays


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    made = Plugin()
    REGISTRY.register(made, NAME)
    yield made
    REGISTRY.unregister(NAME)


def arrays(seed: int = 0, **more: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(SHAPE, generator=rng) for name in ("q", "k", "v", "g")}
    x |= {"beta": torch.rand(SHAPE[:3], generator=rng), **more}
    return {name: a.requires_grad_(a.is_floating_point()) for name, a in x.items()}


def call(x: dict[str, Any], **options: Any) -> Any:
    return kdacore.chunk_kda(**x, backend=NAME, **options)


def seen_before(plugin: Plugin, x: dict[str, Any] | None = None, **options: Any) -> None:
    """Calls until they are recognised; then nothing has gone any way."""
    for _ in range(3):
        call(arrays(9) if x is None else x, **options)
    assert plugin.went[-1] == "fast forward"
    plugin.went.clear()


FAST = ["fast forward", "fast backward"]


def state() -> torch.Tensor:
    return torch.ones(1, 2, 8, 8)


def test_the_third_call_takes_it(plugin: Plugin) -> None:
    for i in range(4):
        x = arrays(i, initial_state=state())
        o, final = call(x, output_final_state=True)
        (o.sum() + 3 * final.sum()).backward()
        assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))
        assert torch.equal(x["initial_state"].grad, 3 * state()) and not x["q"].grad.any()
    both = ["forward", "backward"]
    assert plugin.went == [*both, "made", *both, *FAST, *FAST]
    assert plugin.wanted == [(True,) * 5 + (False, False, True)]


@pytest.mark.parametrize("which", ["o", "final_state"])
def test_a_result_without_a_gradient(plugin: Plugin, which: str) -> None:
    seen_before(plugin, arrays(initial_state=state()), output_final_state=True)
    x = arrays(1, initial_state=state())
    o, final = call(x, output_final_state=True)
    (o if which == "o" else final).sum().backward()
    assert plugin.went == FAST
    assert x["v"].grad.any() == (which == "o") and x["initial_state"].grad.any() == (which != "o")


def test_frozen_arrays_get_none(plugin: Plugin) -> None:
    def some() -> dict[str, Any]:
        x = arrays(A_log=torch.zeros(2), dt_bias=torch.zeros(2, 8))
        for name in ("q", "A_log"):
            x[name].requires_grad_(False)
        return x

    seen_before(plugin, some(), use_gate_in_kernel=True)
    x = some()
    call(x, use_gate_in_kernel=True)[0].sum().backward()
    assert plugin.went == FAST
    assert plugin.wanted == [(False, True, True, True, True, False, True, False)]
    assert [name for name, a in x.items() if a.grad is None] == ["q", "A_log"]
    call(arrays(A_log=torch.zeros(2), dt_bias=torch.zeros(2, 8)), use_gate_in_kernel=True)
    assert plugin.went[-1] == "forward"  # other arrays want gradients: another call


def test_recurrent_calls_take_it_too(plugin: Plugin) -> None:
    for _ in range(4):
        x = arrays()
        kdacore.fused_recurrent_kda(**x, backend=NAME)[0].sum().backward()
        assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))
    assert plugin.went[-2:] == FAST


def test_checkpoints_carry_no_gradient(plugin: Plugin) -> None:
    for _ in range(3):
        o, _, checkpoints = call(arrays(), checkpoint_every=64)
        assert o.requires_grad and not checkpoints.requires_grad
    assert plugin.went[-1] == "fast forward"


def test_gradients_are_stolen_not_copied(plugin: Plugin) -> None:
    """Autograd takes over a gradient that nobody else holds."""
    addresses: list[int] = []

    def noted(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        addresses.extend(g.data_ptr() for g in grads if g is not None)
        return grads

    plugin.spoil = noted
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    o.backward(torch.ones_like(o))
    assert [a.grad.data_ptr() for a in x.values()] == addresses


def test_a_forward_that_declines_is_recorded_once(plugin: Plugin) -> None:
    seen_before(plugin)
    plugin.willing_forward = False
    x = arrays()
    with kdacore.record_selections() as ran:
        call(x)[0].sum().backward()
    assert plugin.went == ["fast forward", "forward", "backward"] and [s.backend for s in ran] == [NAME]
    assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))
    plugin.willing_forward = True
    with kdacore.record_selections() as also:
        call(x)
    assert [s.backend for s in also] == [NAME]


@pytest.mark.parametrize("saves", [False, True])
def test_a_backward_that_declines(plugin: Plugin, saves: bool) -> None:
    plugin.saves = saves
    seen_before(plugin)
    plugin.willing_backward = False
    x = arrays()
    call(x)[0].sum().backward()
    assert plugin.went == [*FAST, "backward"]
    assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0)) and all(a.grad is not None for a in x.values())


def test_what_is_saved_is_handed_over(plugin: Plugin) -> None:
    plugin.saves = True
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    assert [tuple(t.shape) for t in o.grad_fn.saved_tensors] == [SHAPE] * 4 + [SHAPE[:3], (2,)]
    o.sum().backward()
    assert plugin.went == FAST and torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))


def test_several_backwards(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    first = torch.autograd.grad(o, x["v"], torch.ones_like(o), retain_graph=True)[0]
    second = torch.autograd.grad(o, x["v"], torch.ones_like(o))[0]
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, x["v"], torch.ones_like(o))


def test_nothing_is_kept(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    o.backward(torch.ones_like(o))
    held = [weakref.ref(a) for a in (o, *x.values())]
    del x, o
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_inputs_changed_in_place_are_refused(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    with torch.no_grad():
        x["k"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_results_may_be_changed_in_place(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    o.mul_(3.0)
    o.sum().backward()
    assert torch.equal(x["v"].grad, torch.full(SHAPE, 6.0))


# --- what goes the ordinary way, or is refused -------------------------------------------------------------------


def test_double_backward_is_refused(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    (grad,) = torch.autograd.grad(call(x)[0].sum(), x["v"], create_graph=True)
    assert plugin.went == ["fast forward", "backward"]
    with pytest.raises(kdacore.UnsupportedError, match="double backward"):
        grad.sum().backward()


def test_batched_gradients_are_refused(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    with pytest.raises(kdacore.UnsupportedError, match=r"torch\.func transforms"):
        torch.autograd.grad(o, x["v"], torch.stack([o, o]).detach(), is_grads_batched=True)
    assert plugin.went == ["fast forward"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.vmap])
def test_transforms_are_refused(plugin: Plugin, transform: Any) -> None:
    seen_before(plugin)
    x = arrays()
    function = lambda v: call({**x, "v": v})[0].sum()  # noqa: E731
    with pytest.raises(kdacore.UnsupportedError, match=r"torch\.func transforms"):
        if transform is torch.func.grad:
            transform(function)(x["v"])
        elif transform is torch.func.vjp:
            transform(function, x["v"])
        else:
            transform(function)(torch.stack([x["v"], x["v"]]))


def test_tensors_left_over_from_a_transform(plugin: Plugin) -> None:
    """They look like plain ones to all but torch, whose ``Function.apply`` unwraps them."""
    left: list[Any] = []
    torch.func.grad(lambda v: (left.append(v), v.sum())[1])(arrays()["v"].detach())
    for _ in range(4):
        call({**arrays(), "v": left[0]})
    assert not {"made", *FAST} & set(plugin.went)


class Subclass(torch.Tensor):
    """Not a plain tensor."""


def test_a_gradient_of_a_subclass_goes_the_ordinary_way(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    o.backward(torch.ones(SHAPE).as_subclass(Subclass))
    assert plugin.went == ["fast forward", "backward"]
    assert torch.equal(torch.Tensor(x["v"].grad), torch.full(SHAPE, 2.0))


@pytest.mark.parametrize("where", ["forward", "both"])
def test_autocast_changes_nothing(plugin: Plugin, where: str) -> None:
    """Calls under it are other calls than those outside; gradients may be taken on either side."""
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            call(arrays())
    assert plugin.went[-1] == "fast forward"
    plugin.went.clear()
    for _ in range(3):
        x = arrays()
        with torch.autocast("cpu", torch.bfloat16):
            o = call(x)[0]
            if where == "both":
                o.sum().backward()
        if where == "forward":
            o.sum().backward()
        assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))
    assert plugin.went == FAST * 3


@pytest.mark.slow
def test_activation_checkpointing(plugin: Plugin) -> None:
    for i in range(4):
        x = arrays(i)
        names = list(x)
        out = checkpoint(
            lambda *xs, names=names: call(dict(zip(names, xs, strict=True)))[0],
            *x.values(),
            use_reentrant=False,
        )
        out.sum().backward()
        assert torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))
    assert plugin.went[-3:] == ["fast forward", *FAST]


@pytest.mark.slow
def test_saved_tensors_are_unpacked_once(plugin: Plugin) -> None:
    seen_before(plugin)
    counts: list[str] = []

    def pack(x: Any) -> Any:
        counts.append("pack")
        return x

    def unpack(x: Any) -> Any:
        counts.append("unpack")
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        o = call(arrays())[0]
    o.sum().backward()
    assert counts == ["pack"] * 5 + ["unpack"] * 5 and plugin.went == FAST


REBUILT: dict[str, Callable[[torch.Tensor], Any]] = {
    "strides": lambda x: x.clone().transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "layout": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("change", REBUILT)
def test_saved_tensors_that_a_hook_changed_go_the_ordinary_way(plugin: Plugin, change: str) -> None:
    """Their layout is no longer what the backend prepared for."""
    seen_before(plugin)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), REBUILT[change]):
        o = call(arrays())[0]
        before = call(arrays())[0]
    for result in (before, o):  # the second time the check of layouts exists
        plugin.went.clear()
        result.sum().backward()
        assert plugin.went == ["backward"]
        plain = call(arrays())[0]
        plain.sum().backward()
        assert plugin.went[-2:] == FAST


def test_saved_tensors_that_a_hook_copied_keep_the_shorter_way(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        o = call(x)[0]
    o.sum().backward()
    assert plugin.went == FAST and torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))


def test_hooks_may_change_gradients(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    o = call(x)[0]
    o.register_hook(lambda grad: 5 * grad)
    x["v"].register_hook(lambda grad: grad + 1)
    o.sum().backward()
    assert plugin.went == FAST and torch.equal(x["v"].grad, torch.full(SHAPE, 11.0))


WRONG: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "shape": (1, lambda g: g[:, :1], "gradient of k: got shape"),
    "dtype": (2, lambda g: g.double(), "gradient of v: got dtype float64"),
    "missing": (3, lambda g: None, "gradient of g: the call asks for it, and it is None"),
    "not asked for": (5, lambda g: torch.zeros(2), "gradient of A_log: returned"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_gradients_are_the_backends_fault(plugin: Plugin, fault: str) -> None:
    place, change, message = WRONG[fault]
    plugin.spoil = lambda grads: (*grads[:place], change(grads[place]), *grads[place + 1 :])
    seen_before(plugin)
    with pytest.raises(kdacore.PluginError, match=message):
        call(arrays())[0].sum().backward()


def test_a_traced_call_takes_the_operators(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    program = torch.compile(lambda **x: call(x)[0], fullgraph=True, backend="aot_eager")
    program(**x).sum().backward()
    assert not set(FAST) & set(plugin.went) and torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))


@pytest.mark.slow
def test_compiled_autograd_does_not_trace_through_the_backend(plugin: Plugin) -> None:
    seen_before(plugin)
    x = arrays()
    loss = call(x)[0].sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert plugin.went[0] == "fast forward" and torch.equal(x["v"].grad, torch.full(SHAPE, 2.0))


def test_without_torchs_check_every_call_is_ordinary(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_arrays, "TensorGuards", None)
    for _ in range(4):
        call(arrays())[0].sum().backward()
    assert set(plugin.went) == {"forward", "backward"}


def test_it_is_torchs_own_apply() -> None:
    """``Function.apply`` does no more, where no transform is active, than the method that recognised calls are made
    with; the day it does, this has to be looked at."""
    import inspect

    source = inspect.getsource(torch.autograd.Function.apply)
    assert "unwrap_dead_wrappers" in source and "return super().apply(*args, **kwargs)" in source


def test_calls_of_another_backend_have_none() -> None:
    for _ in range(3):
        kdacore.chunk_kda(**arrays(), backend="reference")
    kept = [seen for seen in TORCH.seen_calls.calls["chunk_kda"] if seen.plan.backend.name == "reference"]
    assert kept and all(seen.fast_call is None for seen in kept)
