"""Every kernel this backend can build, and which of them are packaged for which architecture."""

from __future__ import annotations

from collections.abc import Iterator

from kdacore_cuda.build import KernelSource

HEAD_DIMS = (64, 128)
DECODE_WARPS = 4


def decode_kernel(K: int, v_first: bool, bf16_state: bool, warps: int = DECODE_WARPS) -> KernelSource:
    """The recurrent kernel for one head dim, state layout and state dtype."""
    defines = (
        ("K_DIM", K),
        ("WARPS", warps),
        ("MIN_BLOCKS", 16 // warps),
        ("V_FIRST", int(v_first)),
        ("STATE_BF16", int(bf16_state)),
    )
    return KernelSource("common/decode.cu", "decode", defines)


def decode_kernels() -> Iterator[KernelSource]:
    """Every shipped decode kernel."""
    for K in HEAD_DIMS:
        for v_first in (False, True):
            for bf16_state in (False, True):
                yield decode_kernel(K, v_first, bf16_state)


def packaged_kernels(arch: str) -> Iterator[KernelSource]:
    """What :func:`kdacore_cuda.prebuilt.build_all` compiles for ``arch``."""
    yield from decode_kernels()
