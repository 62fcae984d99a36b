"""torch tensors: eager calls go straight to the backend, joined to autograd only when a gradient is needed.

Everything that is not plain eager execution (``torch.compile``, ``torch.export``, tensor subclasses such as fake
tensors) goes through the ``torch.library`` operators of ``dispatch/torch_operators.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from kdacore import device as probes
from kdacore.arrays.base import ADAPTERS
from kdacore.arrays.torch.fast_path import tensor_test
from kdacore.arrays.torch.modes import as_given, autocasts, refuse_transforms, refuse_wrapped
from kdacore.errors import UnsupportedError
from kdacore.types import ArrayKind, Device, GateInputs, OutputGrads, Outputs, TensorSpec

if TYPE_CHECKING:
    from kdacore.arrays.base import Plan, Run

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_grad_enabled = torch.is_grad_enabled


class _TorchAdapter:
    kind: ArrayKind = "torch"
    immutable = False
    knows_grad = True

    def __init__(self, through_operators: bool) -> None:
        self.through_operators = through_operators
        self.array_test = tensor_test
        self.fast_path: Any = None
        self.grad_enabled = _grad_enabled

    def runner(self, plan: Plan, inputs: Any) -> Run:
        return _runner(plan, inputs)

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        refuse_transforms(op, arrays)

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        # Each attribute is a call into C, and a decode step has ten tensors: without grad mode nobody asks for one.
        try:
            if _grad_enabled():
                return tuple(
                    [
                        None
                        if x is None
                        else (x.shape, x.dtype, x.device, x.layout, type(x), x.requires_grad)
                        for x in inputs
                    ]
                )
            return tuple(
                [None if x is None else (x.shape, x.dtype, x.device, x.layout, type(x)) for x in inputs]
            )
        except (AttributeError, RuntimeError):
            # A NumPy host copy of the offsets, or not an array; a nested tensor, whose shape raises: look closer.
            return None

    def spec(self, x: Any) -> TensorSpec:
        if x.layout is not torch.strided:
            return TensorSpec(tuple(x.shape), f"{x.dtype} in {x.layout} layout")
        return TensorSpec(tuple(x.shape), _DTYPES.get(x.dtype, str(x.dtype)))

    def device(self, x: Any) -> Device:
        return probes.torch_device(x.device.type, x.device.index or 0)

    def placed(self, x: Any) -> bool:
        return True

    def obstacle(self, op: str, x: Any) -> tuple[str, str] | None:
        return None

    def is_traced(self, x: Any) -> bool:
        return type(x) not in _PLAIN

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return _grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)

    def host_values(self, x: Any) -> Any:
        host = x.detach().cpu()
        return host.double().numpy() if host.is_floating_point() else host.numpy()

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        address = x.data_ptr()
        if not address:  # no elements, or none that exist (the meta device)
            return None
        size = x.element_size()
        return address, tuple(x.shape), tuple([size * s for s in x.stride()]), size

    def run(self, plan: Plan, inputs: Any) -> Any:
        return _runner(plan, inputs)(plan, inputs)


def _runner(plan: Plan, inputs: Any) -> Run:
    """How to run a call under the caller's ``autocast``. Calls recognised as this one are under it too: the check that
    recognises them compares dispatch keys, and autocast is one."""
    return _run_as_given if autocasts(inputs[0]) else _run


def _run(plan: Plan, inputs: Any) -> Any:
    if not plan.request.needs_grad:
        return plan.forward(plan.request, inputs)
    if isinstance(inputs, GateInputs):
        return _Gate.apply(plan, *inputs)
    return Outputs(*_Whole.apply(plan, *inputs))


def _run_as_given(plan: Plan, inputs: Any) -> Any:
    with as_given(inputs[0]):
        return _run(plan, inputs)


TORCH = _TorchAdapter(through_operators=False)
TORCH_SUBCLASS = _TorchAdapter(through_operators=True)
"""For tensor subclasses (fake tensors, DTensor, ...): only torch's own dispatcher knows how to run them."""


ADAPTERS.update(dict.fromkeys(_PLAIN, TORCH))


def adapter_for(x: torch.Tensor) -> _TorchAdapter:
    """The adapter of a tensor or of a tensor subclass."""
    return TORCH if type(x) in _PLAIN else TORCH_SUBCLASS


def _never_traced(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled autograd would trace through what a backend does, which takes half a minute where it can be done."""
    eager = torch.compiler.disable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return (eager if torch.compiler.is_dynamo_compiling() else backward)(ctx, *grads)

    return call


class _Whole(torch.autograd.Function):
    """Joins forward and backward of the four whole ops. The backend was fixed by the forward's plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *arrays: Any) -> tuple[Any, Any, Any]:
        outputs = plan.forward(plan.request, plan.inputs(*arrays))
        ctx.plan, ctx.count = plan, len(arrays)
        # A host copy of the offsets may be a NumPy array, which autograd cannot save.
        ctx.others = {i: x for i, x in enumerate(arrays) if x is not None and not isinstance(x, torch.Tensor)}
        tensors = [x if isinstance(x, torch.Tensor) else None for x in arrays]
        ctx.save_for_backward(*tensors, *outputs.saved)
        ctx.set_materialize_grads(False)
        if outputs.checkpoints is not None:
            ctx.mark_non_differentiable(outputs.checkpoints)
        return outputs.o, outputs.final_state, outputs.checkpoints

    @staticmethod
    @_never_traced
    def backward(ctx: Any, do: Any, dstate: Any, _: Any) -> Any:
        refuse_wrapped(ctx.plan.request.op, (do, dstate))
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        saved = kept[ctx.count :]
        arrays = [ctx.others.get(i, x) for i, x in enumerate(kept[: ctx.count])]
        plan = ctx.plan
        with torch.no_grad(), as_given(arrays[0]):
            grads = plan.backward(plan.inputs(*arrays), saved, OutputGrads(do, dstate))
        grads = _needed(ctx, grads, len(arrays))
        if torch.is_grad_enabled():  # create_graph=True
            grads = _refuse_twice(grads, arrays)
        return None, *grads


class _Gate(torch.autograd.Function):
    """Joins forward and backward of ``kda_gate``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *arrays: Any) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(*arrays)
        return plan.forward(plan.request, plan.inputs(*arrays))

    @staticmethod
    @_never_traced
    def backward(ctx: Any, dlog: Any) -> Any:
        refuse_wrapped(ctx.plan.request.op, (dlog,))
        arrays, plan = ctx.saved_tensors, ctx.plan
        with torch.no_grad(), as_given(arrays[0]):
            grads = plan.backward(plan.inputs(*arrays), dlog)
        grads = _needed(ctx, grads, len(arrays))
        if torch.is_grad_enabled():
            grads = _refuse_twice(grads, arrays)
        return None, *grads


def _needed(ctx: Any, grads: Any, count: int) -> list[Any]:
    """One gradient for each array input, None where none was asked for."""
    padded = [*grads, *([None] * (count - len(grads)))]
    return [g if ctx.needs_input_grad[1 + i] else None for i, g in enumerate(padded)]


def _refuse_twice(grads: list[Any], arrays: Any) -> list[Any]:
    """Let the gradients through, but make a backward through them an error that says why."""
    present = [g for g in grads if g is not None]
    sources = [x for x in arrays if isinstance(x, torch.Tensor) and x.requires_grad]
    wrapped = iter(NoDoubleBackward.apply(len(present), *present, *sources))
    return [None if g is None else next(wrapped) for g in grads]


class NoDoubleBackward(torch.autograd.Function):
    """Identity on the first ``count`` tensors whose own backward raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise double_backward_error()


def double_backward_error() -> UnsupportedError:
    """What a second differentiation raises."""
    return UnsupportedError(
        "kdacore", "double backward: the gradients of these ops are not differentiable", {}
    )
