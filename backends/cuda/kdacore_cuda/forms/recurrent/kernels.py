"""The recurrent kernels: how each is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from kdacore_cuda.architectures import HEAD_DIMS
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.grid import recurrent_tile
from kdacore_cuda.kernel_parameters import RECURRENT
from kdacore_cuda.runtime.launcher import Launcher


def recurrent_kernel(K: int, v_first: bool, bf16_state: bool, mode: RecurrentMode) -> KernelSource:
    """The recurrent kernel for one head dim, state layout, state dtype and mode.

    Takes :data:`kdacore_cuda.kernel_parameters.RECURRENT`. Arguments as of :func:`recurrent_tile`.
    """
    tile = recurrent_tile(K, v_first, bf16_state, mode)
    defines = (
        ("K_DIM", K),
        ("WARPS", tile.warps),
        ("ROWS", tile.rows),
        ("PARTS", tile.parts),
        ("MIN_BLOCKS", tile.min_blocks),
        ("COLUMNS", tile.columns),
        ("V_FIRST", int(v_first)),
        ("STATE_BF16", int(bf16_state)),
        ("MODE", int(mode)),
    )
    return KernelSource("common/recurrent/recurrent.cu", "recurrent", defines)


@cache
def recurrent_launcher(K: int, v_first: bool, bf16_state: bool, mode: RecurrentMode) -> Launcher:
    """The launcher of :func:`recurrent_kernel`, whose arguments these are."""
    tile = recurrent_tile(K, v_first, bf16_state, mode)
    kernel = recurrent_kernel(K, v_first, bf16_state, mode)
    return Launcher(kernel, RECURRENT, tile.threads, shared_bytes(kernel))


def packaged_recurrent_kernels() -> Iterator[KernelSource]:
    """The recurrent kernels shipped, for every architecture: all there are."""
    for K in HEAD_DIMS:
        for v_first, bf16_state, mode in product((False, True), (False, True), RecurrentMode):
            yield recurrent_kernel(K, v_first, bf16_state, mode)
