"""The launch of the fused decode ops as data."""

from __future__ import annotations

from functools import cache
from typing import Any

from kdacore.types import Request
from kdacore_cuda.choice import (
    RecurrentMode,
    Split,
    decode_split,
    decodes_one_token,
    sequences_in_turn,
)
from kdacore_cuda.forms.choice_on_device import chosen, figures_of
from kdacore_cuda.forms.decode import kernels
from kdacore_cuda.forms.launches import ROWS, Launches, arguments_of
from kdacore_cuda.forms.recurrent.record_numbers import (
    PARTS,
    RECORD_ARRAYS,
    RECORD_NUMBERS,
    numbers_of_records,
)
from kdacore_cuda.kernel_parameters import DECODE, GATES, RECORD_STRIDES, TYPES
from kdacore_cuda.request_encoding import (
    axes_of_written,
    decoding_flags,
    division,
    dtypes_of,
    index_width,
    items_for_choice,
    strides_behind,
)
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.plan_cache import FamilyCache
from kdacore_cuda.runtime.program import Launch, Program

ARGUMENTS = (
    *("x", "g", "beta", "A_log", "dt_bias", "conv_weight", "conv_bias", "conv_state", "conv_indices"),
    *("conv_windows", "z", "norm_weight", "cu_seqlens", "initial_state", "state_indices"),
    *("num_accepted_tokens", "has_initial_state"),
)
"""Arguments of the op that the launch takes."""
RESULTS = ("o", "final_state", "write_indices")
"""Its arrays behind those."""
STRIDED: dict[str, tuple[str, ...]] = {
    "x": ("x_sb", "x_st", ""),
    "g": ("g_sb", "g_st", "g_sh"),
    "beta": ("beta_sb", "beta_st", "beta_sh"),
    "z": ("z_sb", "z_st", "z_sh", "z_sv"),
    "conv_state": ("conv_sr", "conv_sc", "conv_sl"),
    "conv_windows": ("window_sr", "window_st", "window_sl", "window_sc"),
}
"""Arrays that may lie in any way -> the numbers that their strides are; an empty one must be 1."""
STRIDED_RECORDS: dict[str, tuple[str, ...]] = {
    name: RECORD_STRIDES[4 * i : 4 * i + 4] for i, name in enumerate(PARTS)
}
"""The same of records of candidates."""
_STRIDES = tuple([name for names in STRIDED.values() for name in names if name])
_FIELDS = {**arguments_of(DECODE), "indices": "state_indices", "accepted": "num_accepted_tokens"}
FULL_DEVICE_ITEMS = 128
"""Sequences and value heads from which the next launch may be placed before this one starts, as for the recurrent
kernels."""
_OF_TOKENS = (
    *("norm_sh", "group_factor", "group_shift", "taps", "x_type", "conv_weight_type", "conv_bias_type"),
    *("z_type", "norm_type", "wide_conv", "writes_conv", "keeps_candidates", "silu", "norm_eps"),
    *("T", "H", "HV", "null_index", "gate", "flags", "g_type", "beta_type", "bias_type", "scale"),
    "lower_bound",
)
_NUMBERS = (
    *(*_STRIDES, *ROWS, *_OF_TOKENS),
    *("tasks", "task_factor", "task_shift", "writes_keys"),
    *("indices_row", "writes_row", "N", "fills_device", "z_whole", "blocks"),
)


def launches_of(r: Request, is_plain: bool = True) -> Launches:
    """The launch of a call, with the numbers of contiguous arrays. ``is_plain``: the arrays lie as the kernels for one
    token read them."""
    split, mode = chosen(r).split, chosen(r).mode
    if split is None:
        raise ValueError(f"{r.op}: no fused decode step")
    if mode != RecurrentMode.GENERAL and not is_plain:
        mode = RecurrentMode.GENERAL
        split = decode_split(r, mode, items_for_choice(r), figures_of(r))
    row, tasks = r.HV * r.K * r.V, r.HV // split.heads
    at_once = sequences_in_turn(r, mode, split, figures_of(r))
    whole = split.heads * r.H == r.HV  # a cluster has all that read the windows of q and k
    numbers: dict[str, float] = {
        **_of_tokens(r, r.T),
        **strides_of(r, {name: contiguous_strides(r, name) for name in STRIDED}),
        **dict.fromkeys(ROWS, row),
        **dict(zip(("tasks", "task_factor", "task_shift"), (tasks, *division(tasks)), strict=True)),
        "writes_keys": whole,
        "indices_row": index_width(r, "state_indices", r.state_indices_ndim),
        "writes_row": index_width(r, r.written_indices, axes_of_written(r)),
        "N": r.N,
        "fills_device": r.N * r.HV >= FULL_DEVICE_ITEMS,
        "z_whole": 1,
        "blocks": at_once * r.HV or kernels.grid_blocks(r, split),
    }
    records = takes_records(r, mode)
    if records:
        numbers |= numbers_of_records(r)
    if at_once:
        return Launches(_program_in_turn(r.state_v_first), numbers, arch_of(r))
    kind = r.K, r.state_v_first, r.state_dtype, split, mode, records
    shared = r.has("conv_weight") or r.has("record_update")
    if whole or not (r.inplace_state and shared):
        return Launches(_program(*kind), numbers, arch_of(r))
    return Launches(
        _program_with_windows(*kind), numbers | {"window_blocks": kernels.windows_blocks(r)}, arch_of(r)
    )


def takes_records(r: Request, mode: RecurrentMode) -> bool:
    """Whether the kernels of a call have the parameters of records. That for several tokens always has them."""
    return r.has("record_indices") or (mode != RecurrentMode.GENERAL and not decodes_one_token(r))


def arguments_of_launch(launches: Launches) -> tuple[str, ...]:
    """Arguments of the op that the launch of a call takes."""
    return launches.program.arrays[: -len(RESULTS)]


def strided_of(r: Request) -> dict[str, tuple[str, ...]]:
    """:data:`STRIDED` of a call, with its records."""
    return STRIDED | STRIDED_RECORDS if r.has("record_update") else STRIDED


def contiguous_strides(r: Request, name: str) -> tuple[int, ...]:
    """Strides of an array that is contiguous; none of one that was not given."""
    return strides_behind(r.spec(name).shape[1:]) if r.has(name) else ()


def strides_of(r: Request, strides: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The numbers that are strides, from those of the arrays of :func:`strided_of`; 0 of one that was not given."""
    found, names_of = dict.fromkeys(_STRIDES, 0), strided_of(r)
    for name, of_array in strides.items():
        found |= {number: step for number, step in zip(names_of[name], of_array, strict=False) if number}
    return found


def _make_of_tokens(r: Request) -> dict[str, Any]:
    """The numbers :data:`_OF_TOKENS`, which depend on no lengths but the tokens of a sequence."""
    dtypes = dtypes_of(r)

    def type_of(name: str) -> int:
        return TYPES[dtypes[name]] if name in dtypes else 0

    per_head = r.has("norm_weight") and len(r.spec("norm_weight").shape) == 2
    has_conv = r.has("conv_weight")
    values = (
        *(r.V * per_head, *division(r.HV // r.H), r.spec("conv_weight").shape[1] if has_conv else 0),
        *map(type_of, ("x", "conv_weight", "conv_bias", "z", "norm_weight")),
        *(dtypes.get("conv_indices") == "int64", has_conv and r.inplace_state, axes_of_written(r) == 2),
        *(r.norm_activation == "silu", r.norm_eps, r.T, r.H, r.HV, r.null_index, GATES[r.gate]),
        decoding_flags(r, dtypes),
        *(*map(type_of, ("g", "beta", "dt_bias")), r.scale, r.lower_bound or 0.0),
    )
    return dict(zip(_OF_TOKENS, values, strict=True))


_of_tokens = FamilyCache(_make_of_tokens)


@cache
def _program(
    K: int, v_first: bool, state_dtype: str, split: Split, mode: RecurrentMode, records: bool
) -> Program:
    return _joined((_launch(K, v_first, state_dtype, split, mode, records),), _NUMBERS, records)


@cache
def _program_in_turn(v_first: bool) -> Program:
    return _joined((Launch("decode", kernels.sequences_kernel(v_first), "blocks", _FIELDS),), _NUMBERS, True)


@cache
def _program_with_windows(
    K: int, v_first: bool, state_dtype: str, split: Split, mode: RecurrentMode, records: bool
) -> Program:
    steps = (
        _launch(K, v_first, state_dtype, split, mode, records),
        Launch("decode_windows", kernels.windows_kernel(K, records), "window_blocks", _FIELDS),
    )
    return _joined(steps, (*_NUMBERS, "window_blocks"), records)


def _launch(
    K: int, v_first: bool, state_dtype: str, split: Split, mode: RecurrentMode, records: bool
) -> Launch:
    if records and mode != RecurrentMode.GENERAL:
        kernel = kernels.tokens_kernel(v_first, state_dtype, split, mode)
    else:
        kernel = kernels.decode_kernel(K, v_first, state_dtype, split, mode, records)
    return Launch("decode", kernel, "blocks", _FIELDS)


def _joined(steps: tuple[Launch, ...], numbers: tuple[str, ...], records: bool) -> Program:
    if not records:
        return Program(steps, (*ARGUMENTS, *RESULTS), numbers)
    return Program(steps, (*ARGUMENTS, *RECORD_ARRAYS, *RESULTS), (*numbers, *RECORD_NUMBERS))
