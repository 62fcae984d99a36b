"""Which arrays the kernels of a chunk forward take, and where in the workspace those lie that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdacore.types import Request
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch

TOKENS = ("q", "k", "v", "g", "beta")
STRIDES = tuple(f"{name}_{axis}" for name in TOKENS for axis in ("sb", "st", "sh"))
"""Fields for the batch, token and head strides of :data:`TOKENS`."""
SMALL = ("A_log", "dt_bias", "cu_seqlens")
ROWS = ("reads", "has_initial", "writes")
MARKS = ("mark_offsets", "mark_rows")
"""Fields for the checkpoints at ``checkpoint_offsets``."""

Places = dict[str, tuple[str, int]]
"""Field of a kernel's parameters to the name of an array and an offset in it, in bytes."""


class ForwardLaunches(NamedTuple):
    """The launches of a forward, in order, with the arrays that :func:`arrays_of` names, ``launch``
    (a number, different in every call), ``workspace`` and ``kept``."""

    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    arch: str
    kept_bytes: int = 0
    """Size of the buffer that the forward saves for the backward; 0 where it saves none."""


def arrays_of(r: Request) -> dict[str, str]:
    """The arrays that a call's kernels take: field of their parameters to the name of the argument
    (that of the result for ``o``, ``ht`` and ``ckpt``), of those that the call has."""
    given = {name: name for name in (*TOKENS, *SMALL)}
    given |= {"h0": "initial_state", "reads": "state_indices", "has_initial": "has_initial_state"}
    given |= {"mark_offsets": "checkpoint_offsets", "mark_rows": "checkpoint_indices"}
    arrays = {field: name for field, name in given.items() if r.has(name)}
    arrays["o"] = "o"
    if r.inplace_state or r.output_final_state:
        arrays["ht"] = "final_state"
    if r.inplace_state and r.written_indices:
        arrays["writes"] = r.written_indices
    if r.checkpoint_every:
        arrays["ckpt"] = "checkpoints"
    return arrays


def only(arrays: Places, params: ParamStruct, *names: str) -> Places:
    """Those of ``arrays`` that are fields of ``params``, in the order of its fields."""
    fields = [name for name, _ in params.fields]
    return {field: arrays[field] for field in fields if field in arrays and (not names or field in names)}


def with_strides(sizes: Mapping[str, Any], strides: tuple[int, ...]) -> dict[str, Any]:
    """Numbers that a launch is given, with the strides of its tokens."""
    return {**sizes, **dict(zip(STRIDES, strides, strict=True))}


def operands(arrays: Places, first: int = 0) -> Places:
    """What the launch that prepares chunks is given; ``first``: where operands begin in the workspace."""
    tokens: Mapping[str, tuple[str, int]] = {x: arrays[x] for x in (*TOKENS, *SMALL) if x in arrays}
    return {**tokens, "last": ("workspace", first)}
