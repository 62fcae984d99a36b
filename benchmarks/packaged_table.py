"""The command line of the programs that make a table of the package from committed records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(about: str | None, text_of: Callable[[], str], file: Path, root: Path) -> int:
    """Write the table, or with ``--check`` compare it. Returns the exit status: 1 if a record is damaged or the table
    differs.

    Args:
        about: the program's docstring.
        text_of: makes the table's text.
        file: where the table is.
        root: the folder that paths are printed from.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table differs")
    args = parser.parse_args()
    try:
        text = text_of()
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.check:
        same = file.read_text(encoding="utf-8") == text
        print(f"{file.relative_to(root)}: {'is' if same else 'is not'} what the records give")
        return 0 if same else 1
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"{file.relative_to(root)}: written")
    return 0
