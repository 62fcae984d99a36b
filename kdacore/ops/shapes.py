"""The shape of every array argument, written once for all ops.

A shape is a list of axes: ``B`` rows, ``T`` tokens, ``H`` heads of q and k, ``HV`` value heads, ``K`` and ``V`` head
dims, ``N`` sequences, ``C`` tokens of a chunk. Some axes stand for none, one or two sizes:

- ``gate``: the channels of the gate; ``K``, or none where an op has one gate a head.
- ``state``: the two axes of a state; ``K, V``, or ``V, K`` with ``state_v_first``.
- ``rows``: the states given; the rows of the pool, else one for each sequence.
- ``slots``: columns of two-dimensional ``state_indices``; none where they have one dimension.
- ``write_slots``: the same of ``write_indices``; ``write_rows``: rows of ``write_pool``.
- ``checkpoints``: states kept at chosen tokens.
- ``channels``: of q, k and v together, ``2 * H * K + HV * V``; ``taps``: of the convolution.
- ``conv_rows``, ``conv_columns``: of the pool of convolution states; ``window_rows``, ``windows``: kept for candidates,
  each of ``history`` tokens, one fewer than there are taps.
- ``norm_heads``: the heads that have weights of their own in the norm; none where all share them.
- ``record_rows``: rows of the records of candidates; ``records``: records in each.
- ``chunks``: chunks of all sequences together; ``offsets``: ``N + 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Axis = Literal[
    "B", "T", "H", "HV", "K", "V", "N", "C", "gate", "state", "rows", "slots", "write_slots", "write_rows",
    "checkpoints", "channels", "taps", "conv_rows", "conv_columns", "window_rows", "windows", "history", "norm_heads",
    "record_rows", "records", "chunks", "offsets",
]  # fmt: skip
AXES: tuple[Axis, ...] = get_args(Axis)

SHAPES: dict[str, tuple[Axis, ...]] = {
    "q": ("B", "T", "H", "K"),
    "k": ("B", "T", "H", "K"),
    "v": ("B", "T", "HV", "V"),
    "g": ("B", "T", "HV", "gate"),
    "beta": ("B", "T", "HV"),
    "A_log": ("HV",),
    "dt_bias": ("HV", "gate"),
    "initial_state": ("rows", "HV", "state"),
    "cu_seqlens": ("offsets",),
    "cu_seqlens_cpu": ("offsets",),
    "state_indices": ("N", "slots"),
    "num_accepted_tokens": ("N",),
    "out": ("B", "T", "HV", "V"),
    "has_initial_state": ("N",),
    "write_indices": ("N", "write_slots"),
    "write_pool": ("write_rows", "HV", "state"),
    "checkpoint_offsets": ("checkpoints",),
    "checkpoint_indices": ("checkpoints",),
    "x": ("B", "T", "channels"),
    "conv_weight": ("channels", "taps"),
    "conv_bias": ("channels",),
    "conv_state": ("conv_rows", "channels", "conv_columns"),
    "conv_indices": ("N",),
    "conv_windows": ("window_rows", "windows", "history", "channels"),
    "z": ("B", "T", "HV", "V"),
    "norm_weight": ("norm_heads", "V"),
    "record_update": ("record_rows", "records", "HV", "V"),
    "record_key": ("record_rows", "records", "H", "K"),
    "record_decay": ("record_rows", "records", "HV", "gate"),
    "record_indices": ("N",),
    "num_replayed": ("N",),
    "gc": ("B", "T", "HV", "K"),
    "Aqk": ("B", "T", "HV", "C"),
    "Akk": ("B", "T", "HV", "C"),
    "kg": ("B", "T", "HV", "K"),
    "w": ("B", "T", "HV", "K"),
    "u": ("B", "T", "HV", "V"),
    "v_new": ("B", "T", "HV", "V"),
    "h": ("B", "chunks", "HV", "K", "V"),
}

_LENGTHS = frozenset(
    {"B", "T", "N", "rows", "slots", "write_slots", "write_rows", "checkpoints", "chunks", "offsets"}
)
"""Axes that change from one step of a server to the next, while the model stays the same."""
LENGTH_AXES: dict[str, int] = {
    name: next((i for i, axis in enumerate(axes) if axis not in _LENGTHS), len(axes))
    for name, axes in SHAPES.items()
}
"""How many axes of each argument, all in front, are lengths."""


def shape_of(argument: str, sizes: Mapping[Axis, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of one argument. ``sizes``: what each axis stands for in this call."""
    return tuple(size for axis in SHAPES[argument] for size in sizes[axis])
