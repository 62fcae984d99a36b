"""Adapters between the front end and the array libraries. None is imported before its arrays arrive."""

from __future__ import annotations

import sys
from typing import Any

from kdacore.arrays.base import Adapter
from kdacore.arrays.specs import ShapeDtype

__all__ = ["Adapter", "ShapeDtype", "adapter_of"]

_by_type: dict[type, Adapter] = {}


def adapter_of(x: Any) -> Adapter | None:
    """The adapter of an array (or of a :class:`ShapeDtype`), or None when it is no array kdacore knows."""
    found = _by_type.get(type(x))
    if found is None:
        found = _resolve(x)
        # Not cached: a spec, whose kind is its own; torch, which adds its plain types itself when its adapter is
        # imported, because this line may be running inside a torch.compile trace.
        if found is not None and found.kind != "torch" and not isinstance(x, ShapeDtype):
            _by_type[type(x)] = found
    return found


def _resolve(x: Any) -> Adapter | None:
    import numpy as np

    if isinstance(x, ShapeDtype):
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
    if jax is not None and isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        from kdacore.arrays.jax import JAX

        return JAX
    return None
