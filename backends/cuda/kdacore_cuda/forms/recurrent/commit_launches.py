"""The launch of ``commit_records`` as data."""

from __future__ import annotations

from functools import cache

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.launches import ROWS, Launches
from kdacore_cuda.forms.recurrent import kernels
from kdacore_cuda.forms.recurrent.record_numbers import RECORD_ARRAYS, RECORD_NUMBERS, numbers_of_records
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.request_encoding import division, dtypes_of
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.program import Launch, Program

_FIELDS = {"h0": "initial_state", "ht": "final_state", "indices": "state_indices", "writes": "write_indices"}
_ARRAYS = ("initial_state", "final_state", "state_indices", "write_indices", *RECORD_ARRAYS)
_NUMBERS = (
    *(*ROWS, "hv_factor", "hv_shift", "group_factor", "group_shift", "N", "H", "HV"),
    *("null_index", "flags", "indices_row", "writes_row", "blocks", *RECORD_NUMBERS),
)


def launches_of(r: Request) -> Launches:
    """The launch of a call whose arrays are all contiguous."""
    dtypes, row = dtypes_of(r), r.HV * r.K * r.V
    kind = r.K, r.state_v_first, r.state_dtype
    flags = FLAGS["INDEX64"] * (dtypes["state_indices"] == "int64")
    flags |= FLAGS["WRITES64"] * (dtypes[r.written_indices] == "int64")
    values = (
        *(row, row, *division(r.HV), *division(r.HV // r.H), r.N, r.H, r.HV, r.null_index, flags, 1, 1),
        kernels.grid_blocks(r, kernels.recurrent_tile(*kind, RecurrentMode.GENERAL)),
    )
    numbers: dict[str, float] = dict(zip(_NUMBERS, (*values, *numbers_of_records(r).values()), strict=True))
    return Launches(_program(*kind), numbers, arch_of(r))


@cache
def _program(K: int, v_first: bool, state_dtype: str) -> Program:
    launch = Launch("commit_records", kernels.commit_kernel(K, v_first, state_dtype), "blocks", _FIELDS)
    return Program((launch,), _ARRAYS, _NUMBERS)
