"""The disk cache of compiled kernels: one file per key in the user's cache folder.

A file is ``sha256(payload) + payload``, so a torn or damaged entry is a miss and does not reach the
driver. A folder that belongs to another user, or that others may write to, is refused: its code
would run with this user's rights.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from kdacore import config, files

_DIGEST = 32
_LIMIT = 1 << 28
"""Bytes; the largest cubin has a few hundred thousand."""


def _path(key: str) -> Path:
    return config.get().cache_dir / "cuda" / f"{key}.bin"


def get(key: str) -> bytes | None:
    """The payload stored under ``key``, or None when absent, damaged or not ours."""
    try:
        stored = files.read_ours(_path(key), _LIMIT)
    except OSError:
        return None
    digest, payload = stored[:_DIGEST], stored[_DIGEST:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def put(key: str, payload: bytes) -> None:
    """Store ``payload`` atomically; creates the folder. Stores nothing where that is unusable or the disk is full."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if files.is_ours(path.parent.stat()):
            files.remove_stale(path.parent)
            files.write_whole(path, hashlib.sha256(payload).digest() + payload)
