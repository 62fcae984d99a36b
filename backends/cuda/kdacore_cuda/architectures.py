"""GPU architectures: which machine code serves a device, and what a block may use there."""

from __future__ import annotations

from kdacore.verifiers import sm_number

FIRST_ARCH = 80
"""The lowest compute capability the kernels compile for: they need bfloat16 products and asynchronous copies."""

PACKAGED_ARCHS = ("sm_90a", "sm_100f")
"""Real architectures whose cubins the wheel contains."""

HOPPER = "sm_90a"

BUILD_ARCHS = {"sm_90": "sm_90a", "sm_100": "sm_100f", "sm_103": "sm_100f"}
"""Architecture of a device -> that of the packaged cubins that run there. Elsewhere NVRTC compiles on first calls."""

SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100f": 227 * 1024, "sm_120": 99 * 1024}
"""Bytes of dynamic shared memory a block may use, by build architecture."""

CLUSTER_ARCHS = ("sm_90a", "sm_100f")
"""Build architectures on which the kernels launch clusters of blocks."""

HEAD_DIMS = (64, 128)
"""Values of K and V that kernels are compiled for."""


def has_hopper_kernel(K: int, arch: str) -> bool:
    """Whether Hopper's own kernels of ``chunk_kda`` serve this head dim on a real architecture."""
    return arch == HOPPER and K == 128


def build_arch(arch: str) -> str:
    """The architecture to compile for, given a device's: ``sm_90`` -> ``sm_90a``; others unchanged."""
    return BUILD_ARCHS.get(arch, arch)


def overlaps_launches(arch: str) -> bool:
    """Whether a launch may start before the previous one has ended on this real architecture."""
    return sm_number(arch) >= 90
