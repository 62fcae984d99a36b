"""``commit_records`` on torch tensors, in one launch."""

from __future__ import annotations

from kdacore.types import CommitInputs, CommitOutputs, Request
from kdacore_cuda.forms.launches import ROWS
from kdacore_cuda.forms.recurrent.commit_launches import launches_of
from kdacore_cuda.forms.recurrent.record_numbers import PARTS, record_strides
from kdacore_cuda.kernel_parameters import RECORD_STRIDES
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.program import Program
from kdacore_cuda.runtime.torch_arguments import contiguous, contiguous_rows


def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """Apply records to states of a pool.

    Args:
        request: K = V = 64 or 128, float32 records.
        inputs: its arrays, of any strides.

    Returns: the pool, written in place.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, pool = request, inputs.initial_state
    parts = [getattr(inputs, name) for name in PARTS]
    states, row = contiguous_rows(pool, r.HV * r.K * r.V)
    reads = contiguous(inputs.state_indices)
    arrays = dict(zip(PARTS, parts, strict=True)) | {
        "initial_state": states,
        "final_state": states,
        "state_indices": reads,
        "write_indices": reads if inputs.write_indices is None else contiguous(inputs.write_indices),
        "record_indices": contiguous(inputs.record_indices),
        "num_replayed": contiguous(inputs.num_replayed),
    }
    program, numbers, arch = _packed(r, row, record_strides(r, parts))
    torch_launch.run(program, numbers, arch, pool, arrays)
    if states is not pool:
        pool.copy_(states)
    return CommitOutputs(pool)


def _pack(r: Request, row: int, strides: tuple[int, ...]) -> tuple[Program, bytes, str]:
    made = launches_of(r)
    lying = dict(zip((*ROWS, *RECORD_STRIDES), (row, row, *strides), strict=True))
    return made.program, made.program.pack_numbers(made.numbers | lying), made.arch


_packed = PlanCache(_pack)
"""Program, numbers and architecture, by the strides of the arrays."""
