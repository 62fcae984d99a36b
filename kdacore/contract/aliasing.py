"""Arrays that a call writes: their elements must not overlap, nor overlap anything that the call reads.

Kernels read and write in an order of their own, so either would give wrong numbers without an error. Addresses and
strides are looked at, never values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kdacore.arrays import Adapter, adapter_of
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.types import Request

_MOST_WORK: Any = 10_000
"""Steps the exact test may take; two layouts so entangled are taken for apart."""


class Memory(NamedTuple):
    """The bytes an array occupies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def bounds(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(r for r in reach if r < 0)
        return first, self.address + sum(r for r in reach if r > 0) + self.itemsize

    def overlaps_itself(self) -> bool:
        """May two elements share memory? Each axis must step over all that the finer ones reach."""
        reach = self.itemsize
        steps = [(abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1]
        for stride, size in sorted(steps):
            if stride < reach:
                return True
            reach += stride * (size - 1)
        return False

    def overlaps(self, other: Memory) -> bool:
        """Do the two share a byte?"""
        (a, b), (c, d) = self.bounds(), other.bounds()
        if b <= c or d <= a:
            return False
        try:
            return bool(np.shares_memory(_array(self), _array(other), max_work=_MOST_WORK))
        except np.exceptions.TooHardError:
            return False


class _Array:
    """A memory as NumPy's test of overlap takes it, which reads no element."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, True),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{memory.itemsize}",
        }


def _array(memory: Memory) -> Any:
    return np.asarray(_Array(memory))


def written_arguments(request: Request) -> tuple[str, ...]:
    """The arrays that a call writes in place, where its library's arrays can be written."""
    if request.kind == "jax":
        return ()
    return ("out",) * request.has("out") + (request.written_pool,) * request.inplace_state


def check_memory(request: Request, inputs: Any, adapter: Adapter) -> None:
    """Raise :class:`ContractError` naming an array that is to be written and cannot be, or that overlaps itself or
    another."""
    written = written_arguments(request)
    if not written:
        return
    found: dict[str, Memory] = {}
    for name, x in zip(OPS[request.op].arrays, inputs, strict=True):
        if name in written and (problem := adapter.unwritable(x)) is not None:
            raise ContractError(request.op, name, *problem)
        memory = None if x is None else (adapter_of(x) or adapter).memory(x)
        if memory is not None:
            found[name] = Memory(*memory)
    for name in written:
        if name not in found:
            continue
        target = found[name]
        if target.overlaps_itself():
            raise ContractError(
                request.op,
                name,
                f"memory that overlaps itself (strides of {list(target.strides)} bytes)",
                "an array whose elements share no memory: it is written",
            )
        for other, memory in found.items():
            if other != name and target.overlaps(memory):
                raise ContractError(
                    request.op, name, f"memory shared with '{other}'", "memory of its own: it is written"
                )
