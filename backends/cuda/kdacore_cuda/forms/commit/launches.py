"""The launches of ``commit_records`` as data."""

from __future__ import annotations

from functools import cache

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.decode import kernels as decode_kernels
from kdacore_cuda.forms.decode.launches import STRIDED, contiguous_strides
from kdacore_cuda.forms.launches import ROWS, Launches
from kdacore_cuda.forms.recurrent import kernels
from kdacore_cuda.forms.recurrent.record_numbers import RECORD_ARRAYS, RECORD_NUMBERS, numbers_of_records
from kdacore_cuda.kernel_parameters import FLAGS, TYPES
from kdacore_cuda.request_encoding import division, dtypes_of
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.program import Launch, Program

_FIELDS = {"h0": "initial_state", "ht": "final_state", "indices": "state_indices", "writes": "write_indices"}
_ARRAYS = ("initial_state", "final_state", "state_indices", "write_indices", *RECORD_ARRAYS)
WINDOWS = ("conv_state", "conv_windows")
"""Arguments that lie in any way, besides records."""
_WINDOW_ARRAYS = (*WINDOWS, "conv_indices")
WINDOW_STRIDES = tuple([number for name in WINDOWS for number in STRIDED[name]])
_WINDOW_NUMBERS = (*WINDOW_STRIDES, "tasks", "taps", "x_type", "wide_conv", "window_blocks")
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
    if not r.has("conv_state"):
        return Launches(_program(*kind), numbers, arch_of(r))
    return Launches(_program_with_windows(*kind), numbers | _numbers_of_windows(r), arch_of(r))


def _numbers_of_windows(r: Request) -> dict[str, int]:
    _, D, columns = r.spec("conv_state").shape
    if r.has("conv_windows"):
        columns = r.spec("conv_windows").shape[2]
    strides = [step for name in WINDOWS for step in contiguous_strides(r, name) or (0,) * len(STRIDED[name])]
    conv_type = TYPES[r.spec("conv_state").dtype]
    wide = dtypes_of(r).get("conv_indices") == "int64"
    values = (*strides, D, columns + 1, conv_type, wide, decode_kernels.commit_windows_blocks(r))
    return dict(zip(_WINDOW_NUMBERS, values, strict=True))


@cache
def _program(K: int, v_first: bool, state_dtype: str) -> Program:
    return Program((_launch(K, v_first, state_dtype),), _ARRAYS, _NUMBERS)


@cache
def _program_with_windows(K: int, v_first: bool, state_dtype: str) -> Program:
    windows = Launch(
        "commit_windows",
        decode_kernels.commit_windows_kernel(),
        "window_blocks",
        {"h0": "initial_state", "indices": "state_indices"},
    )
    steps = (_launch(K, v_first, state_dtype), windows)
    return Program(steps, (*_ARRAYS, *_WINDOW_ARRAYS), (*_NUMBERS, *_WINDOW_NUMBERS))


def _launch(K: int, v_first: bool, state_dtype: str) -> Launch:
    return Launch("commit_records", kernels.commit_kernel(K, v_first, state_dtype), "blocks", _FIELDS)
