"""Calls with records of candidates, and servers that make them, for the tests in the emulator and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, Draw, error, request_of
from pool_checks import pool_of, same_bits

from kdacore.contract.state_rows import ZEROS
from kdacore.types import CommitInputs, RecurrentInputs, Request
from kdacore_cuda.forms.commit.forward import commit_records
from kdacore_cuda.forms.recurrent import forward as recurrent

NAN = float("nan")
KDA, GDN = "fused_recurrent_kda", "fused_recurrent_gated_delta_rule"
TOKENS = ("q", "k", "v", "g", "beta")
PARTS = ("record_update", "record_key", "record_decay")
OPTIONS: dict[str, Any] = {"inplace_state": True, "output_final_state": True, "null_index": 0}


def options_of(op: str, **more: Any) -> dict[str, Any]:
    return (MODEL if op == GDN else BOUNDED_MODEL) | OPTIONS | more


def gate_of(op: str, d: Draw, HV: int, K: int) -> dict[str, torch.Tensor]:
    """The parameters of the gate."""
    bias = (HV,) if op == GDN else (HV, K)
    return {"A_log": torch.log(1 + 15 * d.uniform(HV)), "dt_bias": d.normal(*bias, dtype=torch.float32)}


def tokens_of(op: str, d: Draw, B: int, T: int, H: int, HV: int, K: int) -> dict[str, torch.Tensor]:
    g = (HV,) if op == GDN else (HV, K)
    return {
        "q": d.normal(B, T, H, K),
        "k": d.normal(B, T, H, K),
        "v": d.normal(B, T, HV, K),
        "g": d.normal(B, T, *g),
        "beta": d.normal(B, T, HV),
    }


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN between any two of them, axes in another order."""
    memory = torch.full((*x.shape[::-1], 3), NAN, dtype=x.dtype)
    view = memory[..., 1].permute(*reversed(range(x.ndim)))
    return view.copy_(x)


def records_of(
    op: str, d: Draw, rows: int, n: int, H: int, HV: int, K: int, strided: bool = False
) -> dict[str, torch.Tensor]:
    """Records as decoding leaves them."""
    wide = torch.float32
    parts = {
        "record_update": 0.3 * d.normal(rows, n, HV, K, dtype=wide),
        "record_key": d.normal(rows, n, H, K, dtype=wide) / K**0.5,
        "record_decay": d.uniform(rows, n, HV, *(() if op.endswith("rule") else (K,))),
    }
    return {name: apart(x) for name, x in parts.items()} if strided else parts


def poison_records(rows: Any, inputs: Any) -> None:
    """NaN in all records that are not to be read. ``rows``: the call's rows, by value."""
    read = torch.zeros(inputs.record_update.shape[:2], dtype=torch.bool)
    for row, count in zip(rows.records, rows.replayed, strict=True):
        if row != ZEROS:
            read[row, :count] = True
    for name in PARTS:
        getattr(inputs, name)[~read] = NAN


def effects(update: Any, key: Any) -> Any:
    """What records add to a state, ``[..., HV, K, V]``: a factor of one may stand with the other."""
    key = np.repeat(key, update.shape[-2] // key.shape[-2], axis=-2)
    return key[..., :, None] * update[..., None, :]


def check_records(rows: Any, lengths: Any, before: Any, after: Any, want: Any) -> None:
    """Those that a call wrote, with ``want``: the oracle's update, key and decay; the others have their bits."""
    written = np.zeros(before["record_update"].shape[:2], bool)
    for row, length in zip(rows.records, lengths, strict=True):
        if row != ZEROS:
            written[row, :length] = True
    for name in PARTS:
        assert same_bits(after[name][~written], before[name][~written])
    if written.any():
        update, key, decay = (x[written] for x in want)
        got = after["record_update"][written].numpy(), after["record_key"][written].numpy()
        assert error(effects(*got), effects(update, key)) < O_BOUND
        assert error(after["record_decay"][written], decay) < O_BOUND


def commit_request(inputs: CommitInputs, v_first: bool = False) -> Request:
    return request_of("commit_records", inputs, state_v_first=v_first, null_index=0)


N, MOST, ROWS = 4, 3, 5
SLOT = torch.tensor([3, 5, 1, 0])
"""Of the sequences; the last has none."""
ROW = torch.tensor([4, 2, -1, 1])
"""The third sequence does not speculate."""


@dataclasses.dataclass
class Server:
    """States in a pool, with records of candidates beside it."""

    op: str
    state_dtype: torch.dtype = torch.float32
    v_first: bool = False
    K: int = 64
    H: int = 1
    HV: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        d = Draw(7, device=self.device)
        self.gate = gate_of(self.op, d, self.HV, self.K)
        self.pool = pool_of(6, self.K, self.state_dtype, HV=self.HV).contiguous().to(self.device)
        self.pool[0] = NAN
        parts = records_of(self.op, d, ROWS, MOST, self.H, self.HV, self.K)
        self.records = {name: torch.full_like(x, NAN) for name, x in parts.items()}
        self.accepted = torch.zeros(N, dtype=torch.int32, device=self.device)
        self.slot, self.row = SLOT.to(self.device), ROW.to(self.device)
        self.options = options_of(self.op, state_v_first=self.v_first)

    def call(self, x: dict[str, torch.Tensor], slots: torch.Tensor, **more: Any) -> torch.Tensor:
        """A call that writes the pool. Returns ``o [tokens, HV, V]``."""
        inputs = RecurrentInputs(**x, **self.gate, initial_state=self.pool, state_indices=slots, **more)
        return recurrent.forward(request_of(self.op, inputs, **self.options), inputs).o.flatten(0, 1)

    def verify(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        """Candidates, behind those of the call before that were accepted."""
        given = {**self.records, "record_indices": self.row, "num_replayed": self.accepted}
        return self.call(x, self.slot, **given)

    def commit(self) -> None:
        given = {**self.records, "record_indices": self.row, "num_replayed": self.accepted}
        inputs = CommitInputs(initial_state=self.pool, state_indices=self.slot, **given)
        commit_records(commit_request(inputs, self.v_first), inputs)

    def accept(self, counts: list[int]) -> None:
        """So many of the candidates of each sequence."""
        self.accepted = torch.tensor(counts, dtype=torch.int32, device=self.device)

    def tokens(self, rng: np.random.Generator) -> list[dict[str, torch.Tensor]]:
        """Candidates of each sequence, one of those that do not speculate."""
        counts = [1 if row < 0 else int(rng.integers(1, MOST + 1)) for row in ROW]
        d = Draw(int(rng.integers(2**31)), device=self.device)
        return [tokens_of(self.op, d, 1, count, self.H, self.HV, self.K) for count in counts]


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tokens one after another in a pack."""
    lengths = [x["q"].shape[1] for x in parts]
    pack = {name: torch.cat([x[name] for x in parts], 1) for name in TOKENS}
    return {**pack, "cu_seqlens": torch.from_numpy(np.cumsum([0, *lengths])).int().to(pack["q"].device)}


def decode(server: Server, true: list[dict[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The tokens that came true, one at a time, each in a batch. Returns ``o`` of each sequence."""
    outputs: list[list[torch.Tensor]] = [[] for _ in true]
    for t in range(MOST):
        there = [n for n in range(N) if true[n]["q"].shape[1] > t]
        if there:
            x = {name: torch.cat([true[n][name][:, t : t + 1] for n in there]) for name in TOKENS}
            for n, o in zip(there, server.call(x, server.slot[there]), strict=True):
                outputs[n].append(o)
    return outputs


def check_plain_decoding(steps: int, by_records: Server, plain: Server) -> None:
    """``plain`` decodes the tokens that came true, one at a time: the same outputs and, in float32, states."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        drafts = by_records.tokens(rng)
        counts = [x["q"].shape[1] for x in drafts]
        accepted = [int(rng.integers(1, count + 1)) for count in counts]
        o = by_records.verify(joined(drafts)).split(counts)
        true = [{name: x[name][:, :m] for name in TOKENS} for x, m in zip(drafts, accepted, strict=True)]
        for n, want in enumerate(decode(plain, true)):
            assert same_bits(o[n][: accepted[n]], torch.stack(want))
        by_records.accept(accepted)
    by_records.commit()
    assert same_bits(by_records.pool, plain.pool)


def check_writing_each(steps: int, by_records: Server, by_states: Server) -> None:
    """``by_states`` keeps the state after each candidate in a slot of its own, and starts from that of the last
    accepted."""
    table = 1 + torch.arange(N * (MOST + 1)).view(N, MOST + 1)
    table[SLOT == 0] = 0
    first = by_states.pool
    by_states.pool = first.new_full((1 + table.numel(), *first.shape[1:]), NAN)
    by_states.pool[table[:, 0]] = first[SLOT]
    where = table[:, 0].clone()
    rng = np.random.default_rng(2)
    for _ in range(steps):
        drafts = by_records.tokens(rng)
        x = joined(drafts)
        o = by_records.verify(x)
        free = torch.stack(
            [row[row != at][:MOST] if at else row[:MOST] for row, at in zip(table, where, strict=True)]
        )
        assert same_bits(o, by_states.call(x, where.to(x["q"].device), write_indices=free.to(x["q"].device)))
        accepted = torch.tensor([int(rng.integers(1, x["q"].shape[1] + 1)) for x in drafts])
        where = free[torch.arange(N), accepted - 1]
        by_records.accept(accepted.tolist())
    by_records.commit()
    kept = SLOT != 0
    assert same_bits(by_records.pool[SLOT[kept]], by_states.pool[where[kept]])
