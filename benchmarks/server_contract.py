"""What serving options cost: ``python -m benchmarks.server_contract [--backend cuda] [--json FILE]``.

On an NVIDIA GPU. Prefill of 8192 tokens, plain, reading and writing rows of pools, with one checkpoint at the start
of a step and between two, with seven, and as a pack with unused rows; decoding with slots that are none. GPU time
with a cold L2, and the host time of every call. Before anything is timed, each call's results are held against the
plain call's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kdacore
from benchmarks.launches import row
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, busy_seconds, interleave
from kdacore.bench.results import Figure, Results

PRESET = "server-contract"
MOST = 1.02
"""A call that reads and writes pool rows, or keeps one checkpoint, over the plain one."""
STATE_BOUND = 3.3e-3
TOKENS, ROWS = 8192, 64
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
GATES: dict[str, dict[str, Any]] = {
    "bounded": {"safe_gate": True, "lower_bound": -5.0},
    "unbounded": {},
    "scalar": {},
}
"""``scalar``: one gate a head."""


class Setup(NamedTuple):
    """What serves the calls."""

    backend: str
    gate: str

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS | GATES[self.gate] | {"backend": self.backend}


def tokens(B: int, T: int, H: int, scalar: bool = False) -> dict[str, torch.Tensor]:
    """Inputs with gates as they are after initialisation."""
    make = torch.Generator("cuda").manual_seed(B + T + H)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device="cuda").bfloat16()

    x = {name: normal(B, T, H, 128) for name in ("q", "k", "v")}
    x["g"] = normal(B, T, H) if scalar else normal(B, T, H, 128)
    A_log = torch.log(1 + 15 * torch.rand(H, generator=make, device="cuda"))
    bias = (normal(H) if scalar else normal(H, 128)).float() - 4.0
    return x | {"beta": normal(B, T, H), "A_log": A_log, "dt_bias": bias}


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def pool_of(H: int) -> torch.Tensor:
    """Rows that do not lie side by side, as a server's pages."""
    return torch.randn(ROWS, 2, H, 128, 128, device="cuda")[:, 0].mul_(0.1)


def prefill(setup: Setup, x: dict[str, torch.Tensor], **more: Any) -> Any:
    op = kdacore.chunk_gated_delta_rule if setup.gate == "scalar" else kdacore.chunk_kda
    return op(**x, **setup.options, **more)


def decode(setup: Setup, x: dict[str, torch.Tensor], **more: Any) -> Any:
    return kdacore.fused_recurrent_kda(**x, **setup.options, **more, inplace_state=True)


def prefill_calls(setup: Setup, H: int) -> dict[str, Callable[[], Any]]:
    """Each writes pools of its own, from the same rows."""
    x = tokens(1, TOKENS, H, setup.gate == "scalar")
    start = 0.1 * torch.randn(1, H, 128, 128, device="cuda")
    pools = [pool_of(H) for _ in range(6)]
    for pool in pools:
        pool[7] = start[0]
    yes = torch.ones(1, dtype=torch.bool, device="cuda")
    rows = {"state_indices": index(7), "has_initial_state": yes, "inplace_state": True, "null_index": 0}
    out = torch.empty_like(x["v"])

    def pool_call(pool: torch.Tensor, **more: Any) -> Callable[[], Any]:
        given = rows | {"initial_state": pool, "write_indices": index(9), "out": out} | more
        return lambda: prefill(setup, x, **given, output_final_state=True)

    def checkpoints(pool: torch.Tensor, *offsets: int) -> Callable[[], Any]:
        rows = index(*range(11, 11 + len(offsets)))
        return pool_call(pool, checkpoint_offsets=index(*offsets), checkpoint_indices=rows)

    def packed(end: int) -> Callable[[], Any]:
        cu = index(0, end)
        return lambda: prefill(setup, x, initial_state=start, output_final_state=True, cu_seqlens=cu)

    return {
        "prefill plain": lambda: prefill(setup, x, initial_state=start, output_final_state=True),
        "prefill pool rows": pool_call(pools[0]),
        "prefill checkpoint at 4096": checkpoints(pools[1], 4096),
        "prefill checkpoint at 4144": checkpoints(pools[2], 4144),
        "prefill checkpoint at 8176": checkpoints(pools[3], 8176),
        "prefill seven checkpoints, every 1024": checkpoints(pools[4], *range(1024, TOKENS, 1024)),
        "prefill seven checkpoints, between steps": checkpoints(pools[5], *range(1040, TOKENS, 1024)),
        "prefill pack": packed(TOKENS),
        "prefill pack of 8000": packed(8000),
        **{
            f"prefill first {n}": partial(_prefix, setup, x, start, n) for n in (1024, 1040, 4096, 4144, 8176)
        },
    }


def _prefix(setup: Setup, x: dict[str, torch.Tensor], start: torch.Tensor, count: int) -> Any:
    cut = {name: a[:, :count].contiguous() if a.ndim > 2 else a for name, a in x.items()}
    return prefill(setup, cut, initial_state=start, output_final_state=True)


def decode_calls(setup: Setup, B: int, H: int) -> dict[str, Callable[[], Any]]:
    x, pools = tokens(B, 1, H), [pool_of(H) for _ in range(3)]
    for pool in pools[1:]:
        pool.copy_(pools[0])
    own = torch.arange(1, B + 1, dtype=torch.int32, device="cuda")
    some = torch.where(own % 4 == 0, 0, own)
    yes = torch.ones(B, dtype=torch.bool, device="cuda")
    other = torch.zeros_like(pools[2])
    return {
        "decode plain": lambda: decode(setup, x, initial_state=pools[0], state_indices=own),
        "decode null slots": lambda: decode(setup, x, initial_state=pools[1], state_indices=some, null_index=0),
        "decode every option": lambda: decode(
            setup, x, initial_state=pools[2], state_indices=own, null_index=0, has_initial_state=yes,
            write_indices=own, write_pool=other,
        ),
    }  # fmt: skip


def hold(what: str, ok: bool) -> None:
    """Raises AssertionError where results are apart."""
    print(f"  {what}: {'ok' if ok else 'WRONG'}")
    if not ok:
        raise AssertionError(what)


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def hold_prefill(setup: Setup, calls: dict[str, Callable[[], Any]]) -> None:
    """The CUDA backend promises the plain call's bits."""

    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        return torch.equal(x, y) if setup.backend == "cuda" else apart(x, y) < STATE_BOUND

    o, final = calls["prefill plain"]()
    for name in calls:
        if "pool" not in name and "checkpoint" not in name:
            continue
        got, pool = calls[name]()
        hold(f"{name}: as the plain call", same(got, o) and same(pool[9], final[0]))
        if "checkpoint" in name:
            end = {"every 1024": 1024, "between steps": 1040}.get(name.split(", ")[-1]) or int(
                name.split()[-1]
            )
            want = calls[f"prefill first {end}"]()[1]
            hold(f"{name}: its state", apart(pool[11], want[0]) < 2 * STATE_BOUND)
    packed = calls["prefill pack"]()[0]
    short = calls["prefill pack of 8000"]()[0]
    hold(
        "pack: unused rows are zero",
        not short[:, 8000:].any() and same(short[:, :8000], packed[:, :8000]),
    )


def hold_decode(calls: dict[str, Callable[[], Any]]) -> None:
    first, second, third = (call()[0] for call in calls.values())
    null = (torch.arange(1, first.shape[0] + 1, device="cuda") % 4) == 0
    hold("null slots: zero", not second[null].any())
    hold("null slots: others as they were", torch.equal(second[~null], first[~null]))
    hold("every option: the same bits", torch.equal(third, first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--gates", nargs="+", choices=tuple(GATES), default=["bounded"])
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32], help="of decode steps")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    found = Results()
    with torch.no_grad():
        for gate in args.gates:
            setup = Setup(args.backend, gate)
            for heads in args.heads:
                calls = prefill_calls(setup, heads)
                print(f"H{heads} {gate}, results:")
                hold_prefill(setup, calls)
                timed = {name: call for name, call in calls.items() if "first" not in name}
                case = Case(
                    name="timed", T=TOKENS, H=heads, gate="softplus" if gate == "unbounded" else "sigmoid"
                )
                shape = f"B1 T{TOKENS} H{heads} K128 V128" + ("" if gate == "bounded" else f" {gate}")
                measure(found, setup, shape, case, timed, args.samples)
        setup = Setup(args.backend, "bounded")
        for B in args.sequences:
            calls = decode_calls(setup, B, 32)
            print(f"decode B{B}, results:")
            hold_decode(calls)
            case = Case(name="timed", B=B, T=1, H=32, op="fused_recurrent_kda")
            measure(found, setup, f"B{B} T1 H32 K128 V128", case, calls, args.samples)
    if args.json:
        results.write(args.json, results.document(found, [PRESET], load))


def measure(
    found: Results, setup: Setup, shape: str, case: Case, calls: dict[str, Callable[[], Any]], samples: int
) -> None:
    """GPU and host time of calls, the first of which is the plain one."""
    steps: dict[str, Step] = dict(calls)
    timings = interleave(steps, CudaClock(), Budget(samples, 30.0))
    base = next(iter(timings.values())).median
    print(shape)
    for name, t in timings.items():
        over = t.median / base
        host = 1e6 * statistics.median(busy_seconds(calls[name], torch.cuda.synchronize) for _ in range(30))
        print(f"  {name:42} {1e6 * t.median:9.1f} us  {over:6.3f}x  host {host:7.1f} us")
        found.rows.append(row(PRESET, shape, case, name, setup.backend, t))
        found.figures.append(
            Figure(
                preset=PRESET, name=f"{shape}: host time, {name}", value=host, unit="us", want="", met=None
            )
        )
        promised = "pack" not in name and "seven" not in name
        if t.median != base:
            found.figures.append(
                Figure(
                    preset=PRESET, name=f"{shape}: {name}", value=over, unit="x",
                    want=f"<= {MOST}" if promised else "", met=over <= MOST if promised else None,
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
