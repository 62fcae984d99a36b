"""Candidates by records on Triton: bit for bit what plain decoding computes, and ``commit_records``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decode_inputs import (
    DEVICE,
    GDN,
    KDA,
    MODEL,
    NAN,
    PARTS,
    UNBOUNDED,
    apart,
    check,
    copied,
    draw,
    error,
    on,
    request_of,
    run,
    same_bits,
)

from kdacore.oracle.commit import oracle_commit
from kdacore.oracle.host_values import to_float64
from kdacore.types import CommitInputs, RecurrentInputs
from kdacore_triton import commit

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
RECURRENT = {"fused_recurrent_kda": KDA, "fused_recurrent_gated_delta_rule": GDN}
OPTIONS = {KDA: MODEL, GDN: UNBOUNDED}


def recurrent_call(op: str, *sizes: Any, **more: Any) -> RecurrentInputs:
    """The call of a recurrent op with what a fused one convolves."""
    x = draw(RECURRENT[op], *sizes, taps=0, gated=False, **more)
    H = x.record_key.shape[2]
    HV = x.beta.shape[2]
    V = x.record_update.shape[3]
    keys = (x.x.shape[2] - HV * V) // 2
    q, k, v = (
        part.unflatten(-1, (heads, -1))
        for part, heads in zip(x.x.split((keys, keys, HV * V), -1), (H, H, HV), strict=True)
    )
    shared = {name: getattr(x, name) for name in RecurrentInputs._fields if name in x._fields}
    return RecurrentInputs(q=q, k=k, v=v, **shared)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("HV", "V"), [(2, 16), (6, 40)])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
def test_the_recurrent_ops(op: str, v_first: bool, HV: int, V: int, state: torch.dtype) -> None:
    x = recurrent_call(
        op, (3, 1, 4, 2, 0), HV=HV, V=V, records=4, slots=[3, 5, 1, 0, 2], v_first=v_first, state=state
    )
    x.record_indices.copy_(torch.tensor([4, 2, -1, 1, 3]))
    x.num_replayed.copy_(torch.tensor([4, 0, 2, 1, 3]))
    check(op, x, state_v_first=v_first, **OPTIONS[RECURRENT[op]])


def test_rows_of_another_pool() -> None:
    op = "fused_recurrent_kda"
    x = recurrent_call(op, 5, T=2, records=4, slots=[3, 5, 1, 0, 2])
    more = {"write_pool": torch.randn(7, 2, 16, 16), "write_indices": torch.tensor([6, 2, -1, 4, 1])}
    more["has_initial_state"] = torch.tensor([True, False, True, True, True])
    x.num_replayed.copy_(torch.tensor([0, 0, 2, 1, 3]))
    check(op, x._replace(**more), output_final_state=True, **MODEL)


# --- bits --------------------------------------------------------------------------------------------------------

N, MOST = 3, 3
SLOT = torch.tensor([2, 4, 1], dtype=torch.int32)
ROW = torch.tensor([1, 0, -1], dtype=torch.int32)
"""The last sequence does not speculate."""


class Server:
    """A call of a sequence's candidates, whose pools and records go from call to call.

    Each sequence has more tokens than are served; a call takes some of them from where the sequence is.
    """

    def __init__(self, op: str, state: torch.dtype, fused: bool, seed: int) -> None:
        self.op, self.fused = op, fused
        sizes: dict[str, Any] = {
            "H": 1,
            "HV": 2,
            "state": state,
            "records": MOST,
            "seed": seed,
            "slots": SLOT.tolist(),
        }
        name = {v: k for k, v in RECURRENT.items()}[op]
        self.name = op if fused else name
        self.x = (
            draw(op, N, T=40, columns=2 + MOST, **sizes) if fused else recurrent_call(name, N, T=40, **sizes)
        )
        self.x = self.x._replace(state_indices=SLOT, record_indices=None, num_replayed=None)
        self.options = OPTIONS[op] | {"inplace_state": True}
        self.tokens = ("x", "z", "g", "beta") if fused else ("q", "k", "v", "g", "beta")

    def call(self, at: list[int], counts: list[int], **more: Any) -> list[torch.Tensor]:
        """``counts`` tokens of each sequence from token ``at`` on. Returns the outputs of each."""
        packs = {}
        for name in self.tokens:
            rows = zip(getattr(self.x, name), at, counts, strict=True)
            packs[name] = torch.cat([row[a : a + c] for row, a, c in rows])[None]
        cu = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        x = self.x._replace(**packs, cu_seqlens=cu, **more)
        if "record_indices" not in more:
            x = x._replace(record_update=None, record_key=None, record_decay=None)
        return list(run(request_of(self.name, x, **self.options), x).o[0].cpu().split(counts))


def check_bits(op: str, fused: bool, steps: int, seed: int) -> None:
    """float32 states: the outputs and states of decoding the accepted tokens one at a time."""
    speculating, plain = (Server(op, torch.float32, fused, seed) for _ in range(2))
    rng = np.random.default_rng(seed)
    at, accepted = [0] * N, [0] * N
    for _ in range(steps):
        counts = [1 if row < 0 else int(rng.integers(1, MOST + 1)) for row in ROW.tolist()]
        replayed = torch.tensor(accepted, dtype=torch.int32)
        drafts = speculating.call(at, counts, record_indices=ROW, num_replayed=replayed)
        accepted = [int(rng.integers(1, c + 1)) for c in counts]
        for t in range(max(accepted)):
            there = [int(t < a) for a in accepted]
            got = plain.call([a + t for a in at], there)
            for n in range(N):
                assert same_bits(got[n], drafts[n][t : t + there[n]])
        at = [a + m for a, m in zip(at, accepted, strict=True)]
    x = speculating.x
    inputs = CommitInputs(
        initial_state=x.initial_state, state_indices=SLOT, record_indices=ROW,
        num_replayed=torch.tensor(accepted, dtype=torch.int32), **{name: getattr(x, name) for name in PARTS},
        **({"conv_state": x.conv_state} if fused else {}),
    )  # fmt: skip
    run_commit(inputs)
    assert same_bits(x.initial_state[1:5], plain.x.initial_state[1:5])
    if fused:
        assert same_bits(x.conv_state[1:5, :, :3], plain.x.conv_state[1:5, :, :3])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("fused", [True, False])
def test_float32_states_are_those_of_plain_decoding(op: str, fused: bool) -> None:
    check_bits(op, fused, steps=3, seed=3)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("state", [torch.float16, torch.bfloat16])
def test_16_bit_states_are_those_of_writing_each(state: torch.dtype) -> None:
    by_records, by_states = (Server(KDA, state, True, 5) for _ in range(2))
    pool = by_states.x.initial_state
    table = torch.arange(5, 5 + N * MOST, dtype=torch.int32).view(N, MOST)
    wide = torch.full((5 + N * MOST, *pool.shape[1:]), NAN).to(state)
    wide[:5] = pool[:5]
    conv = {"conv_indices": SLOT, "initial_state": wide}
    reads, accepted, at = table.clone(), [0] * N, [0] * N
    reads[:, 0] = SLOT
    rng = np.random.default_rng(6)
    rows = torch.tensor([1, 0, 2], dtype=torch.int32)
    for _ in range(2):
        counts = [int(rng.integers(1, MOST + 1)) for _ in range(N)]
        replayed = torch.tensor(accepted, dtype=torch.int32)
        got = by_records.call(at, counts, record_indices=rows, num_replayed=replayed)
        before = torch.tensor([max(a, 1) for a in accepted], dtype=torch.int32)
        want = by_states.call(
            at, counts, state_indices=reads, num_accepted_tokens=before, write_indices=table, **conv
        )
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b)
        accepted = [int(rng.integers(1, c + 1)) for c in counts]
        at = [a + m for a, m in zip(at, accepted, strict=True)]
        reads = table


# --- commit_records ------------------------------------------------------------------------------------------------


def run_commit(x: CommitInputs, **options: Any) -> None:
    """The call on whatever device there is; ``x`` is written."""
    there = on(DEVICE, x)
    got = commit.commit_records(request_of("commit_records", x, **options), there)
    assert got.pool is there.initial_state and got.conv_state is there.conv_state
    for mine, its in zip(x, there, strict=True):
        if mine is not None and mine is not its:
            mine.copy_(its)


def commit_call(
    scalar: bool = False, state: torch.dtype = torch.float32, V: int = 24, H: int = 2, v_first: bool = False,
    **more: Any,
) -> CommitInputs:  # fmt: skip
    """Five states: all, no, some records; one without a row of them, one without a slot."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape, np.float32))

    K, HV, most = 20, 4, 3
    pool = normal(8, HV, *((V, K) if v_first else (K, V))).to(state)
    pool[[0, 7]] = NAN
    arrays = {
        "initial_state": pool, "state_indices": torch.tensor([3, 5, 1, 2, 0]),
        "record_update": normal(6, most, HV, V), "record_key": normal(6, most, H, K) / K**0.5,
        "record_decay": torch.sigmoid(normal(6, most, HV, *(() if scalar else (K,)))),
        "record_indices": torch.tensor([4, 2, 1, -1, 3], dtype=torch.int32),
        "num_replayed": torch.tensor([most, 0, 1, 2, 2], dtype=torch.int32),
    }  # fmt: skip
    return CommitInputs(**(arrays | more))


def check_commit(x: CommitInputs, **options: Any) -> None:
    options = {"null_index": 0} | options
    before = copied(x)
    want = oracle_commit(request_of("commit_records", before, **options), before)
    run_commit(x, **options)
    rows = x.state_indices if x.write_indices is None else x.write_indices
    written = [
        int(i)
        for n, i in enumerate(rows)
        if int(x.record_indices[n]) >= 0 and i > 0 and x.state_indices[n] > 0
    ]
    others = [i for i in range(len(x.initial_state)) if i not in written]
    bound = 2e-5 if x.initial_state.dtype == torch.float32 else 3.3e-3
    assert error(x.initial_state[written], want.pool[written]) <= bound
    assert same_bits(x.initial_state[others], before.initial_state[others])
    if x.conv_state is not None:
        np.testing.assert_array_equal(to_float64(x.conv_state), want.conv_state)


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_commit(scalar: bool, v_first: bool) -> None:
    check_commit(commit_call(scalar, v_first=v_first), state_v_first=v_first)


def test_commit_to_other_rows_of_any_strides() -> None:
    x = commit_call(H=1, V=40, write_indices=torch.tensor([6, 4, -1, 1, 2]))
    names = ("initial_state", *PARTS)
    x = x._replace(**{name: apart(getattr(x, name)) for name in names})
    check_commit(x._replace(num_replayed=torch.tensor([3, 0, 3, 0, 1, 0, 2, 0, 2, 0])[::2]))


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16])
def test_commit_of_16_bit_states(state: torch.dtype) -> None:
    check_commit(commit_call(state=state))


@pytest.mark.parametrize("windows", [False, True])
def test_commit_of_windows(windows: bool) -> None:
    """Rows are moved to the left, or take the window of the last record that is applied."""
    rng = np.random.default_rng(2)
    D = 300
    more = {"conv_state": torch.tensor(rng.standard_normal((8, D, 6), np.float32)).bfloat16()}
    if windows:
        more["conv_windows"] = torch.tensor(rng.standard_normal((6, 3, 3, D), np.float32)).bfloat16()
    check_commit(commit_call(**more))
    apart_too = {name: apart(a) for name, a in more.items()}
    check_commit(commit_call(conv_indices=torch.tensor([2, -1, 5, 3, 1]), **apart_too))
