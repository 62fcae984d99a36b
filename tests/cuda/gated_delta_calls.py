"""Emulated calls of ``chunk_gated_delta_rule`` for the tests: inputs, comparisons, orders of threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from cuda_calls import MODEL, O_BOUND, STATE_BOUND, Draw, check_outputs, oracle, request_of
from pool_checks import check_pools, same_bits
from server_model import Expected

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.forms.gated_delta import forward as gated_delta

NAN, OP = float("nan"), "chunk_gated_delta_rule"
TOKENS = ("q", "k", "v", "g", "beta")


def draw(
    T: int,
    H: int = 1,
    HV: int = 2,
    B: int = 1,
    seed: int = 0,
    gate: str = "init",
    dims: tuple[int, int] = (128, 128),
    of: torch.dtype = torch.bfloat16,
    **arrays: Any,
) -> ChunkInputs:
    """``dims``: K and V; ``of``: the dtype of 16-bit arrays."""
    d, (K, V) = Draw(seed, of), dims
    gates = {n: x if n == "A_log" else x[..., 0] for n, x in d.gate(gate, B, T, HV, 1).items()}
    q, k, v = d.normal(B, T, H, K), d.normal(B, T, H, K), d.normal(B, T, HV, V)
    return ChunkInputs(q, k, v, beta=d.normal(B, T, HV), **gates)._replace(**arrays)


def pack(
    lengths: tuple[int, ...], padding: int = 0, dtype: torch.dtype = torch.int32, **more: Any
) -> ChunkInputs:
    """Sequences of these lengths, and ``padding`` rows behind the last one."""
    offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=dtype)
    return draw(sum(lengths) + padding, seed=sum(lengths), cu_seqlens=offsets, **more)


def state(
    *shape: int, dtype: torch.dtype = torch.float32, matrix: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    return Draw(17).normal(*shape, *matrix, dtype=dtype)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return gated_delta.forward(request_of(OP, inputs, **options), inputs)


def check(inputs: ChunkInputs, loose: float = 2.0, **options: Any) -> Outputs:
    """Run, compare with the oracle, return what was computed. Short sequences: the contract's hard-case factor."""
    request = request_of(OP, inputs, output_final_state=True, **options)
    got = gated_delta.forward(request, inputs)
    check_outputs(got, oracle(request, inputs), loose)
    return got


def check_servers(inputs: ChunkInputs, **options: Any) -> Expected:
    return check_pools(gated_delta, OP, inputs, (2 * O_BOUND, 2 * STATE_BOUND), MODEL | options)


def all_same_bits(x: Outputs, y: Outputs) -> bool:
    assert x.final_state is not None and y.final_state is not None
    return same_bits(x.o, y.o) and same_bits(x.final_state, y.final_state)


def names_of(launched: list[str]) -> list[str]:
    return [name.split("-")[0] for name in launched]


def in_each_order(
    monkeypatch: pytest.MonkeyPatch, starved: Iterable[int], dispatch: Iterable[int] = ()
) -> Iterator[dict[str, int]]:
    """Have the emulator run threads and copies in two random orders, blocks in each order of ``dispatch``, and with
    each warp of ``starved`` behind all others, one after the other. Gives what is set."""
    plain = emulator.run
    settings = [{"seed": seed} for seed in range(2)]
    settings += [{"dispatch": order} for order in dispatch]
    settings += [{"starved": warp} for warp in starved]
    for given in settings:
        with monkeypatch.context() as patched:
            patched.setattr(emulator, "run", lambda *a, given=given, **k: plain(*a, **{**k, **given}))
            yield given


WAYS = {
    "before": ["chunk_records", "walk_records"],
    "beside": ["chunk_records_beside", "walk_records_beside"],
}
"""The kernels of a forward that is not cut, by when its records are made."""


def choose_records(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Calls are not cut, and have their records made so; before all walks if that is no other way of :data:`WAYS`."""
    monkeypatch.setattr(choice, "most_cut", lambda count: 0)
    monkeypatch.setattr(choice, "use_records_beside", lambda *given: way == "beside")
