"""``kdacore explain``: for one call, every backend, supported or every reason why not, and the choice."""

from __future__ import annotations

import argparse
import json

from kdacore import report
from kdacore.argument_types import at_least
from kdacore.cli import call_arguments
from kdacore.feature_matrix import explain_call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    call_arguments.add_arguments(parser, required=True)
    parser.add_argument(
        "--cp",
        type=at_least(1),
        default=1,
        metavar="RANKS",
        help="the call of one of so many ranks, with its own T",
    )
    parser.add_argument("--json", action="store_true", help="print the selection as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when some backend serves the call, 1 when none (or not the forced one) does."""
    selection = explain_call(call_arguments.call_of(args), args.backend, args.cp)
    if args.json:
        print(json.dumps(call_arguments.selection_dict(selection), indent=1))
    else:
        out = report.console()
        out.print(report.wrapped(selection.text, out))
    return report.OK if selection.backend else report.BROKEN
