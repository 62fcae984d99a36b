"""What ``batch_invariant()`` costs: ``python -m benchmarks.batch_invariance [--backend cuda] [--json FILE]``.

On an NVIDIA GPU. The same calls inside and outside of ``with kdacore.batch_invariant():``, in turns: prefill and
training of one sequence by number of heads, decoding by number of sequences. GPU time with a cold L2. Before
anything is timed, results inside are held against those outside, and against those of the same sequence beside
another one, whose bits they must have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kdacore
from benchmarks.launches import row
from benchmarks.server_contract import Setup, apart, hold, tokens
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Figure, Results

PRESET = "batch-invariance"
BOUND = 1e-2
TOKENS = 8192
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")

Call = Callable[[], Any]


def inside(call: Call) -> Call:
    def invariant() -> Any:
        with kdacore.batch_invariant():
            return call()

    return invariant


def beside_another(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same sequences, each followed by one more, in another row of the batch."""
    return {name: torch.cat([a, a.flip(1)]) if a.ndim > 2 else a for name, a in x.items()}


def prefill(setup: Setup, x: dict[str, torch.Tensor]) -> Call:
    return lambda: kdacore.chunk_kda(**x, **setup.options, output_final_state=True)


def training(setup: Setup, x: dict[str, torch.Tensor]) -> Call:
    leaves = {name: x[name].detach().requires_grad_() for name in LEAVES}
    weight = torch.ones_like(x["v"])

    def step() -> Any:
        o = kdacore.chunk_kda(**leaves, **setup.options)[0]
        return torch.autograd.grad(o, list(leaves.values()), weight)

    return step


def decode(setup: Setup, x: dict[str, torch.Tensor]) -> Call:
    B, _, H, K = x["v"].shape
    pool, order = (
        torch.zeros(B + 1, H, K, K, device="cuda"),
        torch.arange(B, dtype=torch.int32, device="cuda"),
    )
    given = {"initial_state": pool, "state_indices": order, "inplace_state": True}
    return lambda: kdacore.fused_recurrent_kda(**x, **given, **setup.options)


def hold_call(name: str, make: Callable[[dict[str, torch.Tensor]], Call], x: dict[str, torch.Tensor]) -> None:
    plain, invariant = make(x)()[0], inside(make(x))()[0]
    hold(f"{name}: as outside", apart(invariant, plain) < BOUND)
    more = inside(make(beside_another(x)))()[0]
    hold(f"{name}: the bits it has beside another", torch.equal(more[: invariant.shape[0]], invariant))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 8, 12, 16, 24, 32, 64])
    parser.add_argument("--training", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, found, setup = results.load(), Results(), Setup(args.backend, "bounded")

    def measure(
        what: str, shape: str, case: Case, make: Callable[[dict[str, torch.Tensor]], Call], x: Any
    ) -> None:
        hold_call(f"{what} {shape}", make, x)
        call = make(x)
        steps: dict[str, Step] = {f"{what} outside": call, f"{what} inside": inside(call)}
        timed = interleave(steps, CudaClock(), Budget(args.samples, 10.0))
        for name, t in timed.items():
            found.rows.append(row(PRESET, shape, case, f"{name.split()[1]} {what}", args.backend, t))
        outside, within = (t.median for t in timed.values())
        print(
            f"{what:8} {shape:24} {1e6 * outside:9.1f} us  {1e6 * within:9.1f} us  {within / outside:6.3f}x"
        )
        figure = Figure(
            preset=PRESET, name=f"{what} {shape}", value=within / outside, unit="x", want="", met=None
        )  # fmt: skip
        found.figures.append(figure)

    for H in args.heads:
        with torch.no_grad():
            case = Case(name="timed", T=TOKENS, H=H)
            measure("prefill", f"B1 T{TOKENS} H{H}", case, lambda x: prefill(setup, x), tokens(1, TOKENS, H))
    for H in args.training:
        case = Case(name="timed", T=TOKENS, H=H)
        measure("training", f"B1 T{TOKENS} H{H}", case, lambda x: training(setup, x), tokens(1, TOKENS, H))
    for B in args.sequences:
        with torch.no_grad():
            case = Case(name="timed", B=B, T=1, H=32, op="fused_recurrent_kda")
            measure("decode", f"B{B} T1 H32", case, lambda x: decode(setup, x), tokens(B, 1, 32))
    if args.json:
        results.write(args.json, results.document(found, [PRESET], load))


if __name__ == "__main__":
    main()
