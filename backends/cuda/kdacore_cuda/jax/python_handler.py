"""The XLA handler in Python, for machines that the native one (csrc/executor/xla_handler.c) does not load on.

It does the same with the same programs (:mod:`kdacore_cuda.runtime.program`), through ctypes. It
holds the interpreter's lock while it does, so it waits for every busy Python thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kdacore_cuda.runtime.python_executor import DeviceMismatchError, ProgramError, PythonExecutor, damaged

_P, _I64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
_METADATA_EXTENSION, _EXECUTE, _ARRAY, _S64 = 1, 3, 1, 5
_INTERNAL, _INVALID_ARGUMENT, _FAILED_PRECONDITION = 13, 3, 9
API_VERSION = (0, 3)
"""Of XLA's interface, that these structs are written for."""


def _plain(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct that begins with its size and extensions, as most of XLA's interface do."""
    return _plain(name, ("struct_size", _SIZE), ("extension_start", _P), *fields)


_Version = _struct("Version", ("major", _INT), ("minor", _INT))
_ErrorArgs = _struct("ErrorArgs", ("message", ctypes.c_char_p), ("code", _INT))
_StreamArgs = _struct("StreamArgs", ("ctx", _P), ("stream", _P))
_Buffer = _struct("Buffer", ("dtype", _INT), ("data", _P), ("rank", _I64), ("dims", _P))
_Items = ctypes.POINTER(ctypes.POINTER(_Buffer))
_Buffers = _struct("Buffers", ("size", _I64), ("types", _P), ("items", _Items))
_Attrs = _struct(
    "Attrs",
    *(("size", _I64), ("types", ctypes.POINTER(_INT)), ("names", ctypes.POINTER(_P))),
    ("items", ctypes.POINTER(_P)),
)
_FUNCTIONS = ("internal", "create_error", "get_message", "destroy", "register", "get_stream")
_Api = _struct("Api", ("version", _Version), *((name, _P) for name in _FUNCTIONS))
_Frame = _struct(
    "Frame",
    *(("api", ctypes.POINTER(_Api)), ("ctx", _P), ("stage", _INT)),
    *(("args", _Buffers), ("rets", _Buffers), ("attrs", _Attrs)),
)


_Span = _plain("Span", ("at", _P), ("size", _SIZE))
_Array = _plain("Array", ("dtype", _INT), ("size", _SIZE), ("data", _P))
_Extension = _plain("Extension", ("struct_size", _SIZE), ("type", _INT), ("next", _P), ("metadata", _P))
_Metadata = _plain("Metadata", ("struct_size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32))
_Call = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_Frame))
_Create = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_ErrorArgs))
_GetStream = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_StreamArgs))


def make_handler(executor: PythonExecutor, has_stream: bool = True) -> object:
    """A handler that launches by ``executor``. ``has_stream``: False for tests on the CPU, where
    XLA has no stream."""

    def execute(pointer: Any) -> int | None:
        frame = pointer.contents
        if frame.extension_start:
            extension = ctypes.cast(frame.extension_start, ctypes.POINTER(_Extension)).contents
            if extension.type == _METADATA_EXTENSION:
                _answer(frame, extension)
                return None
        if frame.stage != _EXECUTE:
            return None
        try:
            with executor.driver.context_of(_stream(frame) if has_stream else None) as stream:
                addresses = [
                    x.items[i].contents.data or 0 for x in (frame.args, frame.rets) for i in range(x.size)
                ]
                executor.run(_program(frame.attrs), tuple(addresses), stream)
                return None
        except ProgramError as error:
            return _error(frame, _INVALID_ARGUMENT, str(error))
        except DeviceMismatchError as error:
            return _error(frame, _FAILED_PRECONDITION, str(error))
        except BaseException as error:  # noqa: BLE001  # what passes here is printed, and the call succeeds
            return _error(frame, _INTERNAL, str(error) or repr(error))

    return _Call(execute)


def _answer(frame: Any, extension: Any) -> None:
    metadata = ctypes.cast(extension.metadata, ctypes.POINTER(_Metadata)).contents
    version = frame.api.contents.version if frame.api else None
    known = version is not None and version.major == API_VERSION[0]
    metadata.version.major = API_VERSION[0]
    metadata.version.minor = version.minor if known and version is not None else API_VERSION[1]
    metadata.traits = 0  # not for command buffers: loading while a stream records is not allowed


def _stream(frame: Any) -> int:
    args = _StreamArgs(ctypes.sizeof(_StreamArgs), None, frame.ctx, None)
    error = ctypes.cast(frame.api.contents.get_stream, _GetStream)(args)
    if error:
        raise RuntimeError("XLA has no stream for this call")
    return int(args.stream or 0)


def _program(attrs: Any) -> list[int]:
    for i in range(attrs.size):
        name = ctypes.cast(attrs.names[i], ctypes.POINTER(_Span)).contents
        if ctypes.string_at(name.at, name.size) == b"program" and attrs.types[i] == _ARRAY:
            array = ctypes.cast(attrs.items[i], ctypes.POINTER(_Array)).contents
            if array.dtype == _S64:
                return list((_I64 * array.size).from_address(array.data))
    raise damaged("it has no program")


def _error(frame: Any, code: int, text: str) -> int:
    args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, f"kdacore_cuda: {text}".encode(), code)
    return int(ctypes.cast(frame.api.contents.create_error, _Create)(args) or 0)
