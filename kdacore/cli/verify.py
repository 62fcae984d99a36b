"""``kdacore verify``: run the conformance suite on this machine, say how each backend did, and keep a record."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kdacore import report
from kdacore.argument_types import at_least
from kdacore.cli.time_limit import not_terminated
from kdacore.files import check_writable
from kdacore.registry import REGISTRY, missing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("backends", nargs="*", metavar="BACKEND", help="default: every backend that is available here")
    add("--device", choices=("cpu", "cuda", "tpu"), help="where (default: the backend's own first choice)")
    add("--level", default="quick", choices=("quick", "full"), help="how many cases (default quick)")
    add(
        "--random",
        type=at_least(0),
        default=0,
        metavar="N",
        help="also N random calls of whole ops, and N of stages",
    )
    add("--seed", type=at_least(0), default=0, metavar="S", help="of the first random call")
    add(
        "--kind",
        action="append",
        default=[],
        choices=("numpy", "torch", "jax"),
        help="only these array kinds",
    )
    add("--jobs", type=at_least(1), default=1, metavar="N", help="processes (default 1)")
    add("--folder", type=Path, default=None, help="where the records go (default: the cache folder)")


def run(args: argparse.Namespace) -> int:
    """0 when every backend conforms, 1 when one does not, 130 when the run was interrupted."""
    from kdacore.testing.verify import default_folder, default_path, verify

    out = report.console()
    folder = args.folder or default_folder()
    try:
        check_writable(folder / f"{os.getpid()}.tmp")
    except OSError as error:
        source = "--folder" if args.folder else "KDACORE_CACHE_DIR"
        print(f"kdacore verify: {source}: cannot write into {folder}: {error}", file=sys.stderr)
        return report.USAGE
    names = args.backends or [n for n, r in REGISTRY.backends().items() if not missing(r.backend)]
    failed = False
    for name in names:
        options = {"seed": args.seed, "kinds": tuple(args.kind), "jobs": args.jobs}
        found = verify(name, args.device, args.level, args.random, **options)
        with not_terminated():
            out.print("\n".join(found.lines()))  # first: the disk may be full by now
            path = default_path(found, folder)
            found.write(path)
            out.print(f"  record: {path}\n")
        if found.interrupted:
            return report.INTERRUPTED
        failed = failed or not found.ok
    return report.BROKEN if failed else report.OK
