"""Calls for type checkers; ``test_types.py`` runs them on this file. Nothing here is executed.

``assert_type`` lines must pass. Each line that ends with ``# error`` must be reported.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import kdacore

x = torch.zeros(1, 64, 2, 16)
beta = torch.zeros(1, 64, 2)
assert_type(kdacore.chunk_kda(x, x, x, x, beta), tuple[torch.Tensor, torch.Tensor | None])
assert_type(
    kdacore.chunk_kda(x, x, x, x, beta, checkpoint_every=64, A_log=torch.nn.Parameter(x)),
    tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
)
assert_type(
    kdacore.fused_recurrent_kda(x, x, x, x, beta, state_indices=None, inplace_state=False),
    tuple[torch.Tensor, torch.Tensor | None],
)
assert_type(kdacore.chunk_gated_delta_rule(x, x, x, beta, beta)[0], torch.Tensor)
assert_type(kdacore.fused_recurrent_gated_delta_rule(x, x, x, beta, beta)[0], torch.Tensor)
assert_type(kdacore.kda_gate(x, lower_bound=-5.0), torch.Tensor)

half, single = np.zeros((1, 64, 2, 16), np.float16), np.zeros((1, 64, 2, 16), np.float32)
offsets = np.zeros(3, np.int64)
o, state = kdacore.chunk_kda(half, half, half, single, single[..., 0], cu_seqlens=offsets)
arrays: NDArray[np.float32] = o
kdacore.chunk_kda(x, x, x, x, beta, cu_seqlens=beta, cu_seqlens_cpu=offsets)

j = jnp.zeros((1, 64, 2, 16))
assert_type(kdacore.chunk_kda(j, j, j, j, j), tuple[jax.Array, jax.Array | None])

kdacore.chunk_kda("x", x, x, x, beta)  # error
kdacore.chunk_kda(x, half, x, x, beta)  # error
kdacore.chunk_kda(x, x, x, x)  # error
kdacore.chunk_kda(x, x, x, x, beta, scale="1")  # error
kdacore.chunk_kda(x, x, x, x, beta, window=64)  # error
kdacore.fused_recurrent_kda(x, x, x, x, beta, checkpoint_every=64)  # error
kdacore.kda_gate([1.0])  # error
