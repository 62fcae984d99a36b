"""``kdacore tune``: measure on this device what backends cost, or which launch configurations are fastest."""

from __future__ import annotations

import argparse

from kdacore import report
from kdacore.argument_types import one_of
from kdacore.cli import tune_configs, tune_costs
from kdacore.cli.tune_device import complain
from kdacore.files import writable
from kdacore.ops import OPS

_ONLY = {"costs": ("fresh", "minutes"), "configs": ("op", "arch", "json")}
"""Options of one kind of tuning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        default="costs",
        choices=tuple(_ONLY),
        help="costs: which backend automatic choice takes (default); configs: launch configurations of kernels",
    )
    add("--list", action="store_true", help="list what would be measured; needs no GPU")
    add("--only", default="", metavar="TEXT", help="only what has this in its name, as in --list")
    add("--device", default=None, help="cuda, cuda:1, cpu (default: a GPU that torch sees, else cpu)")
    add(
        "--out",
        type=writable,
        metavar="PATH",
        help="the file to write (default: for costs where dispatch reads it, for configs ARCH.json here)",
    )
    add("--samples", type=int, default=None, help="timings of each contender (costs 7, configs 15)")
    add(
        "--seconds", type=float, default=None, help="at most this long on one comparison (costs 1, configs 5)"
    )
    add(
        "--minutes",
        type=float,
        default=None,
        help=f"costs: at most this long in all ({tune_costs.MINUTES:g})",
    )
    add("--fresh", action="store_true", help="costs: do not go on from an interrupted run")
    add(
        "--op",
        action="append",
        default=[],
        type=one_of(OPS, "op"),
        help="configs: only this op (again for more)",
    )
    add("--arch", default=None, help="configs, with --list: an architecture (default: the GPU's, else sm_90)")
    add("--json", type=writable, metavar="PATH", help="configs: write every measurement there")


def run(args: argparse.Namespace) -> int:
    for number in ("samples", "seconds", "minutes"):
        if (given := getattr(args, number)) is not None and not given > 0:
            return complain(f"--{number} must be positive", report.USAGE)
    other = "configs" if args.what == "costs" else "costs"
    if stray := [f"--{name}" for name in _ONLY[other] if getattr(args, name)]:
        return complain(f"{', '.join(stray)}: for `kdacore tune {other}`", report.USAGE)
    return tune_costs.run(args) if args.what == "costs" else tune_configs.run(args)
