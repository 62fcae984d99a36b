"""``commit_records`` on torch tensors, in one launch."""

from __future__ import annotations

from functools import cache

from kdacore.types import CommitInputs, CommitOutputs, Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.launches import ROWS, Launches
from kdacore_cuda.forms.recurrent import kernels
from kdacore_cuda.forms.recurrent.record_numbers import (
    PARTS,
    RECORD_ARRAYS,
    RECORD_NUMBERS,
    numbers_of_records,
    record_strides,
)
from kdacore_cuda.kernel_parameters import FLAGS, RECORD_STRIDES
from kdacore_cuda.request_encoding import division, dtypes_of
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.program import Launch, Program
from kdacore_cuda.runtime.torch_arguments import contiguous, contiguous_rows

_FIELDS = {"h0": "initial_state", "ht": "final_state", "indices": "state_indices", "writes": "write_indices"}
_ARRAYS = ("initial_state", "final_state", "state_indices", "write_indices", *RECORD_ARRAYS)
_NUMBERS = (
    *(*ROWS, "hv_factor", "hv_shift", "group_factor", "group_shift", "N", "H", "HV"),
    *("null_index", "flags", "indices_row", "writes_row", "blocks", *RECORD_NUMBERS),
)


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


def launches_of(r: Request) -> Launches:
    """The launch of a call whose arrays are all contiguous."""
    dtypes, row = dtypes_of(r), r.HV * r.K * r.V
    kind = r.K, r.state_v_first, r.state_dtype == "bfloat16"
    flags = FLAGS["INDEX64"] * (dtypes["state_indices"] == "int64")
    flags |= FLAGS["WRITES64"] * (dtypes[r.written_indices] == "int64")
    values = (
        *(row, row, *division(r.HV), *division(r.HV // r.H), r.N, r.H, r.HV, r.null_index, flags, 1, 1),
        kernels.grid_blocks(r, kernels.recurrent_tile(*kind, RecurrentMode.GENERAL)),
    )
    numbers = dict(zip(_NUMBERS, (*values, *numbers_of_records(r).values()), strict=True))
    return Launches(_program(*kind), numbers, arch_of(r))


def _pack(r: Request, row: int, strides: tuple[int, ...]) -> tuple[Program, bytes, str]:
    made = launches_of(r)
    given = zip((*ROWS, *RECORD_STRIDES), (row, row, *strides), strict=True)
    return made.program, made.program.pack_numbers({**made.numbers, **dict(given)}), made.arch


_packed = PlanCache(_pack)
"""Program, numbers and architecture, by the strides of the arrays."""


@cache
def _program(K: int, v_first: bool, bf16_state: bool) -> Program:
    launch = Launch("commit_records", kernels.commit_kernel(K, v_first, bf16_state), "blocks", _FIELDS)
    return Program((launch,), _ARRAYS, _NUMBERS)
