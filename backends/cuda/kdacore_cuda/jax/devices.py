"""CUDA devices as JAX knows them."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

from kdacore_cuda.runtime.driver import driver

ASSUMED_MULTIPROCESSORS = 132
"""Of an H100 or H200: for calls that are exported where there is no GPU. The handler refuses to run
a program on a device with another number."""


def _local_devices() -> list[Any]:
    try:
        return list(jax.local_devices(backend="cuda"))
    except RuntimeError:  # what JAX raises where it has no such devices
        return []


def _device(index: int) -> Any:
    """The device with the driver's number ``index``; None where there is none."""
    return next((d for d in _local_devices() if d.local_hardware_id == index), None)


@cache
def ordinal(index: int) -> int:
    """The driver's number of the device with JAX's number ``index``; they differ where several
    processes share a job."""
    return next((d.local_hardware_id for d in _local_devices() if d.id == index), index)


@cache
def memory_rate(index: int) -> int:
    """Bytes a second that the memory of the device with the driver's number ``index`` delivers at most;
    0 where there is no such device."""
    return driver().memory_rate(index) if _device(index) else 0


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of the device with the driver's number ``index``."""
    found = _device(index)
    return int(found.core_count) if found else ASSUMED_MULTIPROCESSORS


def architecture(index: int) -> str:
    """That of the device with the driver's number ``index``, such as ``sm_90``; empty if there is none."""
    found = _device(index)
    return f"sm_{found.compute_capability.replace('.', '')}" if found else ""
