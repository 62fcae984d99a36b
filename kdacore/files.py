"""Files that kdacore writes and reads again: whole or not at all, and found out early when they cannot be."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

TEMPORARY = ".tmp"
_STALE = 3600.0
"""Seconds after which a temporary file is left over: whoever wrote it was killed."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_writable(path: Path) -> None:
    """Make the folder of a file that will be written. OSError, now, when the file cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


def writable(text: str) -> Path:
    """A path on the command line. argparse turns the error into exit status 2."""
    import argparse

    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def write_whole(path: Path, contents: str | bytes, rights: int = 0o600) -> None:
    """Write a file of which readers see all or nothing, and nothing is left of one that cannot be written.

    Args:
        path: the file.
        contents: text is written as UTF-8.
        rights: its access rights.

    Raises:
        OSError: naming the file (a full disk names none by itself).
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=TEMPORARY)
        with os.fdopen(handle, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
        os.chmod(name, rights)
        os.replace(name, path)
    except OSError as error:
        _unlink(name)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:  # an interrupt leaves nothing behind either
        _unlink(name)
        raise


def write_named(path: Path, text: str) -> None:
    """Write a file that a user named: as :func:`write_whole` does, unless it is no plain file or its folder takes none.

    Links stay links and devices devices. A new file gets the rights that any other would get.

    Raises:
        OSError: naming the file.
    """
    path = Path(os.path.realpath(path))
    existed = path.exists()
    if (existed and not path.is_file()) or not os.access(path.parent, os.W_OK):
        _write_through(path, text)
        return
    path.open("a").close()  # with the rights that a new file gets
    try:
        write_whole(path, text, stat.S_IMODE(path.stat().st_mode))
    except BaseException:
        if not existed:
            _unlink(str(path))
        raise


def _write_through(path: Path, text: str) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _unlink(name: str) -> None:
    if name:
        with contextlib.suppress(OSError):
            os.unlink(name)


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left of :func:`write_whole` in a folder."""
    before = time.time() - _STALE
    with contextlib.suppress(OSError):
        for left in folder.glob(f"tmp*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                if left.lstat().st_mtime < before:
                    left.unlink()


def is_ours(status: os.stat_result) -> bool:
    """Does a file or folder belong to this user or to root, and may nobody else write it?"""
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are the user's
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE


def read_ours(path: Path, limit: int) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes that only this user and root can have written.

    Raises:
        OSError: there is no such file. Opening never waits, as it would for the writer of a FIFO.
    """
    if not is_ours(path.parent.stat()):
        raise PermissionError(f"{path.parent} belongs to others, or others may write it")
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit or not is_ours(status):
            raise PermissionError(f"{path} is no plain file of at most {limit} bytes that is ours alone")
        return file.read(limit)
