"""What a form gives for a call: its launches and the numbers they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec

from kdacore_cuda.kernel_parameters import RECORD_STRIDES, ParamStruct
from kdacore_cuda.runtime.program import Program, Value

TOKENS = ("q", "k", "v", "g", "beta")
STRIDES = tuple(f"{name}_{axis}" for name in TOKENS for axis in ("sb", "st", "sh"))
"""The numbers that are batch, token and head strides of :data:`TOKENS`, in elements."""
ROWS = ("h0_row", "ht_row")
"""Those that are elements from a row of the states read, and of those written, to the next."""
RESULTS = ("o", "final_state", "write_indices", "checkpoints", "workspace", "saved")
"""The last arrays of every forward's program: results, the rows of pools that are written, and buffers.
``final_state``: where states are written, the pool where that is done in place."""
FORWARD_ARGUMENTS = (
    *(*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state"),
    *("state_indices", "has_initial_state", "checkpoint_offsets", "checkpoint_indices"),
)
"""Arguments that the launches of ``chunk_kda`` take, of every form."""
FORWARD_ARRAYS = (*FORWARD_ARGUMENTS, *RESULTS)
ARGUMENTS = {
    "h0": "initial_state",
    "ht": "final_state",
    "ckpt": "checkpoints",
    "reads": "state_indices",
    "has_initial": "has_initial_state",
    "writes": "write_indices",
    "mark_offsets": "checkpoint_offsets",
    "mark_rows": "checkpoint_indices",
}
"""Fields of the chunk kernels' parameters for arguments and results that are called otherwise."""


Key = ParamSpec("Key")


def made_once(
    make: Callable[Concatenate[Iterable[str], Key], Program],
) -> Callable[Concatenate[Iterable[str], Key], Program]:
    """Decorates what makes a form's programs: one for each tuple of the arguments behind the first. From those the
    first follows, the names of the numbers that a call gives; hashing it would take longer than all else."""
    made: dict[tuple[Any, ...], Program] = {}

    def program(numbers: Iterable[str], /, *key: Key.args, **unused: Key.kwargs) -> Program:
        found = made.get(key)
        if found is None:
            found = made[key] = make(tuple(numbers), *key, **unused)
        return found

    return program


class Layout(NamedTuple):
    """How the arrays of a call lie. Of one whose arrays are all contiguous and on 16 bytes there is none."""

    strides: tuple[int, ...]
    """Batch, token and head strides of q, k, v, g and beta, in elements."""
    rows: tuple[int, int]
    """Elements from a row of the states read, and of those written, to the next."""
    aligned_states: bool
    """Every row of states begins on 16 bytes."""
    is_plain: bool
    """They do, and tokens are contiguous."""
    records: tuple[int, ...] = ()
    """Strides of records of candidates (:data:`kdacore_cuda.kernel_parameters.RECORD_STRIDES`); none without them."""


class Launches(NamedTuple):
    """The launches of a call, given the numbers of its lengths and of contiguous arrays."""

    program: Program
    numbers: dict[str, float]
    arch: str
    """The real architecture whose machine code is loaded."""
    buffers: Mapping[str, int] = {}
    """Arrays that launches need besides arguments and results, with their bytes."""

    def with_layout(self, layout: Layout | None) -> dict[str, float]:
        """The numbers of a call whose arrays lie so."""
        if layout is None:
            return self.numbers
        given = dict(zip((*STRIDES, *ROWS), (*layout.strides, *layout.rows), strict=True))
        given |= zip(RECORD_STRIDES, layout.records, strict=bool(layout.records))
        return self.numbers | {name: x for name, x in given.items() if name in self.numbers}


def arguments_of(params: ParamStruct) -> dict[str, Value]:
    """Those of :data:`ARGUMENTS` that a kernel takes."""
    return {field: name for field, name in ARGUMENTS.items() if field in params.offsets}
