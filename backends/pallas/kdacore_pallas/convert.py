"""NumPy and torch-CPU arrays in and out of JAX, without a copy where DLPack or NumPy allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_pallas.xla.numerics import given

Array = Any


def cpu() -> Any:
    """The first CPU device of JAX."""
    return jax.devices("cpu")[0]


def _from_numpy(x: Array) -> Array:
    if x.dtype in (np.int64, np.uint64):
        x = x.astype(np.int32)
    return jax.device_put(np.ascontiguousarray(x), cpu())


def _from_torch(x: Array) -> Array:
    import torch

    x = x.detach()
    if x.dtype == torch.int64:
        x = x.to(torch.int32)
    return jnp.from_dlpack(x.contiguous())


def _to_numpy(x: Array) -> Array:
    out = np.asarray(x)
    return out if out.flags.writeable else out.copy()


def _to_torch(x: Array) -> Array:
    import torch

    return torch.from_dlpack(x)


class Bridge(NamedTuple):
    """How arrays of one kind become JAX arrays and come back."""

    enter: Callable[[Array], Array]
    leave: Callable[[Array], Array]


BRIDGES = {"numpy": Bridge(_from_numpy, _to_numpy), "torch": Bridge(_from_torch, _to_torch)}


def enter(request: Request, arrays: Any) -> Any:
    """A tuple of the caller's arrays (None allowed) as the same tuple of JAX arrays."""
    if request.kind == "jax":
        return arrays
    return jax.tree.map(BRIDGES[request.kind].enter, arrays)


def leave(request: Request, results: Any) -> Any:
    """JAX results (an array, None or a tuple of them) in the caller's kind."""
    if request.kind == "jax":
        return results
    # The caller may write to its own memory as soon as this returns: nothing may still be reading it.
    return jax.tree.map(BRIDGES[request.kind].leave, jax.block_until_ready(results))


def write_back(request: Request, inputs: RecurrentInputs, outputs: Outputs) -> Outputs:
    """NumPy and torch callers may ask for ``out`` and for states written in place: do it, row by row."""
    if request.kind == "jax":
        return outputs
    o, state = outputs.o, outputs.final_state
    if inputs.out is not None:
        inputs.out[...] = o
        o = inputs.out
    if request.inplace_state:
        pool: Array = inputs.initial_state
        rows = slice(None)
        if inputs.state_indices is not None:
            named = np.asarray(inputs.state_indices).reshape(-1)
            rows = named[named >= 0].tolist()
        pool[rows] = given(state)[rows]
        state = pool if request.output_final_state else None
    return outputs._replace(o=o, final_state=state)
