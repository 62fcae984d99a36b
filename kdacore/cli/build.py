"""``kdacore build``: compile the CUDA kernels ahead of time, so that no first call waits for a compiler."""

from __future__ import annotations

import argparse
import sys
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
    from kdacore_cuda import architectures
    from kdacore_cuda.build import compiler, packaged_cubins
    from kdacore_cuda.build import packaging as package_build

    out = report.console()
    given = dict.fromkeys(arch for words in args.arch for arch in words.split(","))
    for arch in given:
        # What is packaged may be there already: then no compiler need be.
        if arch not in architectures.PACKAGED_ARCHS and (problem := compiler.arch_problem(arch)):
            wanted = f"one such as {' or '.join(architectures.PACKAGED_ARCHS)}"
            print(f"kdacore build: --arch: got {arch!r}; wanted {wanted} ({problem})", file=sys.stderr)
            return report.USAGE
    folder = args.folder or packaged_cubins.FOLDER
    try:
        built = package_build.build_all(
            tuple(given) or architectures.PACKAGED_ARCHS, folder, report=out.print
        )
    except OSError as error:
        hint = "" if args.folder else "; --folder names another place"
        print(f"kdacore build: --folder: cannot write {folder}: {error}{hint}", file=sys.stderr)
        return report.USAGE
    out.print(f"{len(built)} kernels in {folder}")
    return report.OK
