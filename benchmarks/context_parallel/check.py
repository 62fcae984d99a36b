"""Is what ranks compute right? Against the float64 oracle on short rows, and against one GPU's call on long ones."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.context_parallel.ranks import Rank
from benchmarks.context_parallel.rows import (
    SHARED,
    TOKENS,
    RowCase,
    output_gradients,
    results,
    slice_of,
    whole,
)
from kdacore.bench import arrays as made
from kdacore.calls.requests import request_with
from kdacore.selfcheck.check import relative_error
from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_reference.oracle import oracle_backward, oracle_forward, to_float64

BOUNDS = {"o": 4.5e-3, "final_state": 3.3e-3}
GRADIENT_BOUND = 8e-3
"""The contract's, of 16-bit inputs. Twice that is allowed: short rows, and two computations beside each other."""


def short_rows(op: str) -> list[RowCase]:
    """Rows for the oracle, whose parts divide by 2, 4 and 8 ranks. Packs have sequences that skip no rank, that have
    several, empty ones, and padding at the end."""
    cases = [RowCase(op, 1536, 2), RowCase(op, 1536, 2, (0, 100, 900, 0, 17, 301, 0, 90))]
    return cases + [RowCase(op, 768, 2, gate="softplus")] * (op == "kda")


def check(rank: Rank, case: RowCase, against: str) -> dict[str, float]:
    """Relative errors by the name of a result, the largest over ranks.

    Args:
        rank: this one.
        case: the row.
        against: ``oracle``, or ``one GPU``.

    Raises AssertionError where one is beyond twice its bound, and farther from the oracle than one GPU's call is.
    """
    x = whole(case, rank.device, "init", states=True)
    do, d_final = output_gradients(case, x)
    if case.lengths:
        do[:, sum(case.lengths) :] = 0
    T = case.T // rank.size
    mine = slice_of(x, rank.rank, rank.size)
    shares = rank.rank == 0  # gradients that reach copies of the final states are added up
    got = results(
        case, mine, do[:, rank.rank * T : (rank.rank + 1) * T].contiguous(),
        d_final if shares else torch.zeros_like(d_final), rank.cp,
    )  # fmt: skip
    for name in SHARED:
        if f"d{name}" in got:
            got[f"d{name}"] = rank.total(got[f"d{name}"])
    want = of_oracle(case, x, do, d_final) if against == "oracle" else results(case, x, do, d_final)
    rows = slice(rank.rank * T, (rank.rank + 1) * T)
    found = {}
    for name, value in got.items():
        exact = want[name]
        if name.removeprefix("d") in TOKENS or name == "o":
            exact = exact[:, rows]
        size = _norm(exact) if name.removeprefix("d") in TOKENS else 1.0
        # Of a rank without tokens of its own all gradients are zero.
        found[name] = relative_error(to_float64(value), to_float64(exact)) if size else float(_norm(value))
    worst = {name: max(each[name] for each in rank.exchange(found)) for name in found}
    late = {n: e for n, e in worst.items() if not e < 2 * BOUNDS.get(n, GRADIENT_BOUND)}
    if late and against == "oracle":
        # Sums that nearly cancel, A_log's gradient of few heads above all: as near as the whole call on one GPU.
        one = results(case, x, do, d_final)
        whole_call = {n: relative_error(to_float64(one[n]), to_float64(want[n])) for n in late}
        late = {n: (e, whole_call[n]) for n, e in late.items() if not e < 1.1 * whole_call[n]}
    if late:
        raise AssertionError(f"{case.name} against {against}: {late}")
    return worst


def _norm(x: Any) -> float:
    return float((to_float64(x) ** 2).sum() ** 0.5)


def of_oracle(case: RowCase, x: dict[str, Any], do: torch.Tensor, d_final: torch.Tensor) -> dict[str, Any]:
    """What the float64 recurrence gives, by name."""
    host = {n: v.cpu() for n, v in x.items()}
    inputs = ChunkInputs(**{n: host.get(n) for n in ChunkInputs._fields})
    request = request_with(case.case.op, {**host, **made.options(case.case)})
    out = oracle_forward(request, inputs)
    grads = oracle_backward(request, inputs, OutputGrads(do.cpu(), d_final.cpu()))
    named = {f"d{n}": g for n, g in zip(InputGrads._fields, grads, strict=True) if g is not None}
    return {"o": out.o, "final_state": out.final_state} | named
