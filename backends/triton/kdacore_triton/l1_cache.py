"""Leave the shared memory that a kernel's programs do not use to the L1 cache.

Both are one memory. Triton requests all of it as shared memory when a program uses more than 48 KB, and
kernels that request nothing keep the current split. A kernel that reads its tiles more than once, or
spills, then reads from the L2 cache what the L1 cache would have held.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from triton.runtime import driver

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""The driver's number for this attribute of a function: a hint, in percent of the most there can be."""
PREFER_NONE = 0
"""The driver's number for having no preference, where Triton may have set one for shared memory."""
RESERVED = 1024
"""Bytes of shared memory that every program takes beside its own."""
REGISTERS = 65536
"""Registers of a multiprocessor; a warp's come in blocks of 256."""
WARPS = 64
"""Warps of a multiprocessor, at most."""


def carveout_percent(registers: int, warps: int, shared: int, available: int) -> int:
    """Percent of ``available`` bytes that as many programs need as registers let on a multiprocessor."""
    each = max(1, -(-registers * 32 // 256)) * 256 * warps
    programs = max(1, min(REGISTERS // each, WARPS // warps))
    return min(100, -(-100 * programs * (shared + RESERVED) // available))


def prefer_l1(compiled: Any, device: int) -> None:
    """Ask for no more shared memory than the programs of a compiled kernel need."""
    metadata = compiled.metadata
    percent = carveout_percent(compiled.n_regs, metadata.num_warps, metadata.shared, _available(device))
    function = ctypes.c_void_p(compiled.function)
    cuda = _driver()
    for error in (
        cuda.cuFuncSetCacheConfig(function, PREFER_NONE),
        cuda.cuFuncSetAttribute(function, PREFERRED_SHARED_MEMORY_CARVEOUT, percent),
    ):
        if error:
            raise RuntimeError(f"CUDA error {error} on dividing L1 and shared memory for {metadata.name}")


@cache
def _available(device: int) -> int:
    """Bytes of shared memory a multiprocessor can have."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"]) + RESERVED


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
