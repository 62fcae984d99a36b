"""How clusters share a call, on a GPU: ``python -m benchmarks.schedule_checks``.

Calls of ``chunk_kda`` in which sequences are cut where the host cannot know: dense ones with slots that are none, at
and around multiples of the clusters that run at once, and packs. Each is held against the float64 oracle on three
sequences, and made again, eagerly and by a graph, with the same bits. Then many launches of each kind of cluster, bit
by bit. Exits with 1 if anything differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import kdacore
from kdacore_cuda import choice
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.runtime import torch_launch
from kdacore_reference.oracle import to_float64

K = 128
O_BOUND, STATE_BOUND = 2 * 4.5e-3, 2 * 3.3e-3
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUNDED: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


class Call(NamedTuple):
    """One call: ``lengths`` of a pack, or of equal rows."""

    B: int
    T: int
    HV: int
    null: str
    """Which slots are none: ``none``, ``first``, ``last``, ``some``; ``index`` for a null_index."""
    lengths: tuple[int, ...] = ()
    bounded: bool = True

    def __str__(self) -> str:
        shape = f"pack of {len(self.lengths)}" if self.lengths else f"B{self.B} T{self.T}"
        return f"{shape} HV{self.HV} null: {self.null}{'' if self.bounded else ', unbounded'}"


CRASHED = [(33, 8192, 4), (66, 2048, 2), (33, 512, 32), (132, 300, 1), (99, 1000, 2)]
"""Sequences, tokens, value heads of calls that ended with an illegal address."""


def calls() -> Iterator[Call]:
    for B, T, HV in CRASHED:
        yield Call(B, T, HV, "some")
    yield Call(132, 300, 1, "none")
    yield Call(132, 300, 1, "first")
    yield Call(132, 300, 1, "last")
    yield Call(132, 300, 1, "index")
    yield Call(131, 300, 1, "some")
    yield Call(133, 300, 1, "some")
    yield Call(67, 900, 1, "some")
    yield Call(66, 900, 1, "some")
    yield Call(65, 900, 1, "first")
    yield Call(33, 700, 2, "some", bounded=False)
    yield Call(40, 1500, 1, "index")
    yield Call(31, 1500, 1, "some", bounded=False)
    yield Call(197, 129, 1, "some")
    yield Call(1, 0, 2, "some", (300,) * 66)
    yield Call(1, 0, 4, "first", (0, 1, 5000, 64, 0, 33, 900) * 5)


class Made(NamedTuple):
    """A call's arrays and options."""

    tokens: dict[str, torch.Tensor]
    gate: dict[str, torch.Tensor]
    pool: torch.Tensor
    slots: torch.Tensor
    more: dict[str, Any]
    bounds: list[tuple[int, int]]
    """Row of the batch is sequence n of equal ones; of a pack, its tokens."""
    real: np.ndarray[Any, Any]


def make(call: Call) -> Made:
    rng = torch.Generator(device="cuda").manual_seed(call.B + call.T + call.HV)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").to(dtype)

    N = len(call.lengths) or call.B
    B, T = (1, sum(call.lengths)) if call.lengths else (call.B, call.T)
    tokens = {name: normal(B, T, call.HV, K) for name in ("q", "k", "v", "g")} | {
        "beta": normal(B, T, call.HV)
    }
    gate = {"A_log": normal(call.HV, dtype=torch.float32), "dt_bias": normal(call.HV, K, dtype=torch.float32)}
    null = {"none": [], "first": [0], "last": [N - 1], "some": [0, N // 3, N - 2], "index": [1, N // 2]}[
        call.null
    ]
    real = np.ones(N, bool)
    real[null] = False
    slots = torch.randperm(N, generator=torch.Generator().manual_seed(N)) + 1
    slots[null] = 0 if call.null == "index" else -1
    more: dict[str, Any] = OPTIONS | (BOUNDED if call.bounded else {})
    more["null_index"] = 0 if call.null == "index" else None
    ends = np.cumsum([0, *call.lengths])
    if call.lengths:
        more["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device="cuda")
    bounds = list(pairwise(ends)) if call.lengths else [(0, T)] * N
    pool = 0.3 * normal(N + 1, call.HV, K, K, dtype=torch.float32)
    return Made(tokens, gate, pool, slots.cuda(), more, bounds, real)


def run(made: Made, pool: torch.Tensor) -> torch.Tensor:
    """The output. ``pool`` is changed in place."""
    options = {"initial_state": pool, "state_indices": made.slots, "inplace_state": True} | made.more
    o, _ = kdacore.chunk_kda(**made.tokens, **made.gate, **options, backend="cuda")
    return o


def error(got: Any, want: Any) -> float:
    got, want = to_float64(got), to_float64(want)
    return float(np.linalg.norm(got - want)) / (float(np.linalg.norm(want)) or 1.0)


def against_the_oracle(made: Made, o: torch.Tensor, pool: torch.Tensor) -> tuple[float, float]:
    """Largest errors of outputs and of states, of the first two value heads of up to three sequences of 1,000 tokens at
    most, and of longer ones if there are no others."""
    real = [n for n in np.flatnonzero(made.real) if made.bounds[n][1] > made.bounds[n][0]]
    short = [n for n in real if made.bounds[n][1] - made.bounds[n][0] <= 1000] or real[:1]
    heads = slice(0, 2)
    worst = 0.0, 0.0
    for n in dict.fromkeys((short[0], short[len(short) // 2], short[-1])):
        row, (first, end) = (0 if "cu_seqlens" in made.more else n), made.bounds[n]
        tokens = {
            name: to_float64(x[row : row + 1, first:end, heads].cpu()).astype(np.float32)
            for name, x in made.tokens.items()
        }
        gate = {name: x[heads].cpu().numpy() for name, x in made.gate.items()}
        options = {name: x for name, x in made.more.items() if name not in ("cu_seqlens", "null_index")}
        state = made.pool[made.slots[n], heads][None].cpu().numpy()
        arrays: dict[str, Any] = {**tokens, **gate, "initial_state": state}
        want, final = kdacore.chunk_kda(**arrays, **options, output_final_state=True, backend="reference")
        at = (
            error(o[row : row + 1, first:end, heads].cpu(), want),
            error(pool[made.slots[n], heads][None].cpu(), final),
        )
        worst = max(worst[0], at[0]), max(worst[1], at[1])
    return worst


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def check(call: Call) -> tuple[bool, str]:
    """Whether all is well, and a row of the table."""
    made = make(call)
    pool = made.pool.clone()
    o = run(made, pool)
    torch.cuda.synchronize()
    wrong = []
    errors = against_the_oracle(made, o, pool)
    if not (errors[0] < O_BOUND and errors[1] < STATE_BOUND):
        wrong.append("not within bounds")
    for n in np.flatnonzero(~made.real):
        row, (first, end) = (0 if call.lengths else n), made.bounds[n]
        if o[row, first:end].any():
            wrong.append("padding is not zero")
    if not torch.equal(bits(pool[0]), bits(made.pool[0])):
        wrong.append("a row that no slot names was written")
    again = made.pool.clone()
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        again.copy_(made.pool)
        if not torch.equal(bits(run(made, again)), bits(o)) or not torch.equal(bits(again), bits(pool)):
            wrong.append("other bits when called again")
    with torch.cuda.graph(graph):
        captured = run(made, again)
    for _ in range(3):
        again.copy_(made.pool)
        captured.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(bits(captured), bits(o)) or not torch.equal(bits(again), bits(pool)):
            wrong.append("other bits when replayed")
    return (
        not wrong,
        f"{call!s:48} o {errors[0]:.1e}  state {errors[1]:.1e}  {', '.join(dict.fromkeys(wrong)) or 'ok'}",
    )


FORMS = {
    "clusters of two": (2, 0, 0, 48),
    "clusters of two, cut": (2, 66, 0, 80),
    "clusters of two, helped": (2, 0, 18, 48),
    "clusters of four": (4, 0, 0, 28),
    "clusters of four, cut": (4, 30, 0, 40),
    "clusters of four, helped": (4, 0, 6, 24),
}
"""Blocks a cluster, clusters that share items (0: one each), clusters of helpers, value heads."""


def stress(name: str, launches: int) -> tuple[bool, str]:
    """Whether all launches gave the same bits, and a row of the table with microseconds a launch."""
    cluster, clusters, helpers, heads = FORMS[name]
    made = make(Call(1, 1024, heads, "none"))

    def call() -> torch.Tensor:
        o, _ = kdacore.chunk_kda(**made.tokens, **made.gate, **OPTIONS, **BOUNDED, backend="cuda")
        return o

    with forced(cluster, clusters, helpers):
        first = call()
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(launches):
        differ += (call() != first).any()
    torch.cuda.synchronize()
    took = (time.perf_counter() - begin) / launches * 1e6
    return int(
        differ
    ) == 0, f"{name:48} {launches} launches, {took:.0f} us each with its comparison, {int(differ)} differ"


def forced(cluster: int, clusters: int, helpers: int) -> Any:
    """Plans made inside take this form. A shape that no other call here has is planned once."""
    stack = mock.patch.multiple(
        choice,
        use_segments=lambda *given: False,
        use_dataflow=lambda *given: False,
        cluster_size=lambda *given: cluster,
        resident_clusters=lambda *given: clusters,
        preparing_clusters=lambda *given: helpers,
    )
    return stack


def clusters_of(size: int) -> str:
    """What the driver says, and what the formula would."""
    kernel = chunk_forward_kernel(K, size, True, False, "sm_90a")
    said = torch_launch.clusters_at_once(kernel, "sm_90a", torch.cuda.current_device())
    formula = choice.formula_at_once(size, torch_launch.multiprocessors(0))
    return f"clusters of {size}: {said} at once ({formula} by formula)"


def main() -> int:
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    work = [partial(check, call) for call in calls()]
    work += [partial(stress, name, launches) for name in FORMS]
    rows = [one() for one in work]
    print(torch.cuda.get_device_name(), "|", clusters_of(2), "|", clusters_of(4))
    for ok, row in rows:
        print("    " if ok else "BAD ", row)
    print(f"{sum(ok for ok, _ in rows)} of {len(rows)} are right")
    return 0 if all(ok for ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
