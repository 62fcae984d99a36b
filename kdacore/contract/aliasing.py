"""Arrays that a call writes: their elements must not overlap, nor overlap anything that the call reads.

Kernels read and write in an order of their own, so either would give wrong numbers without an error. Addresses and
strides are looked at, never values.
"""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter, adapter_of
from kdacore.arrays.base import Memory
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.types import Request


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
