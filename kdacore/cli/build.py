"""``kdacore build``: compile backends' kernels ahead of time, so that no first call waits for a compiler."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kdacore import report
from kdacore.command_types import KernelBuilder
from kdacore.errors import list_names
from kdacore.registry import REGISTRY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", default=None, metavar="NAME", help="only the kernels of this backend")
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
    known = REGISTRY.listed("kdacore_kernel_builders", KernelBuilder)
    builders = [b for b in known if args.backend in (None, b.backend)]
    if not known:
        print("kdacore build: no plugin has kernels to build", file=sys.stderr)
        return report.USAGE
    if not builders:
        wanted = list_names(b.backend for b in known)
        return _usage("--backend", f"got {args.backend!r}; wanted one of {wanted}")
    if args.folder and len(builders) > 1:
        names = list_names(b.backend for b in builders)
        return _usage("--folder", f"is for one backend; --backend chooses it among {names}")
    given = tuple(dict.fromkeys(arch for words in args.arch for arch in words.split(",")))
    wanted_archs = {b.backend: given or b.architectures for b in builders}
    for builder in builders:
        for arch in wanted_archs[builder.backend]:
            if problem := _problem(builder, arch):
                examples = " or ".join(builder.architectures)
                return _usage("--arch", f"got {arch!r}; wanted one such as {examples} ({problem})")
    for builder in builders:
        status = _build(builder, wanted_archs[builder.backend], args.folder)
        if status != report.OK:
            return status
    return report.OK


def _problem(builder: KernelBuilder, arch: str) -> str | None:
    """Why an architecture cannot be built for. One that is built by default may be there already, and then needs no
    compiler."""
    return None if arch in builder.architectures else builder.problem(arch)


def _build(builder: KernelBuilder, archs: tuple[str, ...], given: Path | None) -> int:
    out = report.console()
    folder = given or builder.folder
    try:
        built = builder.build(archs, folder, out.print)
    except OSError as error:
        hint = "" if given else "; --folder names another place"
        return _usage("--folder", f"cannot write {folder}: {error}{hint}")
    out.print(f"{len(built)} kernels in {folder}")
    return report.OK


def _usage(option: str, what: str) -> int:
    print(f"kdacore build: {option}: {what}", file=sys.stderr)
    return report.USAGE
