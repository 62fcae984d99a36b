"""The disk cache of compiled kernels: one file per key in the user's cache folder.

A file is ``sha256(payload) + payload``, so a torn or damaged entry is a miss and does not reach the
driver. A folder that belongs to someone else, or that others may write to, is refused: its code
would run with this user's rights.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kdacore import config, files

_DIGEST = 32
_LIMIT = 1 << 28
"""Bytes; the largest cubin has a few hundred thousand."""


def cache_root() -> Path:
    """``cuda`` under kdacore's cache folder (``KDACORE_CACHE_DIR``)."""
    return config.get().cache_dir / "cuda"


def _owned(folder: Path) -> bool:
    """Whether only this user may write to it: owned by this user, writable by nobody else."""
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are the user's
        return True
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


class DiskCache:
    """Bytes by key. A damaged entry and an unusable folder are misses; neither raises.

    Args:
        root: the folder; None: :func:`cache_root`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_root() if root is None else root

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """The payload stored under ``key``, or None when absent, damaged or not ours."""
        try:
            if not _owned(self.root):
                return None
            stored = files.read_ours(self._path(key), _LIMIT)
        except OSError:
            return None
        digest, payload = stored[:_DIGEST], stored[_DIGEST:]
        return payload if hashlib.sha256(payload).digest() == digest else None

    def put(self, key: str, payload: bytes) -> bool:
        """Store ``payload`` atomically; creates the folder. False when that is unusable or the disk is full."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _owned(self.root):
                return False
            files.remove_stale(self.root)
            files.write_whole(self._path(key), hashlib.sha256(payload).digest() + payload)
        except OSError:
            return False
        return True
