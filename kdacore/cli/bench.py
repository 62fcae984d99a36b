"""``kdacore bench``: presets, or one case of your own."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from kdacore import report
from kdacore.bench import cases, choice, plot, results, runner
from kdacore.bench.cases import PRESETS, SPECIAL, Case, Goal
from kdacore.bench.clock import Budget
from kdacore.bench.peers import PEERS
from kdacore.bench.results import Results
from kdacore.cli import call_arguments
from kdacore.cli.time_limit import not_terminated
from kdacore.errors import did_you_mean
from kdacore.files import writable
from kdacore.lazy import install_line
from kdacore.machine import version_of
from kdacore.progress import Bar
from kdacore.registry import REGISTRY
from kdacore.testing.capabilities import has_device
from kdacore.types import ArrayKind

Work = tuple[str, Any]
"""What the progress bar says, and the function that does it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*SPECIAL, *PRESETS)
    add = parser.add_argument
    add("presets", nargs="*", metavar="PRESET", help=f"any of {', '.join(names)} (default quick)")
    add("--list", action="store_true", help="list the presets and their cases")
    add("--json", type=writable, metavar="PATH", help="write the results there")
    add("--plot", type=writable, metavar="PATH", help="draw the results into this SVG (needs matplotlib)")
    add("--backend", default="", help="only these backends, comma-separated")
    add(
        "--peer",
        default="",
        help="only these peers, comma-separated; 'none' for none (default: all installed)",
    )
    add(
        "--device",
        type=call_arguments.device,
        default=None,
        help="cpu, cuda, cuda:1 (default: cuda where torch sees one, else cpu)",
    )
    add(
        "--kind",
        default=None,
        choices=("numpy", "torch", "jax"),
        help="array library, instead of the case's own",
    )
    add("--gates", default="", help="only these gate sets: random, init")
    add(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases whose name contains this; again for more of them",
    )
    add("--tiny", action="store_true", help="shrink every case: does it run at all?")
    add("--samples", type=int, default=30, help="timings of each contender (default 30)")
    add("--seconds", type=float, default=20.0, help="at most this long a case (default 20)")
    add("--check", action="store_true", help="compare with promised figures; exit 1 when one is missed")
    add(
        "--shape",
        type=call_arguments.shape,
        metavar=call_arguments.SIZES,
        help="time one case of these sizes",
    )
    add("--phase", default="forward", choices=("forward", "training", "decode", "host"), help="for --shape")
    add("--dtype", default="float32", help="for --shape")


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list(report.console())
        return report.OK
    presets = args.presets or (["shape"] if args.shape else ["quick"])
    if (why := _senseless(args) or _lacking(presets, args)) is not None:
        print(f"kdacore bench: {why}", file=sys.stderr)
        return report.USAGE
    before = results.load()
    found = Results()
    interrupted = False
    try:
        _fill(found, presets, args)
    except KeyboardInterrupt:  # what was timed so far took minutes and is not thrown away
        if not found.rows:
            print("kdacore bench: interrupted before any case was done; nothing is written", file=sys.stderr)
            return report.INTERRUPTED
        interrupted = True
        print("kdacore bench: interrupted; the results so far:", file=sys.stderr)
    with not_terminated():
        return _report(found, presets, before, interrupted, args)


def _report(
    found: Results, presets: list[str], before: tuple[float, ...], interrupted: bool, args: argparse.Namespace
) -> int:
    """Print and write the results; the exit status. ``before``: the load averages before the run."""
    out = report.console()
    if not found.rows:
        print("kdacore bench: no case is left to time (--only, --gates)", file=sys.stderr)
        return report.USAGE
    out.print(results.row_table(found.rows, out))
    timed = any(row.seconds is not None for row in found.rows)
    if not timed:
        print("kdacore bench: nothing could be timed; the rows say why", file=sys.stderr)
    if found.figures:
        out.print(results.figure_table(found.figures, out, judged=args.check))
    if args.json or args.plot:
        document = results.document(found, presets, before, complete=not interrupted)
        if args.json:
            results.write(args.json, document)
        if args.plot:
            try:
                plot.draw(document, args.plot)
            except plot.PlotError as error:
                print(f"kdacore bench: {error}", file=sys.stderr)
                return report.USAGE
    if interrupted:
        return report.INTERRUPTED
    return report.BROKEN if not timed or found.failed or (args.check and found.missed) else report.OK


def _fill(found: Results, presets: list[str], args: argparse.Namespace) -> None:
    """Run the presets one piece of work after another, under a progress bar."""
    work = {preset: list(_work(preset, args)) for preset in presets}
    with Bar("bench", sum(map(len, work.values()))) as bar:
        for preset in presets:
            for what, step in work[preset]:
                bar.begin(f"{preset}: {what}")
                found.add(step())
                bar.advance()
            if preset.startswith("h200-"):
                found.figures += runner.gate_dependence(preset, found.rows)
                found.figures += runner.goals_of_other_cases(preset, PRESETS.get(preset, ()), found.rows)
            if preset == choice.PRESET:
                found.figures += choice.figures(found.rows)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


_FIXED = ("cpu", "xla", "dispatch", "import")
"""Presets that time one thing: nothing to narrow."""


def _senseless(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments themselves, found before anything is timed."""
    if unknown := [name for name in args.presets if name not in (*SPECIAL, *PRESETS)]:
        meant = did_you_mean(unknown[0], (*SPECIAL, *PRESETS))
        return f"no preset {', '.join(unknown)}; --list shows them{meant}"
    if args.shape and args.presets:
        return "give presets, or --shape, not both"
    if args.samples < 1 or not args.seconds > 0:
        return f"{'--samples' if args.samples < 1 else '--seconds'} must be positive"
    if unknown := [name for name in _names(args.backend) if name not in REGISTRY.backends()]:
        there, meant = ", ".join(REGISTRY.backends()), did_you_mean(unknown[0], REGISTRY.backends())
        return f"--backend: no backend {', '.join(unknown)}; there are {there}{meant}"
    peers = ("none", *(peer.distribution for peer in PEERS))
    if unknown := [name for name in _names(args.peer) if name not in peers]:
        return f"--peer: no peer {', '.join(unknown)}; there are {', '.join(peers)}"
    fixed = [name for name in args.presets if name in _FIXED]
    given = [
        f"--{name}" for name in ("backend", "peer", "device", "kind", "gates", "only") if getattr(args, name)
    ]
    if fixed and given:
        return f"{fixed[0]} takes no {', '.join(given)}"
    if args.plot and not version_of("matplotlib"):
        return f"--plot: {plot.NO_LIBRARY}"
    return None


def _lacking(presets: list[str], args: argparse.Namespace) -> str | None:
    """What a preset needs and this environment lacks."""
    for preset in presets:
        if preset == "xla" and not version_of("jax"):
            return f"xla needs jax, which is not installed: {install_line('jax')}"
        for kind in dict.fromkeys(_kinds(preset, args)):
            if kind != "numpy" and not version_of(kind):
                instead = "" if preset == "h200-stages" else ", or give --kind numpy"
                return f"{preset} needs {kind}, which is not installed: pip install {kind}{instead}"
            if args.device and not has_device(kind, args.device.partition(":")[0]):
                return f"--device {args.device}: {kind} has no such device here"
    return None


def _kinds(preset: str, args: argparse.Namespace) -> list[ArrayKind]:
    """The array libraries of a preset's cases."""
    if preset == "h200-stages":
        return ["torch"]
    if preset == "shape":
        return [_kind(args.kind or "torch", preset, args)]
    return [_kind(case.kind, preset, args) for case in PRESETS.get(preset, ())]


def _kind(own: ArrayKind, preset: str, args: argparse.Namespace) -> ArrayKind:
    """The array library of a case: the one asked for, else its own; where any will do, one that is installed."""
    if args.kind:
        kind: ArrayKind = args.kind
        return kind
    anything_will_do = preset in ("quick", "shape")
    return "numpy" if anything_will_do and not version_of(own) else own


def _work(preset: str, args: argparse.Namespace) -> Iterator[Work]:
    """What a preset consists of, in pieces small enough for a progress bar."""
    budget = Budget(args.samples, args.seconds)
    only, peers = _names(args.backend), _names(args.peer)
    if preset == "cpu":
        from kdacore.bench import cpu

        case = cases.tiny(cpu.CASE) if args.tiny else cpu.CASE
        yield case.name, lambda: cpu.run_preset(case, Budget(min(args.samples, 9), max(args.seconds, 60.0)))
        return
    if preset == "xla":
        from kdacore.bench import xla

        case = cases.tiny(xla.CASE) if args.tiny else xla.CASE
        yield case.name, lambda: xla.run_preset(case, Budget(min(args.samples, 15), max(args.seconds, 60.0)))
        return
    if preset == "dispatch":
        from kdacore.bench import dispatch

        yield "null backend", lambda: dispatch.run_preset(200 if args.tiny else dispatch.CALLS)
        return
    if preset == "import":
        from kdacore.bench import imports

        yield "fresh processes", lambda: imports.run_preset(3 if args.tiny else imports.PROCESSES)
        return
    if preset == "h200-stages":
        from kdacore.bench import stages

        device = args.device or _default_device("torch")
        yield from stages.pieces(device, only, args.only, budget, args.tiny)
        return
    listed = (_own_case(args),) if preset == "shape" else PRESETS[preset]
    fitted = tuple(_fitted(case, preset, args) for case in listed)
    device = args.device or _default_device(fitted[0].kind)
    if preset == "h200-first-call":
        from kdacore.bench import first_call

        yield "fresh processes", lambda: first_call.run_preset(preset, fitted, device, only)
        return
    for case in fitted:
        for gates in case.gate_sets:
            if not cases.is_wanted(case.name, args.only) or (
                args.gates and gates not in args.gates.split(",")
            ):
                continue
            yield (
                f"{case.name}, {gates}",
                lambda c=case, g=gates: runner.run_case(preset, c, g, device, only, budget, peers),
            )


def _fitted(case: Case, preset: str, args: argparse.Namespace) -> Case:
    case = dataclasses.replace(case, kind=_kind(case.kind, preset, args))
    return cases.tiny(case) if args.tiny else case


def _own_case(args: argparse.Namespace) -> Case:
    B, T, H, HV, K, V = args.shape
    op = "fused_recurrent_kda" if args.phase == "decode" else "chunk_kda"
    kind: ArrayKind = args.kind or "torch"
    return Case(
        name="your shape",
        phase=args.phase,
        op=op,
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        dtype=args.dtype,
        kind=kind,
    )


def _default_device(kind: str) -> str:
    if kind == "torch":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu"


def _list(out: Console) -> None:
    for name in SPECIAL:
        out.print(f"{name}: a program of its own")
        if name == "h200-stages":
            from kdacore.bench import stages

            for case in stages.CASES:
                out.print(f"    {case.name}")
    for name, listed in PRESETS.items():
        out.print(f"{name}:")
        rows = [row for case in listed for row in _rows(case)]
        out.print(report.table(("case", "phase", "dtype", "must (aim)", "peer"), rows, out, indent=4), end="")


def _rows(case: Case) -> Iterator[tuple[str, ...]]:
    """A case in the list, its goals below one another: beside one another they are wider than a terminal."""
    goals = [f"{backend} {_goal(goal)}" for backend, goal in case.goals.items()] or ["-"]
    yield case.name, case.phase, case.dtype, goals[0], results.duration(case.peer)
    for goal in goals[1:]:
        yield "", "", "", goal, ""


def _goal(goal: Goal) -> str:
    """``1.100 ms (900.00 us)``, or ``1.25 x (1.15 x) of`` another case."""
    must, aim = (
        results.duration(x) if not goal.of else f"{x:g} x" if x is not None else "-"
        for x in (goal.must, goal.aim)
    )
    return must + f" ({aim})" * (aim != "-") + f" of {goal.of}" * bool(goal.of)
