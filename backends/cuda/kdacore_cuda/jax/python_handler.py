"""The XLA handler in Python, for machines that the native one (csrc/ffi_handler.c) does not load on.

It does the same with the same programs (:mod:`kdacore_cuda.runtime.launch_program`), through ctypes. It
holds the interpreter's lock while it does, so it waits for every busy Python thread.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
import threading
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from kdacore_cuda.build.packaged_cubins import FOLDER
from kdacore_cuda.jax.xla_interface import Handler
from kdacore_cuda.runtime import launch_program as programs
from kdacore_cuda.runtime.driver import Driver
from kdacore_cuda.runtime.launcher import STATIC_SHARED, launch_attribute, launch_config

_P, _I64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
_METADATA_EXTENSION, _EXECUTE, _ARRAY, _S64 = 1, 3, 1, 5
_INTERNAL, _INVALID_ARGUMENT, _FAILED_PRECONDITION = 13, 3, 9
API_VERSION = (0, 3)
"""Of XLA's interface, that these structs are written for."""


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct of XLA's interface: its size and extensions come first in all of them."""
    head = (("struct_size", _SIZE), ("extension_start", _P))
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


_Version = _struct("Version", ("major", _INT), ("minor", _INT))
_ErrorArgs = _struct("ErrorArgs", ("message", ctypes.c_char_p), ("code", _INT))
_StreamArgs = _struct("StreamArgs", ("ctx", _P), ("stream", _P))
_Buffer = _struct("Buffer", ("dtype", _INT), ("data", _P), ("rank", _I64), ("dims", _P))
_Buffers = _struct(
    "Buffers", ("size", _I64), ("types", _P), ("items", ctypes.POINTER(ctypes.POINTER(_Buffer)))
)
_Attrs = _struct(
    "Attrs",
    *(("size", _I64), ("types", ctypes.POINTER(_INT)), ("names", ctypes.POINTER(_P))),
    ("items", ctypes.POINTER(_P)),
)
_Api = _struct(
    "Api",
    ("version", _Version),
    *(
        (name, _P)
        for name in ("internal", "create_error", "get_message", "destroy", "register", "get_stream")
    ),
)
_Frame = _struct(
    "Frame",
    *(("api", ctypes.POINTER(_Api)), ("ctx", _P), ("stage", _INT)),
    *(("args", _Buffers), ("rets", _Buffers), ("attrs", _Attrs)),
)


class _Span(ctypes.Structure):
    _fields_ = (("at", _P), ("size", _SIZE))


class _Array(ctypes.Structure):
    _fields_ = (("dtype", _INT), ("size", _SIZE), ("data", _P))


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("type", _INT), ("next", _P), ("metadata", _P))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32))


_Call = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_Frame))
_Create = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_ErrorArgs))
_GetStream = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_StreamArgs))


class _Refusal(NamedTuple):
    """Why a call is not made: the code of XLA's error, and its text."""

    code: int
    text: str


class _Launches:
    """The kernels of a process, and the launches of programs."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.cubins: dict[int, bytes] = {}
        self._handles: dict[int, int] = {}
        self._shared: dict[tuple[int, int], int] = {}
        self._numbers = count(secrets.randbits(62))
        self._lock = threading.Lock()

    def add_kernel(self, identity: int, cubin: bytes) -> None:
        self.cubins.setdefault(identity, cubin)

    def run(self, words: list[int], addresses: list[int], arguments: int, stream: int) -> _Refusal | None:
        if len(words) < programs.HEADER_WORDS or words[0] != programs.MAGIC << 8 | programs.FORMAT:
            return _Refusal(_INVALID_ARGUMENT, "the call was compiled by another version of kdacore")
        if words[3:5] != [arguments, len(addresses) - arguments]:
            return _Refusal(_INVALID_ARGUMENT, "the program is of another call")
        device = self.driver.current_device()
        found = self.driver.capability(device), self.driver.multiprocessors(device)
        if found != tuple(words[1:3]):
            return _Refusal(
                _FAILED_PRECONDITION,
                f"compiled for sm_{words[1]} with {words[2]} multiprocessors, "
                f"but GPU {device} is sm_{found[0]} with {found[1]}",
            )
        number, at = next(self._numbers), programs.HEADER_WORDS
        for _ in range(words[5]):
            step = words[at : at + words[at + 1]]
            at += words[at + 1]
            if step[0] == programs.CLEAR:
                self.driver.clear(addresses[step[2]] + step[3], step[4], stream)
            elif step[0] == programs.COPY:
                if addresses[step[2]] != addresses[step[3]]:
                    self.driver.copy(addresses[step[2]], addresses[step[3]], step[4], stream)
            elif (handle := self._handle(step, device)) is None:
                text = f"no machine code {step[2] & (2**64 - 1):016x} in this version of kdacore"
                return _Refusal(_INVALID_ARGUMENT, text)
            else:
                self._launch(step, handle, addresses, stream, number)
        return None

    def _launch(self, step: list[int], handle: int, addresses: list[int], stream: int, number: int) -> None:
        places = step[programs.KERNEL_WORDS : programs.KERNEL_WORDS + 2 * step[12]]
        values = step[programs.KERNEL_WORDS + 2 * step[12] :]
        for place, offset in zip(places[::2], places[1::2], strict=True):
            array = place >> 32 & 0xFFFFFFFF
            value = number if array == programs.LAUNCH_NUMBER else addresses[array] + offset
            values[(place & 0xFFFFFFFF) // 8] = value
        buffer = ctypes.create_string_buffer(np.array(values, np.int64).tobytes())
        pointers = (_P * 1)(ctypes.addressof(buffer))
        attribute = launch_attribute()
        config = launch_config(step[7], step[8], step[9], stream, attribute, bool(step[10]))
        arguments = (ctypes.addressof(config), handle, ctypes.addressof(pointers), None)
        self.driver.check("cuLaunchKernelEx", self.driver.launch(*arguments))

    def _handle(self, step: list[int], device: int) -> int | None:
        """The kernel of a step, which may then use its shared memory; None where there is no code."""
        identity, shared = step[2] & (2**64 - 1), step[9]
        with self._lock:
            handle = self._handles.get(identity)
            if handle is None:
                cubin = self.cubins.get(identity)
                path = FOLDER / f"{identity:016x}.cubin"
                if cubin is None and not path.is_file():
                    return None
                entry = struct.pack("<4q", *step[3:7]).rstrip(b"\0").decode()
                handle = self.driver.load_kernel(path.read_bytes() if cubin is None else cubin, entry)
                self._handles[identity] = handle
            if shared > max(STATIC_SHARED, self._shared.get((identity, device), 0)):
                self.driver.allow_shared(handle, shared, device)
                self._shared[identity, device] = shared
        return handle


def make_handler(driver: Driver, has_stream: bool = True) -> Handler:
    """A handler that launches through ``driver``. ``has_stream``: False for tests on the CPU, where
    XLA has no stream."""
    launches = _Launches(driver)

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
            with driver.context_of(_stream(frame) if has_stream else None) as stream:
                addresses = [
                    x.items[i].contents.data or 0 for x in (frame.args, frame.rets) for i in range(x.size)
                ]
                refusal = launches.run(_program(frame.attrs), addresses, frame.args.size, stream)
        except BaseException as error:  # noqa: BLE001  # what passes here is printed, and the call succeeds
            refusal = _Refusal(_INTERNAL, str(error) or repr(error))
        return None if refusal is None else _error(frame, refusal)

    callback = _Call(execute)
    return Handler(callback, launches.add_kernel)


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
    raise ValueError("the call has no program")


def _error(frame: Any, refusal: _Refusal) -> int:
    text = f"kdacore_cuda: {refusal.text}".encode()
    args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, text, refusal.code)
    return int(ctypes.cast(frame.api.contents.create_error, _Create)(args) or 0)
