"""Tensors that are not what their memory holds: lazily negated views, tensors without memory, tensor subclasses.

Backends read memory. What such a tensor stands for is computed before it is read; where a call would write it, or where
no memory can stand for it, the call is refused by the argument's name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from kdacore.arrays.torch.modes import refuse_wrapped
from kdacore.errors import ContractError
from kdacore.ops import HOST_ARGUMENTS

_unwrap = getattr(torch._C._functorch, "unwrap_if_dead", lambda x: x)
"""Returns the tensor that a tensor left over from an ended gradient transform wraps."""
REFUSED_SUBCLASSES = ("DTensor", "MaskedTensor")
"""Names of classes that :func:`problem_of` refuses, for code that is traced and can ask for no more."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are what they seem. A parameter's own subclasses are not known."""


def resolve(
    op: str, names: tuple[str, ...], arrays: tuple[Any, ...], written: tuple[str, ...]
) -> tuple[Any, ...]:
    """The arrays of a call as backends may read them; the very tuple where there is nothing to do. What subclasses
    stand for torch's dispatcher finds out.

    Args:
        op: the op's name.
        names: of its arrays.
        arrays: what was given, None where nothing was.
        written: names of those that the call writes.

    Raises:
        ContractError: a lazy view that would be written; a tensor that no memory stands for, or whose memory is gone.
        UnsupportedError: a tensor of ``torch.func`` or of batched gradients.
    """
    found = [_unwrap(x) if type(x) in PLAIN else x for x in arrays]
    refuse_wrapped(op, tuple(found))
    for i, (name, x) in enumerate(zip(names, found, strict=True)):
        if name in written and isinstance(x, torch.Tensor) and _is_lazy(x):
            raise ContractError(op, name, lazy_view(x), "a tensor with memory of its own: it is written")
        if type(x) in PLAIN and torch._is_functional_tensor(x):
            raise ContractError(
                op, name, "a functional tensor", "a tensor outside of torch.func.functionalize"
            )
        if type(x) in PLAIN:
            if _is_freed(x):
                want = "a tensor that holds its values"
                raise ContractError(op, name, "a tensor whose storage has been freed", want)
            found[i] = resolved(x)
    return arrays if all(x is y for x, y in zip(arrays, found, strict=True)) else tuple(found)


def _is_lazy(x: torch.Tensor) -> bool:
    return bool(x.is_neg() or x.is_conj() or x._is_zerotensor())


def _is_freed(x: torch.Tensor) -> bool:
    """Has its storage been resized to nothing, as FSDP does with parameters? Whoever reads it may crash."""
    if x.layout is not torch.strided or x.is_meta or x._is_zerotensor() or not x.numel():
        return False
    return not x.untyped_storage().data_ptr()


def resolved(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or where its values are not in its memory a tensor that holds them."""
    return x.clone() if x._is_zerotensor() else x.resolve_conj().resolve_neg()


def as_plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor as torch's dispatcher hands it to a kernel, without its class: the same memory."""
    if type(x) in PLAIN:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def lazy_view(x: torch.Tensor) -> str:
    """What a tensor is whose values are not in its memory."""
    if x._is_zerotensor():
        return "a tensor of zeros without memory"
    return f"a lazily {'negated' if x.is_neg() else 'conjugated'} view"


def refuse_subclasses(op: str, names: tuple[str, ...], arrays: tuple[Any, ...]) -> None:
    """Tensor subclasses that torch's own dispatcher would fail at, with an error that names no argument.

    Raises:
        ContractError: a distributed or a masked tensor; a parameter without a shape yet; a real tensor among fake ones.
    """
    given = [(name, x) for name, x in zip(names, arrays, strict=True) if isinstance(x, torch.Tensor)]
    for name, x in given:
        if (problem := problem_of(x)) is not None:
            raise ContractError(op, name, *problem)
    fake = next(((name, x) for name, x in given if isinstance(x, FakeTensor)), None)
    if fake is None or fake[1].fake_mode.allow_non_fake_inputs:
        return
    for name, x in given:
        if not isinstance(x, FakeTensor) and name not in HOST_ARGUMENTS:
            raise ContractError(op, name, "a tensor with values", f"a fake tensor, as {fake[0]} is")


def problem_of(x: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is that no call can have, and what was wanted; None where there is nothing."""
    if isinstance(x, UninitializedTensorMixin):
        return f"a {type(x).__name__}", "a tensor that has a shape"
    if _is_of(x, "torch.distributed.tensor", "DTensor"):
        placed = ", ".join(map(str, x.placements))
        return (
            f"a DTensor ({placed})",
            "a plain tensor, as to_local() gives it: neither stages nor calls with cp= take DTensors",
        )
    if _is_of(x, "torch.masked", "MaskedTensor"):
        return "a MaskedTensor", "a tensor without a mask; sequences of different lengths are packed"
    return None


def _is_of(x: torch.Tensor, module: str, name: str) -> bool:
    """Is it of this class, whose module need not have been imported?"""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(x, found)


def first_subclass(names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[str, str] | None:
    """The name and the class of the first array that is a tensor of a subclass."""
    for name, x in zip(names, arrays, strict=True):
        if isinstance(x, torch.Tensor) and type(x) not in PLAIN:
            return name, type(x).__name__
    return None
