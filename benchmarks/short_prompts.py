"""Many short sequences: ``python -m benchmarks.short_prompts``.

On a Hopper GPU, K = V = 128, bfloat16. Before anything is timed, ``chunk_kda`` and ``fused_recurrent_kda`` are held
against the float64 oracle, and have to give the same bits every time, whatever tokens follow, and as a pack, which goes
the fused kernel's usual way. Then every shape is timed on the cuda backend, as a pack on it, and on triton, in turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kdacore
from benchmarks.launches import FORWARD_BOUND
from kdacore.bench import results
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Results, Row
from kdacore.selfcheck.check import relative_error
from kdacore_reference.oracle import to_float64

PRESET = "short-prompts"
TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}
GATES: dict[str, dict[str, Any]] = {"sigmoid": {"safe_gate": True, "lower_bound": -5.0}, "softplus": {}}
SHAPES = [(256, 16), (256, 32), (256, 64), (256, 128), (64, 16), (64, 64), (64, 128), (128, 64), (16, 512)]
"""Sequences and tokens."""

Arrays = dict[str, torch.Tensor]


def make(B: int, T: int, H: int, state: bool, device: str = "cuda") -> Arrays:
    """Inputs as of a model at its start."""
    made = torch.Generator(device).manual_seed(B + T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=made)

    x = {name: normal(B, T, H, 128).bfloat16() for name in ("q", "k", "v", "g")}
    x |= {"beta": normal(B, T, H).bfloat16(), "A_log": normal(H).abs(), "dt_bias": normal(H * 128)}
    return x | ({"initial_state": 0.1 * normal(B, H, 128, 128)} if state else {})


def as_pack(x: Arrays) -> Arrays:
    """The same sequences, packed."""
    B, T = x["beta"].shape[:2]
    tokens = {name: x[name].flatten(0, 1)[None] for name in TOKENS}
    return x | tokens | {"cu_seqlens": T * torch.arange(B + 1, device=x["q"].device)}


def first_tokens(x: Arrays, T: int) -> Arrays:
    return x | {name: x[name][:, :T].contiguous() for name in TOKENS}


def last_sequences(x: Arrays, n: int) -> Arrays:
    """On the host."""
    parts = (*TOKENS, "initial_state")
    return {name: (a[-n:] if name in parts else a).cpu() for name, a in x.items()}


def hold(what: str, got: Any, want: Any) -> None:
    """Raises AssertionError where outputs or states of the last sequences are apart."""
    found = [
        relative_error(to_float64(a[-len(b) :].cpu()), to_float64(b)) for a, b in zip(got, want, strict=True)
    ]
    print(f"{what}:", *(f"{e:.1e}" for e in found))
    if max(found) > FORWARD_BOUND:
        raise AssertionError(f"{what}: {found}")


def must_equal(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if not torch.equal(a, b):
        raise AssertionError(f"{what}: other bits")


def gate(options: dict[str, Any]) -> None:
    """Raises AssertionError where a result is wrong, or another one the second time."""
    chunk = partial(kdacore.chunk_kda, **options)
    for T in (1, 15, 16, 17, 33, 64, 100, 128):
        for state in (False, True):
            x = make(256, T, 4, state)
            got = chunk(**x, backend="cuda")
            hold(f"T{T} state {state:d}", got, chunk(**last_sequences(x, 2), backend="reference"))
            for _ in range(20):
                again = chunk(**x, backend="cuda")
                must_equal(f"T{T}", again[0], got[0])
                must_equal(f"T{T} state", again[1], got[1])
            packed = chunk(**as_pack(x), backend="cuda")
            must_equal(f"T{T} as a pack", packed[0].reshape(got[0].shape), got[0])
            must_equal(f"T{T} as a pack, state", packed[1], got[1])
    x = make(256, 200, 4, True)
    whole = chunk(**x, backend="cuda")[0]
    for T in (1, 16, 17, 40, 128, 129):
        must_equal(f"T{T} of 200", chunk(**first_tokens(x, T), backend="cuda")[0], whole[:, :T])
    recurrent = partial(kdacore.fused_recurrent_kda, **options)
    for v_first in (False, True):
        x = make(64, 9, 8, True)
        got = recurrent(**x, state_v_first=v_first, backend="cuda")
        want = recurrent(**last_sequences(x, 2), state_v_first=v_first, backend="reference")
        hold(f"recurrent, state V first {v_first:d}", got, want)
        one = recurrent(
            **first_tokens(x, 1), state_v_first=v_first, state_indices=torch.arange(64).cuda(), backend="cuda"
        )
        must_equal("recurrent, one token", one[0], got[0][:, :1])


def timed(rows: list[Row], shape: str, gate_kind: str, steps: dict[str, Step], samples: int) -> None:
    for step in steps.values():
        step()
    found = interleave(steps, CudaClock(), Budget(samples, 2.0))
    for name, t in found.items():
        rows.append(
            Row(
                preset=PRESET, case=shape, phase="forward", contender=name, status="ok", backend=name.split()[0],
                gates=gate_kind, shape=shape, dtype="bfloat16", device="cuda",
                seconds=t.median, low=t.low, high=t.high, samples=t.samples,
            )
        )  # fmt: skip
    print(f"{shape}:", *(f"{name} {1e6 * t.median:.1f}" for name, t in found.items()), "us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gate", choices=tuple(GATES), default="sigmoid")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    options = OPTIONS | GATES[args.gate]
    chunk, recurrent = partial(kdacore.chunk_kda, **options), partial(kdacore.fused_recurrent_kda, **options)
    rows: list[Row] = []
    with torch.no_grad():
        gate(options)
        for B, T in SHAPES:
            for state in (False, True):
                x = make(B, T, args.heads, state)
                timed(
                    rows,
                    f"chunk B{B} T{T} H{args.heads}{' with states' if state else ''}",
                    args.gate,
                    {
                        "cuda": partial(chunk, **x, backend="cuda"),
                        "cuda packed": partial(chunk, **as_pack(x), backend="cuda"),
                        "triton": partial(chunk, **x, backend="triton"),
                    },
                    args.samples,
                )
        for B, T in ((256, 16), (256, 4), (32, 4), (8, 16), (256, 1), (32, 1)):
            for v_first in (False, True):
                x = make(B, T, args.heads, True)
                timed(
                    rows,
                    f"recurrent B{B} T{T} H{args.heads} {'[V, K]' if v_first else '[K, V]'}",
                    args.gate,
                    {
                        b: partial(recurrent, **x, state_v_first=v_first, backend=b)
                        for b in ("cuda", "triton")
                    },
                    args.samples,
                )
    if args.json:
        results.write(args.json, results.document(Results(rows, []), [PRESET], load))


if __name__ == "__main__":
    main()
