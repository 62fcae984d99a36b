"""Multiprocessors and memory of the device that a call is planned for, whichever library holds its arrays."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from kdacore.lazy import lazy_module
from kdacore.types import ArrayKind, Request

if TYPE_CHECKING:
    from kdacore_cuda.jax import devices as jax_devices
    from kdacore_cuda.runtime import torch_launch
    from kdacore_cuda.runtime.launcher import Launcher
else:
    jax_devices = lazy_module("kdacore_cuda.jax.devices")
    torch_launch = lazy_module("kdacore_cuda.runtime.torch_launch")


def _library(kind: ArrayKind) -> ModuleType:
    return jax_devices if kind == "jax" else torch_launch


def multiprocessors(kind: ArrayKind, index: int) -> int:
    """Multiprocessors of the CUDA device that arrays of ``kind`` call ``index``."""
    return int(_library(kind).multiprocessors(index))


def memory_rate_of(request: Request) -> int:
    """Bytes a second that the memory of a request's device delivers at most; 0 if that is not known."""
    return int(_library(request.kind).memory_rate(request.device.index))


def clusters_at_once(request: Request, launcher: Launcher, arch: str) -> int:
    """How many of a kernel's clusters run at once on a request's device, in the context that was current when it was
    first asked; 0 if there is no driver to ask, as for JAX's programs. Other contexts use the same plans: right
    with any number, as clusters that wait for others draw tickets.

    Raises BackendBuildError or DriverError.
    """
    return int(_library(request.kind).clusters_at_once(launcher, arch, request.device.index))


def multiprocessors_of(request: Request) -> int:
    """Those of a request's device."""
    return multiprocessors(request.kind, request.device.index)
