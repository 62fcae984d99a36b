"""What surrounds a torch call unseen by its arguments: autocast, forward-mode differentiation, ``torch.func``."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from kdacore.errors import UnsupportedError

_UNCHANGED: AbstractContextManager[Any] = nullcontext()
_can_autocast = functools.cache(torch.amp.is_autocast_available)


_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_functorch = torch._C._functorch
_is_functorch_tensor = getattr(_functorch, "is_functorch_wrapped_tensor", lambda x: False)
_is_batched_gradient = getattr(_functorch, "is_legacy_batchedtensor", lambda x: False)
_BACKWARD = "differentiate with backward() or torch.autograd.grad()"


def refuse_transforms(op: str, arrays: tuple[Any, ...]) -> None:
    """Backends differentiate in reverse, and by hand: nothing here can carry a tangent or a hidden batch.

    Raises:
        UnsupportedError: the call is inside what it cannot take part in.
    """
    if _transforming():
        refuse_wrapped(op, arrays)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arrays):
            raise _transform_error(op)  # nor can autograd join a function of Python's inside a transform
    refuse_tangents(op, arrays)


def refuse_wrapped(op: str, arrays: tuple[Any, ...]) -> None:
    """The part about the tensors of ``torch.func`` and of ``is_grads_batched``."""
    if any(isinstance(x, torch.Tensor) and is_wrapped(x) for x in arrays):
        raise _transform_error(op)


def is_wrapped(x: torch.Tensor) -> bool:
    """Is this a tensor of ``torch.func`` or of ``is_grads_batched``?"""
    return bool(_is_functorch_tensor(x) or _is_batched_gradient(x))


def is_readable(x: torch.Tensor) -> bool:
    """Are its values in its memory: is it neither wrapped, nor a lazily negated view, nor zeros without memory?"""
    return not (_is_functorch_tensor(x) or _is_batched_gradient(x) or x.is_neg() or x._is_zerotensor())


def _transform_error(op: str) -> UnsupportedError:
    return UnsupportedError(
        op,
        "torch.func transforms (grad, vjp, jvp, vmap, ...) and batched gradients are not supported: "
        f"{_BACKWARD}, and batch along B or with cu_seqlens",
        {},
    )


def refuse_tangents(op: str, arrays: tuple[Any, ...]) -> None:
    """The part of :func:`refuse_transforms` about dual tensors; next to nothing outside of a dual level."""
    if forward_ad._current_level < 0:
        return
    if any(
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and forward_ad.unpack_dual(x).tangent is not None
        for x in arrays
    ):
        raise UnsupportedError(op, f"forward-mode AD is not supported: {_BACKWARD}", {})


def autocasts(x: torch.Tensor) -> bool:
    """Does ``torch.autocast`` change the dtypes that ops on such a tensor compute in, here and now?"""
    where = x.device.type
    return bool(_can_autocast(where) and torch.is_autocast_enabled(where))


def as_given(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, ops on such tensors compute in the dtypes they are given: the contract wants float32 at least."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else _UNCHANGED
