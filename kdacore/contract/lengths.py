"""Lengths apart from the rest of a call.

A server has other tokens, sequences and pools at every step; dtypes, heads, options and devices stay. Calls that differ
in lengths alone are of one *family*: of a call whose family is known, only what depends on lengths has to be checked.
"""

from __future__ import annotations

from typing import Any

from kdacore.contract import LENGTH_FIELDS, TENSORS_FIELD
from kdacore.contract.checks import MAX_VERIFY_TOKENS
from kdacore.ops import OPS
from kdacore.ops.shapes import LENGTH_AXES, SHAPES, Axis
from kdacore.types import Request, TensorSpec

_new: Any = tuple.__new__

Shapes = tuple[tuple[int, ...], ...]
"""Of the arrays that a call gives, in the order of its op's definition."""


class RequestsLike:
    """Requests of calls that have other lengths than one that was validated, and are otherwise like it.

    It takes the shapes of a call whose arrays have the dtypes, devices and numbers of axes of the first one's, and
    whose options are the same.

    Args:
        request: of a validated call of a whole op or ``kda_gate``, not traced.
    """

    def __init__(self, request: Request) -> None:
        self._fields: list[Any] = list(request)  # type: ignore[call-overload]
        self._specs: list[Any] = list(request.tensors)
        self._packed = request.packed
        self._pool = request.pool_size > 0
        self._most_tokens = MAX_VERIFY_TOKENS if request.read_only_state else 0
        names = [name for name, _ in request.tensors]
        self._offsets = names.index("cu_seqlens") if request.packed else -1
        self._rows = names.index("initial_state") if self._pool else -1
        self._write_rows = names.index("write_pool") if request.write_pool_size else -1
        self._checkpoints = names.index("checkpoint_offsets") if request.checkpoint_count else -1
        self._fixed: list[tuple[int, tuple[int, ...]]] = []
        """Arrays without lengths, with their shapes."""
        self._tables: list[int] = []
        """Arrays ``[N, slots]``."""
        groups: dict[tuple[Axis, tuple[int, ...], str], list[tuple[int, str]]] = {}
        for i, (name, spec) in enumerate(request.tensors):
            count = min(LENGTH_AXES[name], len(spec.shape))
            if not count:
                self._fixed.append((i, spec.shape))
            elif SHAPES[name][0] == "N" and count == 2:
                self._tables.append(i)
            else:
                axis = SHAPES[name][0]
                if axis == "rows" and not self._pool:
                    axis = "N"
                groups.setdefault((axis, spec.shape[count:], spec.dtype), []).append((i, name))
        self._groups = [(axis, tail, dtype, members) for (axis, tail, dtype), members in groups.items()]
        """Arrays of one shape and dtype: their first axis, the sizes that are no lengths, the dtype."""

    def __call__(self, shapes: Shapes) -> Request | None:
        """The request of a call with arrays of these shapes. None where they may be wrong, and have to be validated."""
        B, T = shapes[0][:2]
        N, rows, write_rows, checkpoints = B, 0, 0, 0
        if self._packed:
            N = shapes[self._offsets][0] - 1
            if B != 1:
                return None
        if self._pool:
            rows = shapes[self._rows][0]
            if rows < 1:
                return None
        if self._write_rows >= 0:
            write_rows = shapes[self._write_rows][0]
            if write_rows < 1:
                return None
        if self._checkpoints >= 0:
            checkpoints = shapes[self._checkpoints][0]
            if checkpoints < 1 or B != 1:
                return None
        if B < 1 or T < 1 or N < 1:
            return None
        if self._most_tokens and self._most_tokens * (N if self._packed else 1) < T:
            return None
        for i, shape in self._fixed:
            if shapes[i] != shape:
                return None
        specs = self._specs.copy()
        leading: dict[str, tuple[int, ...]] = {
            "B": (B, T),
            "N": (N,),
            "offsets": (N + 1,),
            "rows": (rows,),
            "write_rows": (write_rows,),
            "checkpoints": (checkpoints,),
        }
        for axis, tail, dtype, members in self._groups:
            want = leading[axis] + tail
            spec = _new(TensorSpec, (want, dtype))
            for i, name in members:
                if shapes[i] != want:
                    return None
                specs[i] = name, spec
        for i in self._tables:
            slots = shapes[i][1]
            if shapes[i][0] != N or slots < (1 if self._packed else T):
                return None
            name, spec = specs[i]
            specs[i] = name, _new(TensorSpec, ((N, slots), spec.dtype))
        fields = self._fields.copy()
        for i, size in zip(LENGTH_FIELDS, (B, T, N, rows, write_rows, checkpoints), strict=True):
            fields[i] = size
        fields[TENSORS_FIELD] = tuple(specs)
        request: Request = _new(Request, fields)
        return request


def has_families(request: Request) -> bool:
    """Whether :class:`RequestsLike` knows how the shapes of the op's arrays belong together."""
    return OPS[request.op].family != "stage" and not request.traced
