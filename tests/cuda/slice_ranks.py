"""Ranks played one after another in one process: a whole row cut into slices, each served by the cuda backend's
functions for slices, and the states between them folded in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from cuda_calls import request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices

TOKENS = ("q", "k", "v", "g", "beta")


def op_of(inputs: ChunkInputs) -> str:
    """The op that a call's gate belongs to."""
    return "chunk_gated_delta_rule" if inputs.g.ndim == 3 else "chunk_kda"


class Rank(NamedTuple):
    """One rank's part of a call."""

    request: Request
    inputs: ChunkInputs
    number: int
    T: int
    offsets: torch.Tensor | None
    """Of the whole pack."""

    @property
    def rows(self) -> slice:
        """Of the whole row."""
        return slice(self.number * self.T, (self.number + 1) * self.T)

    def part_with(self, token: int) -> int | None:
        """The sequence that has this token of the whole row."""
        assert self.offsets is not None
        bounds = self.offsets.tolist()
        found = [n for n in range(len(bounds) - 1) if bounds[n] <= token < bounds[n + 1]]
        return found[0] if found else None


class Row:
    """A call on a whole row, and the same call on ``ranks`` slices of it."""

    def __init__(self, inputs: ChunkInputs, ranks: int, kept: bool = False, **options: Any) -> None:
        """``kept``: backwards get what forwards keep for them; else they compute it again."""
        self.whole, self.kept, self.options = inputs, kept, options
        T = inputs.q.shape[1] // ranks
        assert T * ranks == inputs.q.shape[1]
        self.T = T
        cu = inputs.cu_seqlens
        self.N = inputs.q.shape[0] if cu is None else len(cu) - 1
        HV = inputs.v.shape[2]
        self.initial = torch.zeros(self.N, HV, 128, 128, device=inputs.q.device)
        if inputs.initial_state is not None:
            given = inputs.initial_state.float()
            self.initial = given.mT if options.get("state_v_first") else given
        local_options = options | {"state_v_first": False}
        self.ranks = []
        for r in range(ranks):
            tokens = {n: getattr(inputs, n)[:, r * T : (r + 1) * T] for n in TOKENS}
            local = inputs._replace(
                **tokens,
                initial_state=self.initial,
                cu_seqlens=None if cu is None else (cu - r * T).clamp(0, T),
            )
            request = request_of(op_of(inputs), local, **local_options)
            if request.device.type == "cpu":
                request = dataclasses.replace(
                    request, device=dataclasses.replace(request.device, arch="sm_90")
                )
            request = dataclasses.replace(request, needs_grad=kept)
            self.ranks.append(
                Rank(request, local._replace(initial_state=None), r, T, None if cu is None else cu.cpu())
            )

    def forward(self) -> list[tuple[Outputs, torch.Tensor]]:
        """Of every rank: its results and the states that its parts start from."""
        begun = [chunk_forward_slices.begin(r.request, r.inputs, None) for r in self.ranks]
        self.transitions = [x.M for x in begun]
        found, carried = [], self.initial.double()
        self.leaving_ends = []
        for rank, x in zip(self.ranks, begun, strict=True):
            starts = carried.float()
            found.append((chunk_forward_slices.finish(rank.request, rank.inputs, x.pending, starts), starts))
            after = x.M.double() @ self.parts(carried, rank, -1) + x.C.double()
            carried = self.replaced(carried, rank, -1, after)
        return found

    def parts(self, states: torch.Tensor, rank: Rank, end: int) -> torch.Tensor:
        """States of the part that has the slice's first (end 0) or last (-1) token."""
        if rank.offsets is None:
            return states
        n = rank.part_with(rank.rows.start if end == 0 else rank.rows.stop - 1)
        return states[n : n + 1] if n is not None else torch.zeros_like(states[:1])

    def replaced(self, states: torch.Tensor, rank: Rank, end: int, new: torch.Tensor) -> torch.Tensor:
        if rank.offsets is None:
            return new
        n = rank.part_with(rank.rows.start if end == 0 else rank.rows.stop - 1)
        if n is None:
            return states
        states = states.clone()
        states[n : n + 1] = new
        return states

    def ends_here(self, rank: Rank) -> torch.Tensor:
        """Of each sequence: whether its last token is the rank's; of an empty one, whether the rank is the first."""
        if rank.offsets is None:
            return torch.full((self.N,), rank.number == len(self.ranks) - 1)
        first, last = rank.offsets[:-1], rank.offsets[1:]
        inside = (last > rank.rows.start) & (last <= rank.rows.stop)
        return torch.where(first == last, torch.tensor(rank.number == 0), inside)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``o`` of the whole row, and all final states, K first and float32."""
        found = self.forward()
        o = torch.cat([x.o for x, _ in found], 1)
        if not self.ranks[0].request.output_final_state:
            return o, None
        final = torch.zeros_like(self.initial)
        for rank, (x, _) in zip(self.ranks, found, strict=True):
            here = self.ends_here(rank)
            assert x.final_state is not None
            final[here] = x.final_state[here]
        return o, final

    def gradients(self, grads: OutputGrads) -> InputGrads:
        """Of the whole row's inputs; that of the initial states is K first and float32."""
        forwards = self.forward()
        starts = [s for _, s in forwards]
        saved = [outputs.saved for outputs, _ in forwards]
        assert all(bool(x) == (self.kept and self.whole.cu_seqlens is None) for x in saved)
        d_final = torch.zeros_like(self.initial)
        if grads.final_state is not None:
            d_final = grads.final_state.mT if self.options.get("state_v_first") else grads.final_state
            d_final = d_final.float()
        begun = []
        for rank, start, own_saved in zip(self.ranks, starts, saved, strict=True):
            mine = torch.where(self.ends_here(rank)[:, None, None, None].to(d_final.device), d_final, 0.0)
            own = OutputGrads(
                None if grads.o is None else grads.o[:, rank.rows],
                None if grads.final_state is None else mine,
            )
            known, pending = chunk_backward_slices.backward_begin(
                rank.request, rank.inputs, own_saved, own, start, None
            )
            begun.append((own, mine, known, pending))
        found = [None] * len(self.ranks)
        carried = torch.zeros_like(self.initial, dtype=torch.float64)  # of the state at the next rank's start
        d_initial = torch.zeros_like(self.initial)
        for r in reversed(range(len(self.ranks))):
            rank, start = self.ranks[r], starts[r]
            own, mine, known, pending = begun[r]
            ends = mine.double() + carried
            got = chunk_backward_slices.backward_finish(
                rank.request, rank.inputs, saved[r], pending, own, start, ends.float()
            )
            found[r] = got
            # What reaches the start: by this rank alone, and through its transition from what is behind.
            through = known.double()
            if rank.offsets is None:
                through = through + self.transitions[r].double().mT @ carried
            elif rank.part_with(rank.rows.start) is not None and rank.part_with(
                rank.rows.start
            ) == rank.part_with(rank.rows.stop - 1):
                through = through + self.transitions[r].double().mT @ self.parts(carried, rank, -1)
            self.check_start(rank, got, through)
            d_initial = self.add_begun(d_initial, rank, got, ends)
            carried = self.crossing(rank, through)
        fields: dict[str, Any] = {n: torch.cat([getattr(x, n) for x in found], 1) for n in TOKENS}
        for name in ("A_log", "dt_bias"):
            parts = [getattr(x, name) for x in found]
            fields[name] = None if parts[0] is None else sum(p.float() for p in parts)
        return InputGrads(**fields, initial_state=d_initial)

    def check_start(self, rank: Rank, got: InputGrads, through: torch.Tensor) -> None:
        """The gradient at the slice's start that the composed maps give is the one that the scan gives."""
        assert got.initial_state is not None
        mine = self.parts(got.initial_state, rank, 0).double()
        if rank.offsets is None or rank.part_with(rank.rows.start) is not None:
            size = through.norm() or 1.0
            assert (mine - through).norm() < 8e-3 * size, ((mine - through).norm(), size)

    def add_begun(
        self, d_initial: torch.Tensor, rank: Rank, got: InputGrads, ends: torch.Tensor
    ) -> torch.Tensor:
        """With the gradients of the initial states of sequences that begin here; of empty ones, on the first rank."""
        assert got.initial_state is not None
        if rank.offsets is None:
            begins = torch.full((self.N,), rank.number == 0)
        else:
            first, last = rank.offsets[:-1], rank.offsets[1:]
            inside = (first >= rank.rows.start) & (first < rank.rows.stop)
            begins = torch.where(first == last, torch.tensor(rank.number == 0), inside)
        return torch.where(begins[:, None, None, None].to(ends.device), got.initial_state, d_initial)

    def crossing(self, rank: Rank, through: torch.Tensor) -> torch.Tensor:
        """Gradients of the states that the rank before hands on."""
        zero = torch.zeros_like(self.initial, dtype=torch.float64)
        if rank.offsets is None:
            return through
        if rank.number == 0:
            return zero
        n, before = rank.part_with(rank.rows.start), rank.part_with(rank.rows.start - 1)
        if n is None or n != before:
            return zero
        zero[n] = through[0]
        return zero
