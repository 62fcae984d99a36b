"""What launches with records of candidates take beside those without."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Array, Request
from kdacore_cuda.kernel_parameters import RECORD_STRIDES
from kdacore_cuda.request_encoding import dtypes_of, strides_behind

PARTS = ("record_update", "record_key", "record_decay")
RECORD_ARRAYS = (*PARTS, "record_indices", "num_replayed")
"""Arguments that the launches take."""
RECORD_NUMBERS = (*RECORD_STRIDES, "records", "record_slots", "wide_records", "wide_counts")


def numbers_of_records(r: Request) -> dict[str, int]:
    """:data:`RECORD_NUMBERS` of a call with contiguous records; there are none in one that only names the rows of its
    candidates' windows."""
    dtypes = dtypes_of(r)
    records, strides = 0, (0,) * len(RECORD_STRIDES)
    if r.has("record_update"):
        records = r.spec("record_update").shape[1]
        strides = _with_channels(r, [strides_behind(r.spec(name).shape[1:]) for name in PARTS])
    wide = [int(dtypes.get(name) == "int64") for name in ("record_indices", "num_replayed")]
    return dict(zip(RECORD_NUMBERS, (*strides, records, min(r.T, records), *wide), strict=True))


def record_strides(r: Request, parts: Iterable[Array]) -> tuple[int, ...]:
    """The numbers :data:`RECORD_STRIDES` of records as they lie."""
    return _with_channels(r, [x.stride() for x in parts])


def _with_channels(r: Request, strides: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """One decay a head is that of all its channels."""
    return tuple([step for axes in strides for step in (*axes, *(0,) * (4 - len(axes)))])
