"""torch tensors: eager calls go straight to the backend, joined to autograd only when a gradient is needed.

Everything that is not plain eager execution (``torch.compile``, ``torch.export``, tensor subclasses such as fake
tensors) goes through the ``torch.library`` operators of ``dispatch/torch_operators.py``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kdacore import device as probes
from kdacore.arrays.base import ADAPTERS, Memory
from kdacore.arrays.torch.modes import as_given, autocasts, is_wrapped, refuse_transforms
from kdacore.arrays.torch.tensor_views import PLAIN, problem_of, refuse_subclasses, resolve
from kdacore.errors import ContractError
from kdacore.ops import OPS, OpDef
from kdacore.types import ArrayKind, Device, Request, TensorSpec

if TYPE_CHECKING:
    from kdacore.arrays.base import Extent, Plan, Run

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_grad_enabled = torch.is_grad_enabled


class _TorchAdapter:
    kind: ArrayKind = "torch"
    immutable = False
    knows_grad = True

    def __init__(self, recognisable: bool) -> None:
        self.recognisable = recognisable
        self.seen_calls: Any = None

    def runner(self, plan: Plan, inputs: Any) -> Run:
        return _runner(plan, inputs)

    def unwrapped(self, arrays: Any) -> Any:
        return arrays

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        refuse_transforms(op, arrays)
        if any(isinstance(x, torch.Tensor) and type(x) not in PLAIN for x in arrays):
            refuse_subclasses(op, OPS[op].arrays, arrays)

    def admit(
        self, opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[bool, tuple[Any, ...]]:
        refuse_transforms(opdef.name, arrays)
        if _hold_their_values(arrays):
            return False, arrays
        by_dispatcher = any(isinstance(x, torch.Tensor) and type(x) not in PLAIN for x in arrays)
        if by_dispatcher:
            refuse_subclasses(opdef.name, opdef.arrays, arrays)
        return by_dispatcher, resolve(opdef.name, opdef.arrays, arrays, opdef.written(arrays, options))

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

    def unreadable(self, x: Any) -> tuple[str, str] | None:
        if x.is_nested:  # which has no shape
            return "a nested tensor", "a tensor; sequences of a pack follow one another in it"
        return None if type(x) in PLAIN else problem_of(x)

    def unwritable(self, x: Any) -> tuple[str, str] | None:
        if x.is_inference() and not torch.is_inference_mode_enabled():
            return (
                "a tensor made in inference mode",
                "a clone of it, or the call inside torch.inference_mode()",
            )
        return None

    def check_saved(self, request: Request, inputs: Any) -> None:
        for i, x in enumerate(inputs):
            if x is not None and type(x) is not np.ndarray and x.is_inference():
                name = inputs._fields[i]
                want = "a clone of it: a call that needs gradients saves it for the backward"
                raise ContractError(request.op, name, "a tensor made in inference mode", want)

    def is_traced(self, x: Any) -> bool:
        return type(x) not in PLAIN

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        return _grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)

    def host_values(self, x: Any) -> Any:
        host = x.detach().cpu()
        return host.double().numpy() if host.is_floating_point() else host.numpy()

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        if x.layout is not torch.strided or is_wrapped(x):  # it has no address of its own
            return None
        address = x.data_ptr()
        if not address:  # no elements, or none that exist (the meta device)
            return None
        size = x.element_size()
        return address, tuple(x.shape), tuple([size * s for s in x.stride()]), size

    def extent(self, x: Any) -> Extent | None:
        try:
            address = x.data_ptr()
        except RuntimeError:  # there is no address: another layout, or a tensor of a transform
            memory = self.memory(x)
            return None if memory is None else (*Memory(*memory).bounds(), False)
        if not address:
            return None
        if x.is_contiguous():
            return address, address + x.nbytes, True
        return (*Memory(*self.memory(x)).bounds(), False)  # type: ignore[misc]

    def run(self, plan: Plan, inputs: Any) -> Any:
        return _runner(plan, inputs)(plan, inputs)


def _hold_their_values(arrays: tuple[Any, ...]) -> bool:
    """Whether all are plain tensors with allocated memory that holds their values as they are (not lazily negated).

    On the path of every call that no fast path recognises, hence one pass. False also for empty tensors and those on
    the meta device, which the slower checks then look at.
    """
    try:
        for x in arrays:
            if x is not None and (type(x) not in PLAIN or x.is_neg() or not x.untyped_storage().data_ptr()):
                return False
    except RuntimeError:
        # There is no memory to point to: a sparse tensor, or one of a transform that has ended.
        return False
    return True


def _runner(plan: Plan, inputs: Any) -> Run:
    """How to run a call under the caller's ``autocast``. Calls recognised as this one are under it too: the check that
    recognises them compares dispatch keys, and autocast is one."""
    return _run_as_given if autocasts(inputs[0]) else _run


def _run(plan: Plan, inputs: Any) -> Any:
    if not plan.request.needs_grad:
        return plan.forward(plan.request, inputs)
    from kdacore.arrays.torch import autograd  # here: it imports torch's compiler, which takes a second

    return autograd.differentiable(plan, inputs)


def _run_as_given(plan: Plan, inputs: Any) -> Any:
    with as_given(inputs[0]):
        return _run(plan, inputs)


TORCH = _TorchAdapter(recognisable=True)
TORCH_SUBCLASS = _TorchAdapter(recognisable=False)
"""The adapter of tensor subclasses (fake tensors, DTensor, ...): only torch's own dispatcher knows how to run them."""


def adapter_for(x: torch.Tensor) -> _TorchAdapter:
    """The adapter of a tensor or of a tensor subclass."""
    return TORCH if type(x) in PLAIN else TORCH_SUBCLASS


# Last: other threads' calls find the adapter from here on, and need all that is above.
ADAPTERS.update(dict.fromkeys(PLAIN, TORCH))
