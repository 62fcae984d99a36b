"""What serving options cost on the CUDA backend: ``python -m benchmarks.server_contract [--json FILE]``.

On an NVIDIA GPU. Prefill of 8192 tokens, plain, reading and writing rows of pools, with one checkpoint at the start
of a step and between two, and as a pack with unused rows; decoding with slots that are none. Before anything is
timed, each call's results are held against the plain call's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kdacore
from benchmarks.launches import row
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, busy_seconds, interleave
from kdacore.bench.results import Figure, Results, Row

PRESET = "server-contract"
MOST = 1.02
"""A call that reads and writes pool rows, or keeps one checkpoint, over the plain one."""
STATE_BOUND = 3.3e-3
TOKENS, ROWS = 8192, 64
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}


def tokens(B: int, T: int, H: int) -> dict[str, torch.Tensor]:
    """Inputs with gates as they are after initialisation."""
    make = torch.Generator("cuda").manual_seed(B + T + H)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device="cuda").bfloat16()

    x = {name: normal(B, T, H, 128) for name in ("q", "k", "v", "g")}
    A_log = torch.log(1 + 15 * torch.rand(H, generator=make, device="cuda"))
    return x | {"beta": normal(B, T, H), "A_log": A_log, "dt_bias": normal(H, 128).float() - 4.0}


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def pool_of(H: int) -> torch.Tensor:
    """Rows that do not lie side by side, as a server's pages."""
    return torch.randn(ROWS, 2, H, 128, 128, device="cuda")[:, 0].mul_(0.1)


def prefill(x: dict[str, torch.Tensor], **more: Any) -> Any:
    return kdacore.chunk_kda(**x, **OPTIONS, **more, backend="cuda")


def decode(x: dict[str, torch.Tensor], **more: Any) -> Any:
    return kdacore.fused_recurrent_kda(**x, **OPTIONS, **more, inplace_state=True, backend="cuda")


def prefill_calls(H: int) -> dict[str, Callable[[], Any]]:
    """Each writes pools of its own, from the same rows."""
    x, start = tokens(1, TOKENS, H), 0.1 * torch.randn(1, H, 128, 128, device="cuda")
    pools = [pool_of(H) for _ in range(3)]
    for pool in pools:
        pool[7] = start[0]
    yes = torch.ones(1, dtype=torch.bool, device="cuda")
    rows = {"state_indices": index(7), "has_initial_state": yes, "inplace_state": True, "null_index": 0}
    out = torch.empty_like(x["v"])

    def pool_call(pool: torch.Tensor, **more: Any) -> Callable[[], Any]:
        given = rows | {"initial_state": pool, "write_indices": index(9), "out": out} | more
        return lambda: prefill(x, **given, output_final_state=True)

    def checkpoint(pool: torch.Tensor, offset: int) -> Callable[[], Any]:
        return pool_call(pool, checkpoint_offsets=index(offset), checkpoint_indices=index(11))

    def packed(end: int) -> Callable[[], Any]:
        cu = index(0, end)
        return lambda: prefill(x, initial_state=start, output_final_state=True, cu_seqlens=cu)

    return {
        "prefill plain": lambda: prefill(x, initial_state=start, output_final_state=True),
        "prefill pool rows": pool_call(pools[0]),
        "prefill checkpoint at 4096": checkpoint(pools[1], 4096),
        "prefill checkpoint at 4144": checkpoint(pools[2], 4144),
        "prefill pack": packed(TOKENS),
        "prefill pack of 8000": packed(8000),
        "prefill first 4096": lambda: _prefix(x, start, 4096),
        "prefill first 4144": lambda: _prefix(x, start, 4144),
    }


def _prefix(x: dict[str, torch.Tensor], start: torch.Tensor, count: int) -> Any:
    cut = {name: a[:, :count].contiguous() if a.ndim > 2 else a for name, a in x.items()}
    return prefill(cut, initial_state=start, output_final_state=True)


def decode_calls(B: int, H: int) -> dict[str, Callable[[], Any]]:
    x, pools = tokens(B, 1, H), [pool_of(H) for _ in range(3)]
    for pool in pools[1:]:
        pool.copy_(pools[0])
    own = torch.arange(1, B + 1, dtype=torch.int32, device="cuda")
    some = torch.where(own % 4 == 0, 0, own)
    yes = torch.ones(B, dtype=torch.bool, device="cuda")
    other = torch.zeros_like(pools[2])
    return {
        "decode plain": lambda: decode(x, initial_state=pools[0], state_indices=own),
        "decode null slots": lambda: decode(x, initial_state=pools[1], state_indices=some, null_index=0),
        "decode every option": lambda: decode(
            x, initial_state=pools[2], state_indices=own, null_index=0, has_initial_state=yes,
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


def hold_prefill(calls: dict[str, Callable[[], Any]]) -> None:
    o, final = calls["prefill plain"]()
    for name in ("prefill pool rows", "prefill checkpoint at 4096", "prefill checkpoint at 4144"):
        got, pool = calls[name]()
        hold(f"{name}: the same bits", torch.equal(got, o) and torch.equal(pool[9], final[0]))
        if name.split()[1] == "checkpoint":
            want = calls[f"prefill first {name.split()[-1]}"]()[1]
            hold(f"{name}: its state", apart(pool[11], want[0]) < 2 * STATE_BOUND)
    packed = calls["prefill pack"]()[0]
    short = calls["prefill pack of 8000"]()[0]
    hold(
        "pack: unused rows are zero",
        not short[:, 8000:].any() and torch.equal(short[:, :8000], packed[:, :8000]),
    )


def hold_decode(calls: dict[str, Callable[[], Any]]) -> None:
    first, second, third = (call()[0] for call in calls.values())
    null = (torch.arange(1, first.shape[0] + 1, device="cuda") % 4) == 0
    hold("null slots: zero", not second[null].any())
    hold("null slots: others as they were", torch.equal(second[~null], first[~null]))
    hold("every option: the same bits", torch.equal(third, first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    rows: list[Row] = []
    figures: list[Figure] = []

    def measure(shape: str, case: Case, calls: dict[str, Callable[[], Any]], plain: str) -> None:
        steps: dict[str, Step] = dict(calls)
        found = interleave(steps, CudaClock(), Budget(args.samples, 30.0))
        base = found[plain].median
        print(shape)
        for name, t in found.items():
            over = t.median / base
            print(f"  {name:28} {1e6 * t.median:9.1f} us  {over:6.3f}x")
            rows.append(row(PRESET, shape, case, name, "cuda", t))
            promised = "pack" not in name
            if name != plain:
                figures.append(
                    Figure(
                        preset=PRESET, name=f"{shape}: {name}", value=over, unit="x",
                        want=f"<= {MOST}" if promised else "", met=over <= MOST if promised else None,
                    )
                )  # fmt: skip

    with torch.no_grad():
        for heads in args.heads:
            calls = prefill_calls(heads)
            print(f"H{heads}, results:")
            hold_prefill(calls)
            timed = {name: call for name, call in calls.items() if "first" not in name}
            case = Case(name="timed", T=TOKENS, H=heads)
            measure(f"B1 T{TOKENS} H{heads} K128 V128", case, timed, "prefill plain")
        calls = decode_calls(32, 32)
        print("decode, results:")
        hold_decode(calls)
        case = Case(name="timed", B=32, T=1, H=32, op="fused_recurrent_kda")
        measure("B32 T1 H32 K128 V128", case, calls, "decode plain")
        for name, call in calls.items():
            busy = [busy_seconds(call, torch.cuda.synchronize) for _ in range(50)]
            host = 1e6 * statistics.median(busy)
            print(f"  {name:28} {host:9.1f} us of the host")
            figures.append(
                Figure(preset=PRESET, name=f"host time, {name}", value=host, unit="us", want="", met=None)
            )
    if args.json:
        results.write(args.json, results.document(Results(rows, figures), [PRESET], load))


if __name__ == "__main__":
    main()
