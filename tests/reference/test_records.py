"""Candidates by records: a server that speculates with one state a request has the bits of one that does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.calls.values import to_kind
from kdacore.oracle.host_values import to_float64, to_numpy

H, HV, K, V = 2, 4, 16, 8
SLOTS, ROWS, N, MOST = 8, 5, 5, 4
OPTIONS: dict[str, Any] = {
    "inplace_state": True,
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "null_index": 0,
}
OPS = {"fused_recurrent_kda": (HV, K), "fused_recurrent_gated_delta_rule": (HV,)}
"""Axes of a token's gate."""


def tokens(rng: Any, op: str, count: int) -> dict[str, Any]:
    """``count`` tokens in one row."""
    x = {name: rng.standard_normal((1, count, H, K)) for name in ("q", "k")}
    x |= {"v": rng.standard_normal((1, count, HV, V)), "g": -rng.random((1, count, *OPS[op]))}
    x["beta"] = rng.standard_normal((1, count, HV))
    return {name: a.astype(np.float32) for name, a in x.items()}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens one after another in a pack."""
    pack = {name: np.concatenate([x[name] for x in parts], axis=1) for name in parts[0]}
    lengths = [x["q"].shape[1] for x in parts]
    return {**pack, "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32)}


@dataclasses.dataclass
class Server:
    """States in a pool, with records of candidates beside it."""

    op: str
    kind: Any
    state_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        start = self.rng.standard_normal((SLOTS, HV, K, V))
        start[0] = np.nan
        self.pool = to_kind(start, self.kind, self.state_dtype)
        parts = ((HV, V), (H, K), OPS[self.op])
        self.records = tuple(
            to_kind(np.full((ROWS, MOST, *tail), np.nan), self.kind, "float32") for tail in parts
        )
        self.accepted = np.zeros(N, np.int32)

    def given(self, x: dict[str, Any]) -> dict[str, Any]:
        return {name: to_kind(a, self.kind, a.dtype.name) for name, a in x.items()}

    def call(self, x: dict[str, Any], slots: Any, **more: Any) -> Any:
        """A call that writes the pool. Returns ``o [tokens, HV, V]``."""
        records = more.pop("records", None)
        given = self.given({**x, "state_indices": slots, **more})
        if records is not None:
            given["records"] = records
        o, self.pool, *rest = getattr(kdacore, self.op)(
            **given, **OPTIONS, initial_state=self.pool, backend="reference"
        )
        if rest:
            (self.records,) = rest
        return to_float64(o)[0]

    def verify(self, x: dict[str, Any], slots: Any, rows: Any) -> Any:
        """Candidates, behind those of the call before that were accepted."""
        return self.call(x, slots, records=self.records, record_indices=rows, num_replayed=self.accepted)

    def commit(self, slots: Any, rows: Any, **more: Any) -> None:
        given = self.given(
            {"state_indices": slots, "record_indices": rows, "num_replayed": self.accepted, **more}
        )
        self.pool = kdacore.commit_records(
            self.pool, records=self.records, null_index=0, backend="reference", **given
        )

    def states(self) -> Any:
        return to_float64(self.pool)


SLOT = np.array([3, 5, 1, 0, 7], np.int32)
"""Of the sequences; the fourth has none."""
ROW = np.array([4, 2, -1, 1, 3], np.int32)
"""The third sequence does not speculate."""


def round_of_tokens(rng: Any, op: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """For each sequence the tokens that are verified, those of them that come true, and how many these are."""
    drafts, true = [], []
    accepted = np.zeros(N, np.int32)
    for n in range(N):
        count = 1 if ROW[n] < 0 else int(rng.integers(1, MOST + 1))
        x = tokens(rng, op, count)
        accepted[n] = int(rng.integers(1, count + 1))
        drafts.append(x)
        true.append({name: a[:, : accepted[n]] for name, a in x.items()})
    return drafts, true, accepted


def decode(server: Server, true: list[dict[str, Any]]) -> list[Any]:
    """The tokens that came true, one at a time. Returns ``o`` of each sequence."""
    outputs: list[list[Any]] = [[] for _ in true]
    for t in range(MOST):
        there = [n for n in range(N) if true[n]["q"].shape[1] > t]
        if there:
            x = joined([{name: a[:, t : t + 1] for name, a in true[n].items()} for n in there])
            for n, o in zip(there, server.call(x, SLOT[there]), strict=True):
                outputs[n].append(o)
    return [np.stack(o) for o in outputs]


STEPS = {"numpy": 250, "torch": 60, "jax": 4}


@pytest.mark.first_cases(2)
@pytest.mark.jax_later
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("op", OPS)
def test_float32_states_are_those_of_plain_decoding(op: str, kind: str) -> None:
    by_records, plain = Server(op, kind), Server(op, kind)
    rng = np.random.default_rng(1)
    for _ in range(STEPS[kind]):
        drafts, true, accepted = round_of_tokens(rng, op)
        o = by_records.verify(joined(drafts), SLOT, ROW)
        want = decode(plain, true)
        first = 0
        for n in range(N):
            np.testing.assert_array_equal(o[first : first + accepted[n]], want[n])
            first += drafts[n]["q"].shape[1]
        by_records.accepted = accepted
    by_records.commit(SLOT, ROW)
    np.testing.assert_array_equal(by_records.states()[1:], plain.states()[1:])
    assert np.isnan(by_records.states()[0]).all()


@pytest.mark.first_cases(2)
@pytest.mark.jax_later
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("op", OPS)
def test_bfloat16_states_are_those_of_writing_each(op: str, kind: str) -> None:
    """A server that keeps the state after each candidate in a slot of its own starts from that of the last accepted."""
    by_records, by_states = Server(op, kind, "bfloat16"), Server(op, kind, "bfloat16")
    first = by_states.pool
    by_states.pool = to_kind(np.full((1 + N * (MOST + 1), HV, K, V), np.nan), kind, "bfloat16")
    table = 1 + np.arange(N * (MOST + 1)).reshape(N, MOST + 1)
    table[SLOT == 0] = 0
    start = to_float64(by_states.pool)
    start[table[:, 0]] = to_float64(first)[SLOT]
    by_states.pool = to_kind(start, kind, "bfloat16")
    where = table[:, 0].copy()
    rng = np.random.default_rng(2)
    for _ in range(STEPS[kind]):
        drafts, _, accepted = round_of_tokens(rng, op)
        x = joined(drafts)
        o = by_records.verify(x, SLOT, ROW)
        free = np.array([[row for row in table[n] if row != where[n] or not row][:MOST] for n in range(N)])
        np.testing.assert_array_equal(o, by_states.call(x, where.astype(np.int32), write_indices=free))
        where = free[np.arange(N), accepted - 1]
        by_records.accepted = accepted
    by_records.commit(SLOT, ROW)
    kept = SLOT != 0
    np.testing.assert_array_equal(by_records.states()[SLOT[kept]], by_states.states()[where[kept]])


@pytest.mark.jax_later
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", STEPS)
def test_replaying_in_a_call_is_to_commit_before_it(kind: str, state_dtype: str) -> None:
    op = "fused_recurrent_kda"
    once, twice = (Server(op, kind, state_dtype) for _ in range(2))
    rng = np.random.default_rng(3)
    for _ in range(3):
        drafts, _, accepted = round_of_tokens(rng, op)
        x = joined(drafts)
        got = once.verify(x, SLOT, ROW)
        twice.commit(SLOT, ROW)
        twice.accepted = np.zeros(N, np.int32)
        np.testing.assert_array_equal(got, twice.verify(x, SLOT, ROW))
        np.testing.assert_array_equal(once.states()[1:], twice.states()[1:])
        for a, b in zip(once.records, twice.records, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
        once.accepted = twice.accepted = accepted


def test_the_state_and_the_records_stay_but_for_the_replay() -> None:
    """A call without a replay leaves every bit of the pool of sequences with records; rows and records of no sequence
    stay too."""
    server = Server("fused_recurrent_kda", "numpy")
    before, kept = server.pool.copy(), [x.copy() for x in server.records]
    drafts, _, _ = round_of_tokens(np.random.default_rng(4), server.op)
    server.verify(joined(drafts), SLOT, ROW)
    plain = SLOT[2]
    for row in range(SLOTS):
        same = server.pool[row].tobytes() == before[row].tobytes()
        assert same == (row != plain), row
    for x, was in zip(server.records, kept, strict=True):
        for row in range(ROWS):
            written = {int(ROW[n]): drafts[n]["q"].shape[1] for n in (0, 1, 4)}.get(row, 0)
            assert (
                not np.isnan(x[row, :written]).any()
                and x[row, written:].tobytes() == was[row, written:].tobytes()
            )


def test_a_replayed_state_may_go_to_another_row() -> None:
    """That of the call, and of a commit, is written to ``write_indices`` with nothing to replay too."""
    op = "fused_recurrent_kda"
    moved, plain = Server(op, "numpy"), Server(op, "numpy")
    goals = np.array([2, 6, 4, 3, -1], np.int32)
    for server, more in ((moved, {"write_indices": goals}), (plain, {})):
        rng = np.random.default_rng(5)
        drafts, _, accepted = round_of_tokens(rng, op)
        server.verify(joined(drafts), SLOT, ROW)
        server.accepted = np.where(np.arange(N) == 1, 0, accepted).astype(np.int32)
        server.commit(SLOT, ROW, **more)
    old, new = plain.pool, moved.pool
    assert new[2].tobytes() == old[3].tobytes() and new[6].tobytes() == old[5].tobytes()
    start = Server(op, "numpy").pool
    assert all(new[row].tobytes() == start[row].tobytes() for row in (3, 4, 5, 7))


def test_a_fresh_sequence_replays_upon_zeros() -> None:
    server = Server("fused_recurrent_kda", "numpy")
    rng = np.random.default_rng(6)
    x = joined([tokens(rng, server.op, 2) for _ in range(N)])
    fresh = np.array([False, True, True, True, True])
    old = server.pool.copy()
    server.call(x, SLOT, records=server.records, record_indices=ROW, has_initial_state=fresh)
    assert not server.pool[SLOT[0]].any()  # it starts from zeros, and the row holds what it starts from
    assert server.pool[SLOT[1]].tobytes() == old[SLOT[1]].tobytes()
