"""Calls of the fused decode ops with candidates by records, and servers that make them, for tests in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from decode_calls import KDA, NAN, decode_inputs, decode_request
from record_calls import PARTS, commit_request

from kdacore.types import CommitInputs, DecodeInputs
from kdacore_cuda.forms.commit.forward import commit_records
from kdacore_cuda.forms.decode import forward as decode

IN_PLACE: dict[str, Any] = {"inplace_state": True, "output_final_state": True, "null_index": 0}
LENGTHS = (3, 1, 4, 0, 2, 3)


def candidates(
    op: str = KDA, *, windows: bool = False, n: int = 4, lengths: tuple[int, ...] = LENGTHS, **more: Any
) -> DecodeInputs:
    """Six sequences: replays of all, no and some records, one without tokens; the fifth has no row of records, the
    last no slot. ``windows``: those of candidates go to an array of their own, else behind one another."""
    index = more.pop("index", torch.int64)
    given: dict[str, Any] = {
        "H": 1,
        "K": 64,
        "slots": 8,
        "columns": 3 if windows else 2 + n,
        "records": n,
        "state_indices": torch.tensor([3, 5, 1, 7, 2, 0], dtype=index),
        "record_indices": torch.tensor([4, 2, 6, 1, -1, 3], dtype=index),
        "num_replayed": torch.tensor([n, 0, n - 1, 1, 2, 1], dtype=index),
    }
    inputs = decode_inputs(op, lengths=lengths, **(given | more))
    if windows:
        kept = torch.randn(8, n, 3, inputs.x.shape[2], generator=torch.Generator().manual_seed(1))
        inputs = inputs._replace(conv_windows=kept.bfloat16())
    return inputs


def launched(emulated: list[str]) -> list[str]:
    """The kernels of a call, by name."""
    return [name.partition("-")[0] for name in emulated[: len(emulated) // 2]]  # and the shorter way


MOST, TOKENS = 3, 30
SLOT, ROW = torch.tensor([2, 4, 1]), torch.tensor([1, 3, -1])
"""Of three sequences; the last does not speculate."""


class Server:
    """A call takes some tokens of each sequence from where it is; pools and records go from call to call."""

    def __init__(
        self, op: str, state_dtype: torch.dtype = torch.float32, v_first: bool = False, **sizes: Any
    ) -> None:
        self.op, self.v_first = op, v_first
        given = {"H": 1, "HV": 2, "K": 64, "slots": 5, "columns": 2 + MOST, "records": MOST} | sizes
        inputs = decode_inputs(op, 3, TOKENS, state_dtype=state_dtype, state_indices=SLOT, **given)
        inputs.initial_state[0] = NAN
        for name in PARTS:
            getattr(inputs, name).fill_(NAN)
        self.inputs = inputs._replace(initial_state=inputs.initial_state.contiguous())

    def call(self, at: list[int], counts: list[int], **more: Any) -> tuple[torch.Tensor, ...]:
        """``counts`` tokens of each sequence from token ``at`` on. Returns the outputs of each."""
        packs = {
            name: torch.cat(
                [row[a : a + c] for row, a, c in zip(getattr(self.inputs, name), at, counts, strict=True)]
            )[None]
            for name in ("x", "g", "beta", "z")
        }
        x = self.inputs._replace(**packs, cu_seqlens=torch.tensor([0, *np.cumsum(counts)]), **more)
        if "record_indices" not in more:
            x = x._replace(**dict.fromkeys(PARTS))
        request = decode_request(self.op, x, state_v_first=self.v_first, **IN_PLACE)
        return decode.forward(request, x).o[0].split(counts)

    def verify(self, at: list[int], counts: list[int], replayed: list[int]) -> tuple[torch.Tensor, ...]:
        return self.call(at, counts, record_indices=ROW, num_replayed=torch.tensor(replayed))

    def commit(self, replayed: list[int]) -> None:
        inputs = CommitInputs(
            initial_state=self.inputs.initial_state,
            conv_state=self.inputs.conv_state,
            state_indices=SLOT,
            record_indices=ROW,
            num_replayed=torch.tensor(replayed),
            **{name: getattr(self.inputs, name) for name in PARTS},
        )
        commit_records(commit_request(inputs, self.v_first), inputs)


def draw_counts(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Candidates of each sequence, and how many of them come true."""
    counts = [1 if row < 0 else int(rng.integers(1, MOST + 1)) for row in ROW]
    return counts, [int(rng.integers(1, count + 1)) for count in counts]
