"""Compiled files in the package: named by their content, with a manifest that ties them to their sources.

``manifest.json`` is the only place where a file's readable name stands. It maps that name to the file
(``<first 16 hex digits of the content's sha256><suffix>``) and to the sources that it was compiled from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"

Row = dict[str, Any]
"""What the manifest says of one file. ``file``: its name; ``source``: hash of its sources; ``sha256``: of its content;
and what the kind of file has besides."""
_REQUIRED = ("file", "source", "sha256")


class PackagedFiles(NamedTuple):
    """A folder of compiled files of one kind."""

    folder: Path
    kind: str
    """The manifest's key for them."""
    suffix: str
    """Of their names."""

    def rows(self) -> dict[str, Row]:
        """The manifest's valid rows by readable name. Empty when the manifest is missing or damaged; raises nothing."""
        try:
            document = json.loads((self.folder / MANIFEST).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        rows = document.get(self.kind) if isinstance(document, dict) else None
        found = rows.items() if isinstance(rows, dict) else ()
        return {name: row for name, row in found if self._is_valid(row)}

    def _is_valid(self, row: object) -> bool:
        return (
            isinstance(row, dict)
            and all(isinstance(row.get(name), str) for name in _REQUIRED)
            and self.is_name(row["file"])
        )

    def is_name(self, name: str) -> bool:
        """Whether :meth:`add` names files so."""
        return re.fullmatch(r"[0-9a-f]{16}" + re.escape(self.suffix), name) is not None

    def read(self, row: Row | None, source: str) -> bytes | str:
        """The content of a row's file, or why it is not to be used.

        Args:
            row: one of :meth:`rows`, or None where there is none.
            source: the present hash of the sources.
        """
        if row is None:
            return "none is packaged"
        if row["source"] != source:
            return "the packaged one was compiled from other sources"
        try:
            content = (self.folder / row["file"]).read_bytes()
        except OSError as error:
            return f"it cannot be read: {error}"
        is_whole = hashlib.sha256(content).hexdigest() == row["sha256"]
        return content if is_whole else f"{row['file']} is damaged"

    def add(self, content: bytes, source: str) -> Row:
        """Write a file, and return its row. OSError when it cannot be written."""
        digest = hashlib.sha256(content).hexdigest()
        row = {"file": f"{digest[:16]}{self.suffix}", "source": source, "sha256": digest}
        (self.folder / row["file"]).write_bytes(content)
        return row

    def write_manifest(self, rows: Mapping[str, Row]) -> None:
        """Replace the manifest, and remove the files that it does not name. OSError when it cannot be written."""
        text = json.dumps({self.kind: dict(sorted(rows.items()))}, indent=1) + "\n"
        (self.folder / MANIFEST).write_text(text)
        named = {row["file"] for row in rows.values()}
        for path in self.folder.iterdir():
            if self.is_name(path.name) and path.name not in named:
                path.unlink()
