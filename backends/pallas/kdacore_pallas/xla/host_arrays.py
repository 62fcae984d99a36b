"""Convert NumPy and torch-CPU arrays to JAX arrays without a copy, and results back to memory the
caller owns.

torch tensors are passed as the NumPy arrays that share their memory, not by DLPack: one of XLA's
threads may release the last reference to an input, and torch's release of a DLPack tensor then
takes Python's lock, which aborts a process that is exiting. JAX releases its references to NumPy
arrays in a thread that holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kdacore.types import Request

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

    if isinstance(x, np.ndarray):  # row numbers, which the host has made
        return _from_numpy(x)
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:  # NumPy's bfloat16 is a dtype of ml_dtypes
        return _from_numpy(x.view(torch.int16).numpy().view(jnp.bfloat16))
    return _from_numpy(x.numpy())


def _to_numpy(x: Array) -> Array:
    out = np.asarray(x)
    return out if out.flags.writeable else out.copy()


def _to_torch(x: Array) -> Array:
    import torch

    # A copy: the caller may keep it for longer than XLA's client lives.
    return torch.from_dlpack(x).clone()


class Converter(NamedTuple):
    """Conversion of arrays of one kind."""

    to_jax: Callable[[Array], Array]
    from_jax: Callable[[Array], Array]


CONVERTERS = {"numpy": Converter(_from_numpy, _to_numpy), "torch": Converter(_from_torch, _to_torch)}


def to_jax(request: Request, arrays: Any) -> Any:
    """A tuple of the caller's arrays (None allowed) as the same tuple of JAX arrays."""
    if request.kind == "jax":
        return arrays
    return jax.tree.map(CONVERTERS[request.kind].to_jax, arrays)


def from_jax(request: Request, results: Any) -> Any:
    """JAX results (an array, None or a tuple of them) in the caller's kind."""
    if request.kind == "jax":
        return results
    # Wait until nothing reads the inputs: the caller may write to them as soon as this returns.
    return jax.tree.map(CONVERTERS[request.kind].from_jax, jax.block_until_ready(results))
