"""``kdacore build``: compile the CUDA kernels ahead of time, so that no first call waits for a compiler."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdacore import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help="for example sm_90a, or sm_90a,sm_100f; again for more (default: all packaged)",
    )
    add(
        "--folder", type=Path, default=None, help="where cubins and manifest go (default: the package itself)"
    )


def run(args: argparse.Namespace) -> int:
    """Needs no GPU. A kernel that does not build raises, with the compiler's own output."""
    from kdacore_cuda import prebuilt

    out = report.console()
    archs = [arch for given in args.arch for arch in given.split(",")]
    built = prebuilt.build_all(
        archs or prebuilt.PACKAGED_ARCHS, args.folder or prebuilt.FOLDER, report=out.print
    )
    out.print(f"{len(built)} kernels in {args.folder or prebuilt.FOLDER}")
    return report.OK
