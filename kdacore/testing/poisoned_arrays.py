"""Arrays with poison around them: what lies next to an input must neither be read into a result nor written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdacore.calls.arrays import Values, host_values
from kdacore.calls.description import specs
from kdacore.calls.values import to_kind
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, MASK_ARGUMENTS
from kdacore.testing.cases import Case, Layout
from kdacore.testing.compare import Findings, bits
from kdacore.testing.run_call import inference_mode

_GUARD = 256
"""Guard sizes are a multiple of this, so that a contiguous array stays as aligned as a fresh one."""
_MOST_GUARD = 1 << 16
_POOLS = {"initial_state": 3, "write_pool": 2}
"""Arguments that may be pools, and how many rows apart the rows of a strided one are."""


@dataclass
class Placed:
    """One argument: the array the backend gets, and the poisoned memory it lies in (None for JAX)."""

    name: str
    view: Any
    memory: Any
    before: bytes
    take: Any
    """Cuts the view out of such a memory."""

    def check(self, findings: Findings, *, written: bool = False) -> None:
        """Nothing was changed; of a ``written`` argument, nothing around it."""
        if self.memory is None:
            findings.require(f"{self.name} unchanged", bits(self.view) == self.before, "it was changed")
            return
        if not written:
            findings.require(
                f"{self.name} unchanged", bits(self.memory) == self.before, "it or its surroundings changed"
            )
            return
        was = np.frombuffer(bytearray(self.before), np.uint8)
        now = np.frombuffer(bits(self.memory), np.uint8)
        size = was.size // max(1, math.prod(self.memory.shape))
        inside = self.take(np.arange(was.size // size).reshape(self.memory.shape)).reshape(-1)
        outside = np.ones(was.size // size, bool)
        outside[inside] = False
        same = was.reshape(-1, size)[outside] == now.reshape(-1, size)[outside]
        findings.require(f"around {self.name}", bool(same.all()), "memory around it was written")


def place(case: Case, values: Values | None = None) -> dict[str, Placed]:
    """The case's arrays, of its kind, on its device, laid out as it says."""
    values = host_values(case) if values is None else values
    wanted = specs(case)
    return {name: place_one(case, name, x, wanted[name].dtype) for name, x in values.items()}


def place_one(case: Case, name: str, x: Any, dtype: str) -> Placed:
    """One array. ``x``: its values."""
    if case.kind == "jax":
        host = name in HOST_ARGUMENTS
        view = to_kind(x, "numpy" if host else "jax", dtype, case.device)
        return Placed(name, view, None, bits(view), None)
    layout: Layout = case.layout if x.ndim > 1 and name not in INDEX_ARGUMENTS else "contiguous"
    if name in _POOLS and case.pool_use is not None:
        shape, take = _pool_memory(x.shape, name) if case.pool_use.strided else _memory(x.shape, "contiguous")
    else:
        shape, take = _memory(x.shape, layout)
    memory = _poison(shape, name, dtype)
    take(memory)[...] = -x if name in case.negated else x
    device = "cpu" if name in HOST_ARGUMENTS else case.device
    with inference_mode(case.mode == "inference" and case.seed % 2 == 0):
        made = to_kind(memory, case.kind, dtype, device)
        view = take(made)
    if name in case.negated:
        view = lazily_negated(view)
    return Placed(name, view, made, bits(made), take)


def lazily_negated(x: Any) -> Any:
    """A torch view of the negated values: the memory of ``x`` and a bit that says to change the sign, which is what
    ``z.conj().imag`` is to the imaginary part of ``z``."""
    import torch

    return torch._neg_view(x)


def _poison(shape: tuple[int, ...], name: str, dtype: str) -> Any:
    """NaN and huge numbers in turn; for indices a valid number, since a wild one would end the process."""
    if name in MASK_ARGUMENTS:
        return np.ones(shape, bool)
    if name in INDEX_ARGUMENTS:
        return np.full(shape, 2, np.int64)
    memory = np.full(math.prod(shape), np.nan)
    memory[1::2] = 6e4 if dtype == "float16" else 1e30
    return memory.reshape(shape)


def _memory(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, ...], Any]:
    """Shape of the memory, and how to cut the array out of it (NumPy and torch alike)."""
    if layout == "padded":
        inner = tuple(slice(1, 1 + n) for n in shape)
        return tuple(n + 2 for n in shape), lambda m: m[inner]
    if layout == "stepped":
        return (*shape[:-1], 2 * shape[-1]), lambda m: m[..., ::2]
    if layout == "transposed" and len(shape) > 2:
        swapped = (shape[0], shape[2], shape[1] + 1, *shape[3:])
        return swapped, lambda m: m[:, :, : shape[1]].swapaxes(1, 2)
    size = math.prod(shape)
    guard = min(_MOST_GUARD, 64 * math.prod(shape[2:]))
    guard = -(-guard // _GUARD) * _GUARD
    return (size + 2 * guard,), lambda m: m[guard : guard + size].reshape(shape)


def _pool_memory(shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], Any]:
    """A pool with another cache's memory between its rows."""
    row = math.prod(shape[1:])
    wide = _POOLS[name] * row + 5
    return (shape[0] + 1, wide), lambda m: m[: shape[0], 5 : 5 + row].reshape(shape)


def arrays(placed: dict[str, Placed]) -> dict[str, Any]:
    """What the backend gets."""
    return {name: p.view for name, p in placed.items()}
