"""The recurrent kernels: how each is compiled."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.grid import recurrent_tile
from kdacore_cuda.kernel_parameters import RECURRENT
from kdacore_cuda.runtime.kernel import Kernel, make_kernel


@cache
def recurrent_kernel(K: int, v_first: bool, bf16_state: bool, mode: RecurrentMode) -> Kernel:
    """The recurrent kernel for one head dim, state layout, state dtype and mode. Arguments as of
    :func:`recurrent_tile`."""
    tile = recurrent_tile(K, v_first, bf16_state, mode)
    return make_kernel(
        *("common/recurrent/recurrent", RECURRENT),
        K_DIM=K,
        WARPS=tile.warps,
        ROWS=tile.rows,
        PARTS=tile.parts,
        MIN_BLOCKS=tile.min_blocks,
        COLUMNS=tile.columns,
        V_FIRST=v_first,
        STATE_BF16=bf16_state,
        MODE=mode,
    )
