"""Requests of calls that differ in lengths alone.

A server has other tokens, sequences and pools at every step; dtypes, heads, options and devices stay. Calls that differ
in lengths alone are of one *family*: of a call whose family is known, only what depends on lengths has to be checked.
"""

from __future__ import annotations

from typing import Any

from kdacore.acceleration.matchers import Shapes
from kdacore.contract.checks import MAX_VERIFY_TOKENS
from kdacore.ops import OPS
from kdacore.ops.shapes import LENGTH_AXES, SHAPES, Axis
from kdacore.types import LENGTH_FIELDS, TENSORS_FIELD, Request, TensorSpec, family_of, note_family

_new: Any = tuple.__new__


class RequestsLike:
    """Requests of calls that have other lengths than one that was validated, and are otherwise like it.

    It takes the shapes of a call whose arrays have the dtypes, devices and numbers of axes of the first one's, and
    whose options are the same.

    Args:
        request: of a validated call of a whole op or ``kda_gate``, not traced.
    """

    def __init__(self, request: Request) -> None:
        self._family = family_of(request)
        self._fields: list[Any] = list(request)  # type: ignore[call-overload]
        self._specs: list[Any] = list(request.tensors)
        self._packed = request.packed
        self._pool = request.pool_size > 0
        self._most_tokens = _most_tokens(request)
        self._most_sequences = _most_sequences(request)
        names = [name for name, _ in request.tensors]
        self._offsets = names.index("cu_seqlens") if request.packed else -1
        self._rows = names.index("initial_state") if self._pool else -1
        self._without_tokens = names.index("state_indices") if SHAPES[names[0]][:2] != ("B", "T") else -1
        """Where the calls have no tokens: the place of the array that says how many states they have."""
        self._write_rows = names.index("write_pool") if request.write_pool_size else -1
        self._checkpoints = names.index("checkpoint_offsets") if request.checkpoint_count else -1
        self._sequences = 0
        """How many sequences all these calls have; 0 for any number."""
        if request.has("conv_state") and not (request.state_indices_ndim or request.has("conv_indices")):
            self._sequences = request.N
        self._fixed: list[tuple[int, tuple[int, ...]]] = []
        """Arrays without lengths, with their shapes."""
        self._tables: list[tuple[int, str, str]] = []
        """Arrays ``[N, slots]``: place, name and dtype."""
        groups: dict[tuple[Axis, tuple[int, ...], str], list[tuple[int, str]]] = {}
        for i, (name, spec) in enumerate(request.tensors):
            count = min(LENGTH_AXES[name], len(spec.shape))
            if not count:
                self._fixed.append((i, spec.shape))
            elif SHAPES[name][0] == "N" and count == 2:
                self._tables.append((i, name, spec.dtype))
            else:
                axis = SHAPES[name][0]
                if axis == "rows" and not self._pool:
                    axis = "N"
                groups.setdefault((axis, spec.shape[count:], spec.dtype), []).append((i, name))
        self._groups = [
            (_AXES[axis], tail, dtype, members) for (axis, tail, dtype), members in groups.items()
        ]
        """Arrays of one shape and dtype: the number of their first axis, the sizes that are no lengths, the dtype."""

    def __call__(self, shapes: Shapes) -> Request | None:
        """The request of a call with arrays of these shapes. None where they may be wrong, and have to be validated."""
        first = shapes[0] if self._without_tokens < 0 else (shapes[self._without_tokens][0], 1)
        B, T = first[0], first[1]
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
        if (self._most_sequences and self._most_sequences < N) or self._sequences not in (0, N):
            return None
        for i, shape in self._fixed:
            if shapes[i] != shape:
                return None
        specs = self._specs.copy()
        leading = (B, T), (N,), (N + 1,), (rows,), (write_rows,), (checkpoints,)  # in the order of _AXES
        for axis, tail, dtype, members in self._groups:
            want = leading[axis] + tail
            spec = _new(TensorSpec, (want, dtype))
            for i, name in members:
                if shapes[i] != want:
                    return None
                specs[i] = name, spec
        for i, name, dtype in self._tables:
            shape = shapes[i]
            slots = shape[1]
            if shape[0] != N or slots < (1 if self._packed else T):
                return None
            specs[i] = name, _new(TensorSpec, ((N, slots), dtype))
        fields = self._fields.copy()
        fields[_B], fields[_T], fields[_N], fields[_ROWS], fields[_WRITE_ROWS], fields[_CHECKPOINTS] = (
            B,
            T,
            N,
            rows,
            write_rows,
            checkpoints,
        )
        fields[TENSORS_FIELD] = tuple(specs)
        request: Request = _new(Request, fields)
        note_family(request, self._family)
        return request


def _most_tokens(request: Request) -> int:
    """Tokens of a sequence up to which calls like this one need not be validated anew; 0 where any number will do. Of
    packs, whose sequences have lengths of their own, validation knows little more."""
    found = [MAX_VERIFY_TOKENS] if request.read_only_state else []
    family = OPS[request.op].family
    if request.packed or family not in ("recurrent", "decode"):
        return min(found, default=0)
    decode = family == "decode"
    if decode:
        found.append(MAX_VERIFY_TOKENS)
    if request.has("record_update"):
        found.append(min(request.spec("record_update").shape[1], MAX_VERIFY_TOKENS))
    if request.has("conv_windows"):
        found.append(request.spec("conv_windows").shape[1])
    elif decode and request.has("conv_state"):
        columns, taps = request.spec("conv_state").shape[2], request.spec("conv_weight").shape[1]
        candidates = (request.write_indices_ndim or request.state_indices_ndim) == 2 or request.has(
            "record_update"
        )
        if candidates and request.inplace_state:
            found.append(columns - taps + 2)
    return min(found, default=0)


def _most_sequences(request: Request) -> int:
    """The same of sequences: where rows of a fixed number are theirs, one each."""
    if request.has("conv_windows") and not request.has("record_indices"):
        return request.spec("conv_windows").shape[0]
    return 0


_AXES = {axis: i for i, axis in enumerate(("B", "N", "offsets", "rows", "write_rows", "checkpoints"))}
"""First axes of arrays with lengths, numbered."""
_B, _T, _N, _ROWS, _WRITE_ROWS, _CHECKPOINTS = LENGTH_FIELDS


def has_families(request: Request) -> bool:
    """Whether :class:`RequestsLike` knows how the shapes of the op's arrays belong together."""
    return OPS[request.op].family != "stage" and not request.traced
