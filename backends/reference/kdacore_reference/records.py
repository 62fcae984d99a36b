"""Records of candidates: what each token did to a state, kept to be applied to it later."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import Array, CommitInputs, CommitOutputs, Request
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    index_array,
    namespace,
    plain,
    put,
    without_float_errors,
    write_rows,
)
from kdacore_reference.convolution import committed
from kdacore_reference.states import checked_rows, read_states, states_of_pool

if TYPE_CHECKING:
    from kdacore_reference.recurrent import Step


class Records:
    """The records of one call.

    Args:
        request: of the call.
        inputs: its arrays.
        numbers: of its sequences, in the order in which states are computed.
        rows: of its pool and its records.
    """

    def __init__(self, request: Request, inputs: Any, numbers: Several[int], rows: StateRows) -> None:
        self.request, self.inputs = request, inputs
        self.rows = [int(rows.records[n]) for n in numbers]
        self.counts = [int(rows.replayed[n]) for n in numbers]
        self.kept: list[tuple[int, int, Step]] = []

    def replayed(self, S: Array) -> Array:
        """The states ``[N, HV, K, V]`` after the records that precede the call, rounded to the pool's dtype."""
        r, xp = self.request, namespace(S)
        grouped = xp.reshape(S, (-1, r.H, r.HV // r.H, r.K, r.V))
        states = []
        for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            state = grouped[i, ...]
            for j in range(count):
                state = self._applied(state, row, j)
            states.append(state if row == ZEROS else self._as_written(state))
        return xp.reshape(xp.stack(states), S.shape) if states else S

    def _applied(self, S: Array, row: int, j: int) -> Array:
        """One record, by the very operations with which its token changed the state."""
        r, xp = self.request, namespace(S)
        x = self.inputs
        update, key, decay = (
            cast(plain(part)[row, j, ...], S.dtype)
            for part in (x.record_update, x.record_key, x.record_decay)
        )
        S = S * xp.reshape(decay, (r.H, r.HV // r.H, -1, 1))
        return S + xp.reshape(key, (r.H, 1, r.K, 1)) * xp.reshape(update, (r.H, r.HV // r.H, 1, r.V))

    def _as_written(self, S: Array) -> Array:
        return cast(cast(S, getattr(self.inputs, self.request.written_pool).dtype), S.dtype)

    def keep(self, t: int, n: int, step: Step) -> None:
        """Keep what token ``t`` did to the first ``n`` states."""
        self.kept.append((t, n, step))

    def states_left(self, first: Array, last: Array) -> Array:
        """The states that the call writes: ``first``, before its tokens, where there are records, else ``last``."""
        xp = namespace(first)
        last = xp.reshape(last, first.shape)
        keeps = [row != ZEROS for row in self.rows]
        states = [first[i, ...] if kept else last[i, ...] for i, kept in enumerate(keeps)]
        return xp.stack(states) if states else last

    def write(self) -> tuple[Array, ...]:
        """Write what was kept. The new arrays where the library's cannot be written."""
        r = self.request
        tails = {"record_update": (r.HV, r.V), "record_key": (r.H, r.K), "record_decay": (r.HV, *_gate(r))}
        found = []
        for i, (name, tail) in enumerate(tails.items()):
            target = plain(getattr(self.inputs, name))
            for t, n, step in self.kept:
                values = namespace(target).reshape(step[i], (n, *tail))
                target = _put_records(target, self.rows[:n], t, values)
            found.append(target)
        return tuple(found) if r.kind == "jax" else ()


class NoRecords:
    """Of a call without records."""

    def replayed(self, S: Array) -> Array:
        return S

    def keep(self, t: int, n: int, step: Step) -> None:
        return

    def states_left(self, first: Array, last: Array) -> Array:
        return last

    def write(self) -> tuple[Array, ...]:
        return ()


def _gate(request: Request) -> tuple[int, ...]:
    return () if request.scalar_gate else (request.K,)


def _put_records(target: Array, rows: list[int], t: int, values: Array) -> Array:
    """``target`` after ``target[rows[i], t] = values[i]``, as :func:`put`; no row, nothing written."""
    named = [i for i, row in enumerate(rows) if row != ZEROS]
    if not named:
        return target
    taken = namespace(values).take(values, index_array(named, values), axis=0)
    where = index_array([rows[i] for i in named], target)
    return put(target, (where, t), cast(taken, target.dtype))


@without_float_errors
def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """Apply records to states of a pool.

    Returns: the pool, written in place, or for JAX, whose arrays cannot be written, the updated
        pool.

    Raises:
        ContractError: an index or a count names what is not there, or two name a row that is written. Nothing is
            written then.
    """
    rows = checked_rows(request, inputs, np.zeros(request.N, np.int64))
    dtype = compute_dtype(namespace(inputs.record_update), request)
    S = read_states(request, inputs, [int(row) for row in rows.read], dtype)
    S = Records(request, inputs, range(request.N), rows).replayed(S)
    final = [int(row) for row in rows.final]
    pool = inputs.initial_state
    if any(row != ZEROS for row in final):
        pool = write_rows(pool, final, states_of_pool(request, inputs, S))
    return CommitOutputs(pool, None if inputs.conv_state is None else committed(inputs, rows))
