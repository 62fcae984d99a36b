"""Figures of the device that a call is planned for, whichever library holds its arrays: its architecture,
multiprocessors, memory, and the clusters that run there at once."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from kdacore.lazy import lazy_module
from kdacore.types import ArrayKind, Request
from kdacore_cuda.architectures import build_arch

if TYPE_CHECKING:
    from kdacore_cuda.jax import devices as jax_devices
    from kdacore_cuda.runtime import torch_launch
    from kdacore_cuda.runtime.kernel import Kernel
else:
    jax_devices = lazy_module("kdacore_cuda.jax.devices")
    torch_launch = lazy_module("kdacore_cuda.runtime.torch_launch")


def _library(kind: ArrayKind) -> ModuleType:
    return jax_devices if kind == "jax" else torch_launch


def arch_of(request: Request) -> str:
    """The real architecture whose machine code runs on a request's device."""
    return build_arch(request.device.arch)


def memory_rate_of(request: Request) -> int:
    """Bytes a second that the memory of a request's device delivers at most; 0 if that is not known."""
    return int(_library(request.kind).memory_rate(request.device.index))


def clusters_at_once(request: Request, kernel: Kernel, arch: str) -> int:
    """How many of a kernel's clusters run at once on a request's device, in the context that was current when it was
    first asked; 0 if there is no driver to ask, as for JAX's programs, whose device may not be here. Other contexts use
    the same plans: right with any number, as clusters that wait for others draw tickets.

    Raises BackendBuildError or DriverError.
    """
    return 0 if request.kind == "jax" else torch_launch.clusters_at_once(kernel, arch, request.device.index)


def multiprocessors_of(request: Request) -> int:
    """Multiprocessors of a request's device."""
    return int(_library(request.kind).multiprocessors(request.device.index))


def planned(request: Request) -> Request:
    """The request as kernels are planned for it: on the device as the driver numbers it, which JAX may not."""
    if request.kind != "jax":
        return request
    here = dataclasses.replace(request.device, index=jax_devices.ordinal(request.device.index))
    return dataclasses.replace(request, device=here)


def is_here(request: Request) -> bool:
    """Whether a request's device is one of this process: its array library is loaded and has a device of that
    number and architecture. False for most calls that are only described."""
    if request.kind not in sys.modules:
        return False
    return bool(_library(request.kind).architecture(planned(request).device.index) == request.device.arch)
