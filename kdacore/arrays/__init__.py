"""Adapters between the front end and the array libraries. None is imported before its arrays arrive."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kdacore.arrays.base import ADAPTERS, Adapter, Extent, Memory, Outline

__all__ = [
    "Adapter",
    "adapter_of",
    "exact_memory",
    "extent_of",
    "has_dtensor",
    "is_spec",
    "memory_of",
    "outlines",
]


def adapter_of(x: Any) -> Adapter | None:
    """The adapter of an array (or of a :class:`kdacore.ShapeDtype`), or None when it is no array kdacore knows."""
    found = ADAPTERS.get(type(x))
    if found is None:
        found = _resolve(x)
        # Not cached: specs, of which each has its own kind; torch, whose adapter adds its plain types itself when it is
        # imported, because this line may be running inside a torch.compile trace.
        if found is not None and found.kind != "torch" and not is_spec(x):
            ADAPTERS[type(x)] = found
    return found


def memory_of(x: Any) -> Memory | None:
    """The bytes of an array of any kind; None where there are none to speak of, and of what is no array."""
    adapter = None if x is None else adapter_of(x)
    found = None if adapter is None else adapter.memory(x)
    return None if found is None else Memory(*found)


def exact_memory(x: Any) -> Memory:
    """:func:`memory_of` an array that has an extent."""
    memory = memory_of(x)
    if memory is None:
        raise ValueError(f"a {type(x).__name__} without memory")
    return memory


def extent_of(x: Any) -> Extent | None:
    """The outline of :func:`memory_of`."""
    adapter = ADAPTERS.get(type(x)) or (None if x is None else adapter_of(x))
    return None if adapter is None else adapter.extent(x)


def outlines(inputs: Any) -> list[Outline]:
    """The extents of an op's arrays, by name and with the array; of those that have memory."""
    found = []
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None:
            adapter = ADAPTERS.get(type(x)) or adapter_of(x)
            extent = None if adapter is None else adapter.extent(x)
            if extent is not None:
                found.append((name, x, extent))
    return found


def is_spec(x: Any) -> bool:
    """Is it a :class:`kdacore.ShapeDtype`? There is none before its module has been imported."""
    specs = sys.modules.get("kdacore.arrays.specs")
    return specs is not None and isinstance(x, specs.ShapeDtype)


def has_dtensor(arrays: Iterable[Any]) -> bool:
    """Whether any of the arrays is a DTensor of torch, of which there is none before its module has been imported."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(isinstance(x, dtensor) for x in arrays)


def _resolve(x: Any) -> Adapter | None:
    import numpy as np

    if is_spec(x):
        from kdacore.arrays.specs import SPEC_ADAPTERS

        return SPEC_ADAPTERS[x.kind]
    if isinstance(x, np.ndarray):
        from kdacore.arrays.numpy import NUMPY

        return NUMPY
    # An array of a framework can only exist once the framework is imported, so looking is enough.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from kdacore.arrays.torch.eager import adapter_for

        return adapter_for(x)
    jax = sys.modules.get("jax")
    if jax is not None and (
        isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(type(x), "__jax_array__")
    ):
        from kdacore.arrays.jax import JAX

        return JAX
    return None
