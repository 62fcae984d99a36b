"""What servers' calls cost beside the plain ones, on one GPU: pools in prefill, rows to write, checkpoints, decode.

    python -m benchmarks.server_calls BACKEND [--only TEXT] [--rounds 30] [--json out.json] [--plain]

Every line is a call and the one it is compared with, timed in turns: GPU time with a cold L2 for prefill, GPU time
of a launch in a CUDA graph and host time of an eager call for decoding. ``--plain`` times only calls that need no
feature of servers, so that an older checkout can run them too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch

import kdacore
from kdacore.bench.clock import CudaClock, busy_seconds

Call = Callable[[], Any]
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
GATES = {"bounded": {"safe_gate": True, "lower_bound": -5.0}, "unbounded": {}, "scalar": {}}
T, HEADS, K = 8192, 12, 128


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _tokens(B: int, T: int, H: int, scalar: bool) -> dict[str, torch.Tensor]:
    x = {name: _normal(B, T, H, K) for name in ("q", "k", "v")}
    x["g"] = _normal(B, T, H) if scalar else _normal(B, T, H, K)
    x["beta"] = _normal(B, T, H)
    return x | {"A_log": torch.zeros(H, device="cuda")}


def prefill(backend: str, gate: str, plain: bool) -> dict[str, Call]:
    """Prefill of one prompt, by name; the first is what the others are compared with."""
    scalar = gate == "scalar"
    op = kdacore.chunk_gated_delta_rule if scalar else kdacore.chunk_kda
    x = _tokens(1, T, HEADS, scalar)
    state = _normal(1, HEADS, K, K, dtype=torch.float32)
    ends = _numbers(0, T)

    def call(**more: Any) -> Call:
        return lambda: op(**x, **more, **OPTIONS, **GATES[gate], backend=backend)

    calls = {
        "plain": call(initial_state=state, output_final_state=True),
        "pack of one": call(initial_state=state, output_final_state=True, cu_seqlens=ends),
        "checkpoint_every=4096": call(initial_state=state, output_final_state=True, checkpoint_every=4096),
    }
    if plain:
        return calls
    pool = torch.zeros(64, HEADS, K, K, device="cuda")
    rows = {"initial_state": pool, "state_indices": _numbers(7), "inplace_state": True, "null_index": 0}
    rows["has_initial_state"] = torch.ones(1, dtype=torch.bool, device="cuda")
    kept = {"checkpoint_offsets": _numbers(4096), "checkpoint_indices": _numbers(9)}
    inside = {"checkpoint_offsets": _numbers(4096 + 16), "checkpoint_indices": _numbers(9)}
    many = {
        "checkpoint_offsets": _numbers(*range(1024, T, 1024)),
        "checkpoint_indices": _numbers(*range(10, 17)),
    }
    out = torch.zeros(1, T, HEADS, K, device="cuda", dtype=torch.bfloat16)
    return calls | {
        "pool": call(**rows),
        "pool, pack of one, out": call(**rows, cu_seqlens=ends, out=out),
        "pool, other row written": call(**rows, write_indices=_numbers(8)),
        "pool, one checkpoint": call(**rows, **kept),
        "pool, one checkpoint inside a chunk of 32": call(**rows, **inside),
        "pool, seven checkpoints": call(**rows, **many),
        "padded pack": call(initial_state=state, output_final_state=True, cu_seqlens=_numbers(0, T - 512)),
    }


def decode(backend: str, B: int, plain: bool) -> dict[str, Call]:
    """Decoding of one token a sequence, by name; the first is what the others are compared with."""
    x = _tokens(B, 1, 32, False)
    P = 2 * B + 1
    pool, other = (torch.zeros(P, 32, K, K, device="cuda") for _ in range(2))
    order = torch.randperm(P - 1, device="cuda", dtype=torch.int64).int() + 1
    rows = {"initial_state": pool, "state_indices": order[:B].clone(), "inplace_state": True}
    goals = order[B : 2 * B].clone()

    def call(**more: Any) -> Call:
        return lambda: kdacore.fused_recurrent_kda(
            **x, **rows, **more, **OPTIONS, **GATES["bounded"], backend=backend
        )

    calls = {"in place": call()}
    if plain:
        return calls
    return calls | {
        "null_index": call(null_index=0),
        "has_initial_state": call(has_initial_state=torch.ones(B, dtype=torch.bool, device="cuda")),
        "write_indices": call(write_indices=goals),
        "write_pool": call(write_pool=other, write_indices=goals),
        "all": call(
            write_pool=other, write_indices=goals, null_index=0,
            has_initial_state=torch.ones(B, dtype=torch.bool, device="cuda"),
        ),
    }  # fmt: skip


def _in_turns(calls: dict[str, Call], sample: Callable[[Call], float], rounds: int) -> dict[str, float]:
    """The median of each, in seconds."""
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(sample(call))
    return {name: statistics.median(times) for name, times in found.items()}


def _captured(call: Call, launches: int = 20) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for _ in range(launches):
            kept.append(call())
    return lambda _=kept: graph.replay()


def _graph_seconds(call: Call) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(5):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / (5 * 20)


def _rows(backend: str, only: str, rounds: int, plain: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(case: str, clock: str, times: dict[str, float]) -> None:
        first = next(iter(times.values()))
        for name, seconds in times.items():
            row = {"case": case, "call": name, "clock": clock, "us": seconds * 1e6, "ratio": seconds / first}
            rows.append(row)
            print(f"{case:22s} {clock:6s} {name:45s} {row['us']:9.2f} us {row['ratio']:7.3f}x", flush=True)

    for gate in GATES:
        case = f"prefill {gate}"
        if only in case:
            calls = prefill(backend, gate, plain)
            add(case, "gpu", _in_turns(calls, CudaClock(), rounds))
            add(case, "host", _in_turns(calls, _host_seconds, rounds))
    for B in (1, 8, 32, 128):
        case = f"decode B{B}"
        if only in case:
            calls = decode(backend, B, plain)
            graphs = {name: _captured(call) for name, call in calls.items()}
            add(case, "graph", _in_turns(graphs, _graph_seconds, rounds))
            add(case, "host", _in_turns(calls, _host_seconds, rounds))
    return rows


def _host_seconds(call: Call) -> float:
    return busy_seconds(call, torch.cuda.synchronize)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_calls", description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        rows = _rows(given.backend, given.only, given.rounds, given.plain)
    if given.json:
        found = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "backend": given.backend,
            "rows": rows,
        }
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
