"""A backend named ``stub``: the cuda backend for CPU tensors, whose launches do nothing.

Host times of the launch paths without a GPU. ``benchmarks.host_pair --device stub`` runs this text in checkouts older
than itself, so it uses only names that those have. What a GPU adds is missing: the driver's part of a launch (2 to
3 us), torch's CUDA allocator, and the thread in which autograd runs the backward of CUDA tensors.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kdacore_cuda
from kdacore import device as probes
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Device, OpImpl, Request


def _module(name: str, before: str) -> Any:
    """A module of the backend, under the name that it had before the backend had folders where there are none."""
    folders = find_spec("kdacore_cuda.runtime") is not None
    return import_module(f"kdacore_cuda.{name if folders else before}")


torch_launch = _module("runtime.torch_launch", "torch_launch")
Driver = _module("runtime.driver", "driver").Driver

NAME = "stub"
_HOPPER = Device("cuda", 0, "sm_90")
_SOURCE = """
int cuCtxGetCurrent(void** c) { *c = 0; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuCtxPushCurrent_v2(void* c) { return 0; }
int cuCtxPopCurrent_v2(void** c) { return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0; return 0; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, unsigned long size, void* stream) { return 0; }
int cuMemsetD8Async(void* at, unsigned char value, unsigned long size, void* stream) { return 0; }
int cuStreamGetCtx(void* s, void** c) { *c = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuLibraryLoadData(void** l, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  *l = (void*)1; return 0; }
int cuLibraryGetKernel(void** k, void* l, const char* name) { *k = (void*)1; return 0; }
int cuKernelSetAttribute(int what, int value, void* k, int device) { return 0; }
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return 1; }
int cuCtxSetCurrent(void* context) { return 1; }
int cuLaunchKernelEx(const unsigned* config, void* f, void** arguments, void** extra) { return 0; }
int cuOccupancyMaxActiveClusters(int* count, void* k, const unsigned* config) {
  *count = config[0] == 4 ? 30 : 132 / config[0]; return 0; }
"""


def _on_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a request on a Hopper GPU, the same object for the same request."""
    there: dict[int, tuple[Request, Request]] = {}

    def call(request: Request, *rest: Any) -> Any:
        found = there.get(id(request))
        if found is None or found[0] is not request:
            there[id(request)] = found = (request, dataclasses.replace(request, device=_HOPPER))
        return function(found[1], *rest)

    return call


def _moved(op: OpImpl) -> OpImpl:
    functions = {f.name: getattr(op, f.name) for f in dataclasses.fields(op)}
    moved: dict[str, Any] = {name: _on_hopper(f) for name, f in functions.items() if callable(f)}
    return dataclasses.replace(
        op,
        **moved,
        verifiers=tuple(_on_hopper(v) for v in op.verifiers),
        verified_archs=frozenset({"*"}),
    )


class _Plugin:
    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        real = kdacore_cuda.make_backend()
        ops = {name: _moved(op) for name, op in real.ops.items()}
        return [
            dataclasses.replace(real, name=NAME, ops=ops, device_types=("cpu",), requirements=(), rank=-1)
        ]


def install() -> None:
    """Compile the driver that does nothing, put it in the place of the system's, and register the backend."""
    _replace_driver()
    REGISTRY.register(_Plugin(), NAME)


def install_as_hopper() -> None:
    """The driver that does nothing, and CPU tensors that are taken for those of a Hopper GPU by everything that asks.

    Calls then choose among the shipped backends as on a machine with such a GPU, by the cost table of its architecture,
    and the cuda backend serves them. To be called before the first call.
    """
    real = probes.torch_device
    changes: list[tuple[Any, str, Any]] = [
        (kdacore_cuda, "_driver_missing", lambda: None),
        (probes, "torch_device", lambda kind, index: _HOPPER if kind == "cpu" else real(kind, index)),
    ]
    for module, name, value in changes:
        setattr(module, name, value)
    _replace_driver()


def _replace_driver() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "stub.c").write_text(_SOURCE)
    library = folder / "libcuda.so.1"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-w", str(folder / "stub.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    driver: Any = Driver(str(library))
    changes: list[tuple[Any, str, Any]] = [
        (torch_launch, "multiprocessors", lambda index: 132),
        (torch_launch, "memory_rate", lambda index: 3.35e12),
        (torch_launch, "current_device", lambda: -1),  # where CPU tensors say they are
        (torch_launch, "current_stream", lambda index: 0),
        *(_of_executor if find_spec("kdacore_cuda.runtime.executor") else _of_launchers)(driver, library),
    ]
    for module, name, value in changes:
        setattr(module, name, value)


def _of_executor(driver: Any, library: Path) -> list[tuple[Any, str, Any]]:
    """What makes launches go to the stub."""
    executor, program = (import_module(f"kdacore_cuda.runtime.{name}") for name in ("executor", "program"))
    find_executor = import_module("kdacore_cuda.build.packaged_executors").find_executor
    native = executor.NativeExecutor(find_executor(), str(library))

    def cubin_of(kernel: Any, arch: str) -> tuple[int, bytes]:
        return program.cubin_id(kernel.name.encode()), b"no machine code"

    return [
        (executor.driver, "driver", lambda: driver),
        (executor, "executor", lambda: native),
        (program, "cubin_of", cubin_of),
        (torch_launch, "cubin_of", cubin_of),
    ]


def _of_launchers(driver: Any, library: Path) -> list[tuple[Any, str, Any]]:
    """The same before launches went through one executor."""
    launch = _module("runtime.launcher", "launch")
    prepacked_launch = _module("runtime.prepacked_launch", "prepacked_launch")
    return [
        (launch, "driver", lambda: driver),
        (prepacked_launch, "driver", lambda: driver),
        (launch, "load_or_compile", lambda kernel, arch: b""),
    ]
