"""The cubin of a kernel: packaged with the wheel, else cached on disk, else compiled now."""

from __future__ import annotations

import hashlib
from functools import cache

from kdacore_cuda.build import disk_cache
from kdacore_cuda.build.compiler import compile_kernel, nvrtc_version
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.packaged_cubins import find_packaged


@cache
def load_or_compile(kernel: KernelSource, arch: str) -> bytes:
    """The cubin of ``kernel`` for the real architecture ``arch``, such as ``sm_90a``; looked up once per process.

    Raises BackendBuildError where it is neither packaged nor cached, and NVRTC is missing or reports an error.
    """
    key = source_key(kernel, arch)
    packaged = find_packaged(kernel, arch, key)
    if packaged is not None:
        return packaged
    entry = hashlib.sha256(f"{key} nvrtc {nvrtc_version()}".encode()).hexdigest()
    cubin = disk_cache.get(entry)
    if cubin is None:
        cubin = compile_kernel(kernel, arch).cubin
        disk_cache.put(entry, cubin)
    return cubin
