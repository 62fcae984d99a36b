"""Arrays that a call writes: their elements must not overlap, nor overlap anything that the call reads.

Kernels read and write in an order of their own, so either would give wrong numbers without an error. Addresses and
strides are looked at, never values.
"""

from __future__ import annotations

from typing import Any

from kdacore.arrays import Adapter, exact_memory, outlines
from kdacore.arrays.base import Memory, Outline
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.types import Request


def written_arguments(request: Request) -> tuple[str, ...]:
    """The arrays that a call writes in place, where its library's arrays can be written."""
    if request.kind == "jax":
        return ()
    return OPS[request.op].written_of([name for name, _ in request.tensors], request.inplace_state)


def _memory_written(name: str, x: Any) -> Memory:
    """The memory of an array that is written.

    Of ``conv_windows`` ``[R, T, w-1, D]`` whose windows each begin one token after the one before, in the same memory,
    that of the tokens: where two windows meet they hold the same, so it does not matter which is written last.
    """
    memory = exact_memory(x)
    if name != "conv_windows" or memory.strides[1] != memory.strides[2]:
        return memory
    (rows, tokens, history, channels), (row, _, token, channel) = memory.shape, memory.strides
    line = (rows, tokens + history - 1, channels)
    return memory._replace(shape=line, strides=(row, token, channel))


def check_memory(request: Request, inputs: Any, adapter: Adapter) -> list[Outline] | None:
    """Check what a call writes.

    Returns:
        The outlines of all arrays; None where nothing is written.

    Raises:
        ContractError: naming an array that is to be written and cannot be, or that overlaps itself or another.
    """
    written = written_arguments(request)
    if not written:
        return None
    arrays = inputs if hasattr(inputs, "_fields") else OPS[request.op].inputs._make(inputs)  # type: ignore[attr-defined]
    for name in written if len(written) < 2 else sorted(written, key=arrays._fields.index):
        x = getattr(arrays, name)
        problem = None if x is None else adapter.unwritable(x)
        if problem is not None:
            raise ContractError(request.op, name, *problem)
    found = outlines(arrays)
    targets = {name: (x, extent) for name, x, extent in found if name in written}
    for name in written:
        if name not in targets:
            continue
        x, (first, end, dense) = targets[name]
        if not dense and (memory := _memory_written(name, x)).overlaps_itself():
            raise ContractError(
                request.op,
                name,
                f"memory that overlaps itself (strides of {list(memory.strides)} bytes)",
                "an array whose elements share no memory: it is written",
            )
        for other, y, (start, stop, _) in found:
            if start < end and first < stop and other != name and exact_memory(x).overlaps(exact_memory(y)):
                raise ContractError(
                    request.op, name, f"memory shared with '{other}'", "memory of its own: it is written"
                )
    return found
