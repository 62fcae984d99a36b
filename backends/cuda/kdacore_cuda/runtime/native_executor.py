"""The packaged native executor (csrc/executor), called by ctypes."""

from __future__ import annotations

import ctypes
import secrets
from pathlib import Path

import numpy as np

from kdacore_cuda.build import packaged_cubins
from kdacore_cuda.runtime import driver
from kdacore_cuda.runtime.driver import NO_CONTEXT, DriverError
from kdacore_cuda.runtime.program import Start
from kdacore_cuda.runtime.python_executor import DeviceMismatchError, ProgramError

_DEVICE, _DRIVER = 1, 2
_P, _I64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int


class _Failure(ctypes.Structure):
    """``Failure`` of csrc/executor/executor.h."""

    _fields_ = (("kind", _INT), ("status", _INT), ("call", ctypes.c_char_p), ("text", ctypes.c_char * 480))


class NativeExecutor:
    """The library ``path``, launching through the driver ``library``.

    Raises OSError where the library does not load, or the driver lacks a function.
    """

    def __init__(self, path: Path, library: str = driver.LIBRARY) -> None:
        # PyDLL, since calls take microseconds, less than releasing the interpreter's lock.
        self.library = native = ctypes.PyDLL(str(path))
        native.kdacore_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, _I64]
        native.kdacore_open.restype = ctypes.c_char_p
        native.kdacore_add_kernel.argtypes = [ctypes.c_uint64, ctypes.c_char_p, _SIZE]
        # Counts as pointers, which registers hold alike: ctypes takes half a microsecond for a c_int64.
        native.kdacore_run.argtypes = [_P, _P, ctypes.c_char_p, _P, _P]
        native.kdacore_handle.argtypes = [ctypes.c_uint64, ctypes.c_char_p, _INT, _INT, ctypes.POINTER(_P)]
        native.kdacore_failure.restype = ctypes.POINTER(_Failure)
        wrong = native.kdacore_open(
            library.encode(), str(packaged_cubins.FOLDER).encode(), secrets.randbits(62)
        )
        if wrong:
            raise OSError(wrong.decode())

    def add_kernel(self, identity: int, cubin: bytes) -> None:
        """Make a cubin known by its id."""
        if self.library.kdacore_add_kernel(identity, cubin, len(cubin)):
            raise MemoryError("no room for another kernel in the executor")

    def handle(self, identity: int, entry: str, shared: int, device: int) -> int:
        """As :meth:`kdacore_cuda.runtime.python_executor.PythonExecutor.handle`."""
        found = _P()
        if self.library.kdacore_handle(identity, entry.encode(), shared, device, ctypes.byref(found)):
            self._raise()
        return int(found.value or 0)

    def start(self, words: np.ndarray[tuple[int], np.dtype[np.int64]], device: int) -> Start:
        """As :meth:`kdacore_cuda.runtime.python_executor.PythonExecutor.start`."""
        run, address, length = self.library.kdacore_run, words.ctypes.data, len(words)

        def start(stream: int, values: bytes) -> None:
            if run(address, length, values, len(values) >> 3, stream):
                self._recover(device)
                if run(address, length, values, len(values) >> 3, stream):
                    self._raise()

        start.words = words  # type: ignore[attr-defined]  # the library reads them at every call
        return start

    def _recover(self, device: int) -> None:
        """Make torch's context current in a thread that has none, as autograd's new ones; nothing was launched then.
        Raises where something else was wrong."""
        found = self.library.kdacore_failure().contents
        if found.kind != _DRIVER or found.status != NO_CONTEXT or found.call != b"cuCtxGetDevice":
            self._raise()
        driver.driver().make_current(device)

    def _raise(self) -> None:
        found = self.library.kdacore_failure().contents
        text = found.text.decode()
        if found.kind == _DRIVER:
            raise DriverError(found.call.decode(), found.status, text)
        raise (DeviceMismatchError if found.kind == _DEVICE else ProgramError)(text)
