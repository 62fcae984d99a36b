"""One GPU: what one rank's share of a row takes, part by part, beside its share of the whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.context_parallel.rows import (
    OPS,
    RowCase,
    call,
    output_gradients,
    slice_of,
    training_step,
    whole,
    with_gradients,
)
from kdacore.bench import arrays as made
from kdacore.bench.clock import Budget, CudaClock, Step, Timing, interleave
from kdacore.calls.requests import request_with
from kdacore.dispatch.plan import current_policy
from kdacore.ops import OPS as DEFINITIONS
from kdacore.parallel import fold
from kdacore.parallel.local_call import choose, slice_request
from kdacore.types import ChunkInputs, OutputGrads

Timer = Callable[[str, Step], None]


def share_of_a_rank(case: RowCase, size: int, samples: int) -> dict[str, Timing]:
    """Parts of the middle one of ``size`` ranks, ``fold`` among them; the whole call as ``one forward`` and
    ``one training``."""
    x = whole(case, "cuda")
    do = output_gradients(case, x)[0]
    T, rank = case.T // size, size // 2
    mine, own = slice_of(x, rank, size), do[:, rank * T : (rank + 1) * T].clone()
    clock, found = CudaClock(), {}

    def time(name: str, step: Step) -> None:
        for _ in range(2):
            step()
        found[name] = interleave({name: step}, clock, Budget(samples, 10.0))[name]

    _time_whole(case, x, do, time)
    del x, do
    torch.cuda.empty_cache()
    with torch.no_grad():
        _time_parts(case, size, rank, mine, own, time)
    return found


def _time_whole(case: RowCase, x: dict[str, Any], do: torch.Tensor, time: Timer) -> None:
    with torch.no_grad():
        time("one forward", lambda: call(case, x, final=False))
    leaves = with_gradients(x)
    time("one training", lambda: training_step(case, leaves, do))


def _time_parts(
    case: RowCase, size: int, rank: int, mine: dict[str, Any], do: torch.Tensor, time: Timer
) -> None:
    T, place = case.T // size, None
    local = dict(mine)
    if case.lengths:
        from kdacore.parallel.layout import layout

        place = layout(mine["cu_seqlens"], rank, T)
        local["cu_seqlens"] = place.offsets.to(mine["cu_seqlens"].dtype)
    options = made.options(case.case) | {"output_final_state": False}
    request = slice_request(request_with(OPS[case.op], {**local, **options}))
    chosen, functions = choose(request, current_policy(DEFINITIONS[OPS[case.op]], case.backend))
    request = chosen.request
    inputs = ChunkInputs(**{n: local.get(n) for n in ChunkInputs._fields})
    leaving, entering = (None, None) if place is None else (place.leaving, place.entering)
    N = request.N
    starts = torch.randn(N, case.H, 128, 128, device="cuda")
    ends = torch.randn(N, case.H, 128, 128, device="cuda")
    begun = functions.begin(request, inputs, leaving)
    maps = (
        begun.M.expand(size - 1, *begun.M.shape).contiguous(),
        begun.C.expand(size - 1, *begun.C.shape).contiguous(),
    )
    grads = OutputGrads(do, None)
    outputs = functions.finish(request, inputs, begun.pending, starts)

    def forward() -> None:
        functions.finish(request, inputs, functions.begin(request, inputs, leaving).pending, starts)

    def backward() -> None:
        _, pending = functions.backward_begin(request, inputs, outputs.saved, grads, starts, entering)
        functions.backward_finish(request, inputs, outputs.saved, pending, grads, starts, ends)

    time("begin", lambda: functions.begin(request, inputs, leaving))
    time("begin and finish", forward)
    time("fold", lambda: fold(*maps, maps[1][0]))
    time(
        "backward begin",
        lambda: functions.backward_begin(request, inputs, outputs.saved, grads, starts, entering),
    )
    time("backward begin and finish", backward)


def ratios(found: dict[str, Timing], size: int) -> tuple[float, float]:
    """Work of a rank over its part of the whole call: forward; forward and backward. One fold each way."""
    forward = found["begin and finish"].median + found["fold"].median
    both = forward + found["backward begin and finish"].median + found["fold"].median
    return forward * size / found["one forward"].median, both * size / found["one training"].median
