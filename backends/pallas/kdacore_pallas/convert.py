"""NumPy and torch-CPU arrays in and out of JAX: in without a copy, out as the caller's own memory.

torch tensors go in as the NumPy arrays that share their memory, not over DLPack: XLA's threads may be the last to
let go of an input, and torch's release of a DLPack tensor takes Python's lock there, which aborts a process that
is already ending. JAX hands its references to NumPy arrays back to a thread that holds the lock.
"""

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

    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:  # which NumPy has by another name only
        return _from_numpy(x.view(torch.int16).numpy().view(jnp.bfloat16))
    return _from_numpy(x.numpy())


def _to_numpy(x: Array) -> Array:
    out = np.asarray(x)
    return out if out.flags.writeable else out.copy()


def _to_torch(x: Array) -> Array:
    import torch

    # A copy: the caller may keep it for longer than XLA's client lives.
    return torch.from_dlpack(x).clone()


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
