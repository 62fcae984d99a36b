"""The states, pools, index arrays and outputs of a chunk call as kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, address, contiguous, contiguous_rows

if TYPE_CHECKING:
    import torch


class PoolArguments(NamedTuple):
    """What a chunk forward reads and writes besides its tokens."""

    o: torch.Tensor
    """``[B, T, HV, V]``, contiguous: a new one, ``out``, or what is to be copied there."""
    initial: torch.Tensor | None
    """``initial_state``, each row contiguous."""
    written: torch.Tensor | None
    """Final states: new ones, the pool that is written, or what is to be copied there."""
    rows: tuple[int, int, int]
    """Addresses of the rows read, of the mask ``has_initial_state``, of the rows written."""
    strides: tuple[int, int]
    """Elements from a row of ``initial`` to the next, and of ``written``."""
    kept: tuple[Any, ...]
    """Copies of index arrays, to be kept until the launch is queued."""


def pool_arguments(request: Request, inputs: ChunkInputs, state_dtype: torch.dtype) -> PoolArguments:
    """Allocates what a call returns and brings its pools into a layout that kernels read."""
    r, row = request, request.HV * request.K * request.V
    initial, initial_row = contiguous_rows(inputs.initial_state, row)
    written, written_row = initial, initial_row
    if not r.inplace_state:
        written, written_row = None, row
        if r.output_final_state:
            written = inputs.v.new_empty(r.state_shape, dtype=state_dtype)
    elif inputs.write_pool is not None:
        written, written_row = contiguous_rows(inputs.write_pool, row)
    reads, mask = contiguous(inputs.state_indices), contiguous(inputs.has_initial_state)
    writes = reads if inputs.write_indices is None else contiguous(inputs.write_indices)
    rows = (address(reads), address(mask), address(writes) if r.inplace_state else 0)
    o = _output(r, inputs)
    return PoolArguments(o, initial, written, rows, (initial_row, written_row), (reads, mask, writes))


def _output(r: Request, inputs: ChunkInputs) -> torch.Tensor:
    out: Any = inputs.out
    if out is not None and out.is_contiguous() and not out.data_ptr() % ALIGNMENT:
        return out
    o = inputs.v.new_empty((r.B, r.T, r.HV, r.V))
    return o if out is None or not r.packed else o.copy_(out)  # rows of no sequence are not written


def returned(
    request: Request, inputs: ChunkInputs, pools: PoolArguments
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``o`` and the final state as the caller gets them: his own arrays where he gave some."""
    o, final = pools.o, pools.written
    if inputs.out is not None and o is not inputs.out:
        o = inputs.out.copy_(o)
    if request.inplace_state:
        pool: Any = inputs.initial_state if inputs.write_pool is None else inputs.write_pool
        final = pool if final is None or final is pool else pool.copy_(final)
    return o, final if request.output_final_state else None
