"""Files that are written when a long run ends: whether they can be is found out before it begins."""

from __future__ import annotations

import argparse
from pathlib import Path


def check_writable(path: Path) -> None:
    """Make the folder of a file that will be written. OSError, now, when the file cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


def writable(text: str) -> Path:
    """A path on the command line. argparse turns the error into exit status 2."""
    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path
