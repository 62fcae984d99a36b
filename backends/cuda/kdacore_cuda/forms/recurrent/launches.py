"""The launch of the recurrent ops as data."""

from __future__ import annotations

from functools import cache
from typing import Any

from kdacore.types import Request
from kdacore_cuda.choice import RecurrentMode, recurrent_mode
from kdacore_cuda.forms.launches import RESULTS, ROWS, STRIDES, TOKENS, Launches, arguments_of
from kdacore_cuda.forms.recurrent import kernels
from kdacore_cuda.forms.recurrent.record_numbers import RECORD_ARRAYS, RECORD_NUMBERS, numbers_of_records
from kdacore_cuda.kernel_parameters import GATES, RECURRENT, TYPES
from kdacore_cuda.request_encoding import (
    axes_of_written,
    contiguous_token_strides,
    decoding_flags,
    division,
    dtypes_of,
    index_width,
)
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.plan_cache import FamilyCache
from kdacore_cuda.runtime.program import Launch, Program

ARRAYS = (
    *(*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state"),
    *("state_indices", "num_accepted_tokens", "has_initial_state"),
)
"""Arguments that the launch takes, ahead of :data:`kdacore_cuda.forms.launches.RESULTS`."""
_FIELDS = {**arguments_of(RECURRENT), "indices": "state_indices", "accepted": "num_accepted_tokens"}
_OF_TOKENS = (
    *(*STRIDES, *ROWS, "hv_factor", "hv_shift", "group_factor", "group_shift", "T", "H", "HV", "null_index"),
    *("gate", "flags", "qkv_type", "g_type", "beta_type", "bias_type", "scale", "lower_bound"),
)
"""Numbers that depend on no lengths but the tokens of a sequence."""
_NUMBERS = (*_OF_TOKENS, "indices_row", "writes_row", "N", "fills_device", "blocks")


def launches_of(r: Request, mode: RecurrentMode | None = None) -> Launches:
    """The launch of a call by the kernel ``mode``, or by that for contiguous arrays."""
    # Besides the tokens the number of elements decides which kernel serves a call.
    usual, common = _of_tokens(r, r.T, r.B * r.T * r.HV * r.K >> 31)
    kind = r.K, r.state_v_first, r.state_dtype, usual if mode is None else mode
    numbers = {
        **common,
        "indices_row": index_width(r, "state_indices", r.state_indices_ndim),
        "writes_row": index_width(r, r.written_indices, axes_of_written(r)),
        "N": r.N,
        "fills_device": r.N * r.HV >= kernels.FULL_DEVICE_ITEMS,
        "blocks": kernels.grid_blocks(r, kernels.recurrent_tile(*kind)),
    }
    if not r.has("record_update"):
        return Launches(_program(*kind), numbers, arch_of(r))
    records = numbers_of_records(r)
    numbers |= records | {"record_blocks": kernels.record_tokens_blocks(r, records["record_slots"])}
    return Launches(_program_with_records(*kind), numbers, arch_of(r))


def _make_of_tokens(r: Request) -> tuple[RecurrentMode, dict[str, Any]]:
    """The kernel for contiguous arrays, and the numbers :data:`_OF_TOKENS`."""
    dtypes = dtypes_of(r)
    row = r.HV * r.K * r.V
    types = [TYPES[dtypes[x]] if x in dtypes else 0 for x in ("v", "g", "beta", "dt_bias")]
    values = (
        *(*contiguous_token_strides(r), row, row, *division(r.HV), *division(r.HV // r.H), r.T, r.H, r.HV),
        *(r.null_index, GATES[r.gate], decoding_flags(r, dtypes), *types, r.scale, r.lower_bound or 0.0),
    )
    return recurrent_mode(r), dict(zip(_OF_TOKENS, values, strict=True))


_of_tokens = FamilyCache(_make_of_tokens)


@cache
def _program(K: int, v_first: bool, state_dtype: str, mode: RecurrentMode) -> Program:
    kernel = kernels.recurrent_kernel(K, v_first, state_dtype, mode)
    return Program((Launch("recurrent", kernel, "blocks", _FIELDS),), (*ARRAYS, *RESULTS), _NUMBERS)


@cache
def _program_with_records(K: int, v_first: bool, state_dtype: str, mode: RecurrentMode) -> Program:
    kernel, tokens = kernels.records_kernel(K, v_first, state_dtype, mode), kernels.record_tokens_kernel(K)
    steps = (
        Launch("recurrent", kernel, "blocks", _FIELDS),
        Launch("record_tokens", tokens, "record_blocks", _FIELDS),
    )
    numbers = (*_NUMBERS, *RECORD_NUMBERS, "record_blocks")
    return Program(steps, (*ARRAYS, *RECORD_ARRAYS, *RESULTS), numbers)
