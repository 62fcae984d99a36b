"""The driver calls that a launch needs, through ctypes: available wherever torch can use a GPU.

``PyDLL`` keeps the interpreter lock during a call: a launch takes microseconds, less than releasing
and taking the lock.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS, _CAPABILITY = 16, (75, 76)  # of CUdevice_attribute; major and minor
_MEMORY_CLOCK, _MEMORY_BUS = 36, 37  # kHz, bits
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: a launch in a thread that has not used CUDA yet, such as a new one of
autograd's."""
_CONFIG = struct.Struct("<7I4xQQI4x")
"""CUlaunchConfig: grid, block, shared memory, stream, attributes, their number."""
_ATTRIBUTE = struct.Struct("<i4xi60x")
"""CUlaunchAttribute."""
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_P = ctypes.c_void_p
_U = ctypes.c_uint


def _launch_config(
    grid: int, threads: int, shared: int, stream: int, overlaps: bool
) -> ctypes.Array[ctypes.c_char]:
    """A CUlaunchConfig and, behind it, the attribute of launches that may start before the previous one has ended. It
    counts if the launch ``overlaps``."""
    made = ctypes.create_string_buffer(_CONFIG.size + _ATTRIBUTE.size)
    attribute = ctypes.addressof(made) + _CONFIG.size
    _CONFIG.pack_into(made, 0, grid, 1, 1, threads, 1, 1, shared, stream, attribute, int(overlaps))
    _ATTRIBUTE.pack_into(made, _CONFIG.size, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    return made


class DriverError(RuntimeError):
    """A CUDA driver call failed. ``code`` is the ``CUresult``."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call, self.code, self.text = call, code, text
        super().__init__(f"{call} failed: {text} ({code})")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.call, self.code, self.text)


class Driver:
    """A loaded driver library."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._dll = ctypes.PyDLL(library)
        self._dll.cuLaunchKernelEx.argtypes = [_P, _P, _P, _P]
        self._dll.cuLibraryLoadData.argtypes = [_P, _P, _P, _P, _U, _P, _P, _U]
        self._dll.cuLibraryGetKernel.argtypes = [_P, _P, ctypes.c_char_p]
        self._dll.cuKernelSetAttribute.argtypes = [ctypes.c_int, ctypes.c_int, _P, ctypes.c_int]
        self._dll.cuGetErrorName.argtypes = [ctypes.c_int, _P]
        self._dll.cuDevicePrimaryCtxRetain.argtypes = [_P, ctypes.c_int]
        self._dll.cuCtxSetCurrent.argtypes = [_P]

    def check(self, call: str, code: int) -> None:
        """Raise DriverError unless ``code`` is success."""
        if code:
            text = ctypes.c_char_p()
            self._dll.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(call, code, (text.value or b"unknown error").decode())

    def _call(self, name: str, *arguments: object, device: int | None = None) -> None:
        """Call a function of the driver. Where the calling thread has no context, torch's on ``device`` is made current
        if that is given. DriverError if it fails."""
        function = getattr(self._dll, name)
        code = function(*arguments)
        if code == NO_CONTEXT and device is not None:
            self.make_current(device)
            code = function(*arguments)
        self.check(name.removesuffix("_v2"), code)

    def make_current(self, device: int) -> None:
        """Make the context that torch uses on ``device`` current in the calling thread, or DriverError."""
        context = _P()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def current_device(self, or_that_of: int | None = None) -> int:
        """The device of the calling thread's context. Where it has none, torch's context on ``or_that_of`` is made
        current if that is given. DriverError if there is none then."""
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device), device=or_that_of)
        return device.value

    def _attribute(self, attribute: int, device: int) -> int:
        """DriverError if there is no device of that number."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def multiprocessors(self, device: int) -> int:
        """Multiprocessors of a device, or DriverError."""
        return self._attribute(_MULTIPROCESSORS, device)

    def memory_rate(self, device: int) -> int:
        """Bytes a second that a device's memory delivers at most, as its clock and bus say, or DriverError."""
        clock, bus = (self._attribute(x, device) for x in (_MEMORY_CLOCK, _MEMORY_BUS))
        return 2 * 1000 * clock * bus // 8

    def capability(self, device: int) -> int:
        """Compute capability of a device, times 10, or DriverError."""
        major, minor = (self._attribute(x, device) for x in _CAPABILITY)
        return 10 * major + minor

    def clusters_at_once(
        self, kernel: int, cluster: int, threads: int, shared: int, overlaps: bool, device: int
    ) -> int:
        """How many clusters of a kernel with a cluster size of its own run at once, of blocks of ``threads`` and
        ``shared`` bytes; ``overlaps``: in launches that may start before the previous one has ended. Counts the
        multiprocessors that the calling thread's context may use, which are fewer than the device's in a green
        context or an MPS partition. DriverError if refused."""
        count = ctypes.c_int()
        config = _launch_config(cluster, threads, shared, 0, overlaps)
        arguments = ctypes.byref(count), _P(kernel), _P(ctypes.addressof(config))
        self._call("cuOccupancyMaxActiveClusters", *arguments, device=device)
        return count.value

    def launch(
        self,
        kernel: int,
        parameters: bytes,
        grid: int,
        threads: int,
        shared: int,
        stream: int,
        overlaps: bool,
    ) -> None:
        """Queue a launch of a kernel that takes one struct by value; ``overlaps`` as above. DriverError if refused."""
        config = _launch_config(grid, threads, shared, stream, overlaps)
        buffer = ctypes.create_string_buffer(parameters)
        pointers = (_P * 1)(ctypes.addressof(buffer))
        self._call("cuLaunchKernelEx", ctypes.addressof(config), kernel, ctypes.addressof(pointers), None)

    def clear(self, address: int, size: int, stream: int) -> None:
        """Queue zeros for ``size`` bytes of device memory. DriverError if refused."""
        if size:
            self._call("cuMemsetD8Async", _P(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), _P(stream))

    def copy(self, source: int, to: int, size: int, stream: int) -> None:
        """Queue a copy of ``size`` bytes within device memory. DriverError if refused."""
        if size:
            self._call("cuMemcpyDtoDAsync_v2", _P(to), _P(source), ctypes.c_size_t(size), _P(stream))

    @contextmanager
    def context_of(self, stream: int | None) -> Iterator[int]:
        """Makes the context of a stream current in the calling thread, and yields the stream. None:
        the default stream of the context that is current already."""
        if stream is None:
            yield 0
            return
        context, before = _P(), _P()
        self._call("cuStreamGetCtx", _P(stream), ctypes.byref(context))
        self._dll.cuCtxGetCurrent(ctypes.byref(before))
        self._call("cuCtxSetCurrent", context)
        try:
            yield stream
        finally:
            self._dll.cuCtxSetCurrent(before)

    @contextmanager
    def while_recording(self) -> Iterator[None]:
        """Inside, the calling thread may make calls that a stream capture forbids by default, such as loading a kernel.
        They are not recorded and do not end the capture."""
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._dll.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def load_kernel(self, cubin: bytes, entry: str) -> int:
        """Handle of ``entry`` in ``cubin``, valid in every context, on every device of that architecture. DriverError
        when the driver refuses the cubin."""
        library, kernel = _P(), _P()
        self._call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        self._call("cuLibraryGetKernel", ctypes.byref(kernel), library, entry.encode())
        return int(kernel.value or 0)

    def allow_shared(self, kernel: int, size: int, device: int) -> None:
        """Raise the dynamic shared memory limit of ``kernel`` on ``device`` to ``size`` bytes.
        DriverError if refused."""
        self._call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, size, kernel, device)


@cache
def driver() -> Driver:
    """The system's driver. OSError when there is none."""
    return Driver()
