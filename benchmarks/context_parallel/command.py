"""Context parallelism, checked and timed: ``python -m benchmarks.context_parallel``.

With ``--ranks R`` on R GPUs, a process each, over NCCL: outputs, final states and every gradient are held against the
float64 oracle on short rows and against one GPU's call on a long one; then calls are timed, on one GPU and on all, and
the exchange alone. With ``--threads R`` ranks are threads on one GPU: the same checks, and what one rank's share of a
row takes. With ``--faults`` a rank is killed in the middle, and ranks differ in their shapes.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch

from benchmarks.context_parallel import check, faults, parts, peer, timing
from benchmarks.context_parallel.ranks import Rank, in_processes, in_threads
from benchmarks.context_parallel.rows import RowCase, lengths_of_a_pack
from kdacore.bench import results
from kdacore.bench.clock import Timing
from kdacore.bench.results import Figure, Results, Row

PRESET = "context-parallel"
WANTED = {
    ("forward", 2): 1.75, ("forward", 4): 3.3, ("training", 2): 1.8, ("training", 4): 3.5,
}  # fmt: skip
"""Times faster than one GPU, KDA, T = 262144, H = 16."""
WORK_BOUND = 1.12
"""Work of a rank over its part of the whole call, at 4 ranks."""


def row(
    case: RowCase, size: int, name: str, t: Timing | None, note: str = "", error: float | None = None
) -> Row:
    """One measurement, or one check."""
    whose, _, phase = name.partition(" ")
    return Row(
        preset=PRESET, case=case.name, phase=phase or whose, contender=name, status="ok",
        backend=case.backend or "auto",
        gates="init", shape=f"B1 T{case.T} H{case.H} K128 V128, {size} ranks", dtype="bfloat16", device="cuda",
        seconds=None if t is None else t.median, low=None if t is None else t.low,
        high=None if t is None else t.high, samples=0 if t is None else t.samples, note=note, error=error,
    )  # fmt: skip


def checks(rank: Rank, ops: list[str], long_T: int) -> list[Row]:
    """Every check; rows of the worst errors."""
    rows = []
    for op in ops:
        plans = [(case, "oracle") for case in check.short_rows(op)]
        for lengths in ((), lengths_of_a_pack(long_T)):
            plans.append((RowCase(op, long_T, 4, lengths), "one GPU"))
        for case, against in plans:
            worst = check.check(rank, case, against)
            note = f"against {against}: " + ", ".join(f"{n} {e:.1e}" for n, e in worst.items())
            if rank.rank == 0:
                print(f"{case.name} {note}", flush=True)
            rows.append(row(case, rank.size, "check", None, note, max(worst.values())))
            _free()
    return rows


def timed(rank: Rank, cases: list[RowCase], samples: int, peer_heads: list[int]) -> list[Row]:
    """Every timing, once the checks are passed."""
    rows = []
    for H in sorted({case.H for case in cases}):
        for name, t in timing.time_exchange(rank, H, samples).items():
            rows.append(row(RowCase("kda", 0, H), rank.size, name, t))
    for case in cases:
        found = timing.time_case(rank, case, samples)
        if case.H in peer_heads:
            found |= peer.time_case(rank, case, samples)
        rows += [row(case, rank.size, name, t) for name, t in found.items()]
        if rank.rank == 0:
            print(case.name, {name: f"{1e3 * t.median:.3f} ms" for name, t in found.items()}, flush=True)
        _free()
    return rows


def everything(rank: Rank, args: argparse.Namespace) -> list[Row]:
    rows = checks(rank, args.ops, args.check_tokens)
    return (
        rows
        if args.only_checks or rank.threads
        else rows + timed(rank, cases_of(args), args.samples, args.peer_heads)
    )


def cases_of(args: argparse.Namespace) -> list[RowCase]:
    return [
        RowCase(op, T, H, lengths_of_a_pack(T) if packed else ())
        for op in args.ops
        for T in args.tokens
        for H in args.heads
        for packed in ((False, True) if args.packed == "both" else (args.packed == "yes",))
    ]


def speedups(rows: list[Row], size: int) -> list[Figure]:
    """How much faster all ranks are than one GPU, in each case."""
    seconds = {(r.case, r.contender): r.seconds for r in rows}
    found = []
    for name in dict.fromkeys(r.case for r in rows):
        for phase in timing.PASSES:
            one, ranks = seconds.get((name, f"one {phase}")), seconds.get((name, f"ranks {phase}"))
            if one and ranks:
                want = WANTED.get((phase, size)) if name == "kda T262144 H16" else None
                met = None if want is None else one / ranks >= want
                text = "" if want is None else f">= {want}"
                found.append(
                    Figure(
                        preset=PRESET, name=f"{name} {phase}, {size} GPUs", value=one / ranks, unit="x",
                        want=text, met=met,
                    )
                )  # fmt: skip
    return found


def shares(args: argparse.Namespace) -> Results:
    """One GPU: the work of one of 4 ranks (or as many threads as were asked for)."""
    rows, figures, size = [], [], args.threads
    for case in cases_of(args):
        found = parts.share_of_a_rank(case, size, args.samples)
        rows += [row(case, size, name, t) for name, t in found.items()]
        for phase, ratio in zip(timing.PASSES, parts.ratios(found, size), strict=True):
            held = size == 4 and case.op == "kda"
            figures.append(
                Figure(
                    preset=PRESET, name=f"{case.name} {phase}: work of one of {size} ranks over its part",
                    value=ratio, unit="x", want=f"<= {WORK_BOUND}" if held else "",
                    met=ratio <= WORK_BOUND if held else None,
                )
            )  # fmt: skip
        print(case.name, {n: f"{1e3 * t.median:.3f}" for n, t in found.items()}, flush=True)
        _free()
    return Results(rows, figures)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=0, help="GPUs, a process each; default: all there are")
    parser.add_argument("--threads", type=int, default=0, help="ranks as threads of one process on one GPU")
    parser.add_argument("--ops", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument(
        "--peer-heads",
        type=int,
        nargs="*",
        default=[16],
        help="where flash-linear-attention is timed, if installed",
    )
    parser.add_argument("--packed", choices=("no", "yes", "both"), default="both")
    parser.add_argument(
        "--check-tokens", type=int, default=32768, help="of the row held against one GPU's call"
    )
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--only-checks", action="store_true")
    parser.add_argument(
        "--faults", action="store_true", help="a rank is killed, and ranks differ; nothing else"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    size = args.ranks or torch.cuda.device_count()
    if args.faults:
        for line in faults.try_all(size):
            print(line, flush=True)
        return
    if args.threads:
        found = Results(in_threads(args.threads, everything, args)[0], [])
        if not args.only_checks:
            found.add(shares(args))
    else:
        if size < 2:
            raise SystemExit("one GPU: --threads R makes ranks of threads on it")
        rows = in_processes(size, everything, args)[0]
        found = Results(rows, speedups(rows, size))
    for figure in found.figures:
        print(
            f"{figure.name}: {figure.value:.3f}{figure.unit} {figure.want} {'' if figure.met is None else figure.met}"
        )
    if args.json:
        results.write(args.json, results.document(found, [PRESET], load))
