"""One rank of several in a process of its own: the host time that ``cp=`` adds to a call, without a GPU.

The backend's functions of a slice only allocate, and the exchange gives back what it was given, at once. As with NCCL
the ranks do not meet on the host. ``benchmarks.host_pair`` runs this text in checkouts older than itself, so it uses
only names that those have. On a GPU every operation of torch's takes a few microseconds more;
tests/parallel/test_launches.py counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.parallel.local_ranks import LocalRanks
from kdacore.registry import REGISTRY
from kdacore.types import Backend, InputGrads, OpImpl, Outputs, Request, SliceForward, SliceFunctions

NAME = "null-slices"
_GROUP = 10**6
"""The number of a group that no other in the process has."""


class OneRank(LocalRanks):
    """A rank whose others always are at the same step, with the same numbers."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, size, rank, _GROUP + size)  # type: ignore[arg-type]
        if hasattr(self, "progress"):  # as on a GPU from the first call on
            self.progress.in_step[torch.device("cpu")] = torch.ones((), dtype=torch.bool)

    def exchange(self, x: Any) -> list[Any]:
        return [x] * self.size

    def all_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = x.contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:])).view(self.size, *x.shape)
        gathered.copy_(x)
        return lambda: gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def on_host(self, device: str) -> bool:
        return False


def _slices(r: Request) -> SliceFunctions:
    rows = 1 if r.packed else r.B
    transitions, states = torch.zeros(rows, r.HV, r.K, r.K), torch.zeros(rows, r.HV, r.K, r.V)

    def begin(request: Request, inputs: Any, leaving: Any) -> SliceForward:
        return SliceForward(torch.empty_like(transitions), torch.empty_like(states), None)

    def finish(request: Request, inputs: Any, pending: Any, starts: Any) -> Outputs:
        return Outputs(torch.empty_like(inputs.v), torch.empty_like(starts) if r.output_final_state else None)

    def backward_begin(*given: Any) -> tuple[Any, Any]:
        return torch.empty_like(states), None

    def backward_finish(
        request: Request, inputs: Any, saved: Any, pending: Any, grads: Any, starts: Any, ends: Any
    ) -> InputGrads:
        given = (*inputs[:7], starts)
        return InputGrads(*[None if x is None else torch.empty_like(x) for x in given])

    return SliceFunctions(begin, finish, backward_begin, backward_finish)


class _Plugin:
    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        op = OpImpl(_never, _never, serves=FEATURES, verified_archs=frozenset({"*"}), slices=_slices)
        return [Backend(name=NAME, version="0", kinds=("torch",), ops={"chunk_kda": op}, auto_kinds=())]


def _never(*given: Any) -> Any:
    raise RuntimeError("this backend serves slices alone")


def install() -> None:
    """Register the backend."""
    REGISTRY.register(_Plugin(), NAME)
