"""The torch part of recognising a call: one check in C++ instead of ten tensors' attributes read from Python.

torch has the check for the guards of its compiled graphs: type, dispatch keys (so layout and device type, and what the
thread adds or takes away: autocast, ``torch.func`` transforms), dtype, device index, sizes, ``requires_grad``. It is
internal to torch: where it is missing every call takes the ordinary path, which gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from kdacore.acceleration.checks import Bounds
from kdacore.ops import WRITABLE_ARGUMENTS

try:
    from torch._C._dynamo.guards import TensorGuards as TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]


def array_test(arrays: dict[str, Any], same_strides: bool) -> tuple[str, dict[str, Any]] | None:
    """See :data:`kdacore.acceleration.matchers.ArrayTest`."""
    return _test(arrays, same_strides, same_sizes=True)


def family_test(arrays: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """See :data:`kdacore.acceleration.matchers.FamilyTest`. Tensors without memory take the ordinary path,
    which names those that should have some."""
    found = _test(arrays, same_strides=False, same_sizes=False)
    if found is None:
        return None
    expression, values = found
    return " and ".join([expression, *[f"{name}.untyped_storage().data_ptr()" for name in arrays]]), values


def _test(arrays: dict[str, Any], same_strides: bool, same_sizes: bool) -> tuple[str, dict[str, Any]] | None:
    if TensorGuards is None or not all(
        type(x) in (torch.Tensor, torch.nn.Parameter) for x in arrays.values()
    ):
        return None
    # The check takes no tensor twice, and calls may: one index array for the rows that are read and written, say.
    first: dict[int, str] = {}
    same = ""
    for name, x in arrays.items():
        known = first.setdefault(id(x), name)
        if known != name:
            same += f"{name} is {known} and "
    if same:
        arrays = {name: arrays[name] for name in first.values()}
    sizes: Any = None if same_sizes else [[None] * x.dim() for x in arrays.values()]
    strides: Any = None
    if not same_strides:
        strides = [[None] * x.dim() for x in arrays.values()]
        # Those of what is written are compared with those that were checked, where sizes are too.
        for i, (name, x) in enumerate(arrays.items()) if same_sizes else ():
            if name in WRITABLE_ARGUMENTS:
                strides[i] = list(x.stride())
    guards = TensorGuards(*arrays.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    # Dual tensors look like others to the check, and it ends the process at a nested tensor, whose sizes raise in C++.
    nested = " or ".join(f"{name}.is_nested" for name in arrays)
    # A tensor made in inference mode has the keys outside that a plain one has inside, and must not be written there.
    mode = torch.is_inference_mode_enabled()
    if mode and any(name in WRITABLE_ARGUMENTS and not x.is_inference() for name, x in arrays.items()):
        same += "inference_mode() and "
    test = f"{same}forward_ad._current_level < 0 and not ({nested}) and check({', '.join(arrays)})"
    if any(x.requires_grad for x in arrays.values()):  # otherwise the mode decides nothing
        test = f"grad_enabled() is {torch.is_grad_enabled()} and {test}"
    return test, {
        "check": guards.check,
        "forward_ad": forward_ad,
        "grad_enabled": torch.is_grad_enabled,
        "inference_mode": torch.is_inference_mode_enabled,
    }


def bounds(arrays: Any) -> Bounds:
    """Where tensors lie, None left out; of one that is not contiguous no more than the end of its storage is looked
    at. A host copy of the offsets may be a NumPy array; those of recognised calls are not."""
    found = []
    for x in arrays:
        if x is not None:
            first = x.data_ptr()
            if x.is_contiguous():
                found.append((first, first + x.nbytes, True))
            else:  # strides are never negative
                storage = x.untyped_storage()
                found.append((first, storage.data_ptr() + storage.nbytes(), False))
    return found


def bounds_of(x: torch.Tensor) -> tuple[int, int, bool]:
    """Where a tensor lies; a strided one that :func:`likeness` accepted."""
    first = x.data_ptr()
    return first, first + x.nbytes, x.is_contiguous()


def likeness(x: torch.Tensor) -> Callable[[Any], bool]:
    """A test for tensors that differ from this one in their shapes and strides alone. None passes where this is no
    plain tensor."""
    plain, strided, dtype, device = torch.Tensor, torch.strided, x.dtype, x.device

    def is_like(y: Any) -> bool:
        return type(y) is plain and y.dtype is dtype and y.layout is strided and y.device == device

    return is_like
