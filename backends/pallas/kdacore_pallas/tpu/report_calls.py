"""The calls the TPU report compiles, as shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kdacore.types import ChunkInputs, Device, OutputGrads, RecurrentInputs, Request, TensorSpec
from kdacore_pallas.tpu import chunk_backward, chunk_forward, entry_points, plan, recurrent, vmem
from kdacore_pallas.tpu.chunk_forward_kernel import chunk_forward as forward_kernel
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.schedule import dense_schedule
from kdacore_pallas.tpu.sizes import CHUNK

Array = Any


@dataclass(frozen=True)
class Size:
    """Production sizes by default; in-kernel gate, normalisation and sigmoid."""

    B: int = 1
    T: int = 8192
    H: int = 32
    HV: int = 32
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"


def chunk_request(size: Size, generation: str) -> Request:
    g = TensorSpec((size.B, size.T, size.HV, size.K), size.dtype)
    return Request(
        op="chunk_kda", kind="jax", device=Device("tpu", arch=generation), B=size.B, T=size.T, H=size.H, HV=size.HV,
        K=size.K, V=size.V, N=size.B, dtype=size.dtype, state_dtype="float32", tensors=(("g", g),), gate="softplus",
        scale=size.K**-0.5, qk_l2norm=True, beta_sigmoid=True, output_final_state=True,
    )  # fmt: skip


def chunk_inputs(size: Size, spec: Callable[..., Array]) -> ChunkInputs:
    """Shapes made by ``spec(dtype, *shape)``."""
    B, T, H, HV, K, V, dtype = size.B, size.T, size.H, size.HV, size.K, size.V, size.dtype
    q = spec(dtype, B, T, H, K)
    v, g, beta = spec(dtype, B, T, HV, V), spec(dtype, B, T, HV, K), spec(dtype, B, T, HV)
    return ChunkInputs(q, q, v, g, beta, spec("float32", HV), spec("float32", HV, K))


def forward_call(request: Request, keep_starts: bool = False) -> Callable[[ChunkInputs], Any]:
    hb, launch = entry_points.chunk_launch(request, "forward", keep_starts)

    def call(inputs: ChunkInputs) -> Any:
        out = chunk_forward.forward(request, inputs, hb, launch, keep_starts)
        return out.o, out.final_state, *out.saved

    return call


def backward_call(request: Request) -> Callable[..., Any]:
    """The backward as a function of the inputs, the gradient of ``o`` and, where they were saved
    for backward, the chunks' start states."""
    hb, launch = entry_points.chunk_launch(request, "backward")
    return lambda inputs, do, *saved: chunk_backward.backward(
        request, inputs, saved, OutputGrads(do), hb, launch
    )


def kept_starts(size: Size, spec: Callable[..., Array]) -> Array:
    """The shape of the chunks' start states."""
    return spec("float32", size.B, -(-size.T // CHUNK), size.HV, size.V, size.K)


def forward_variant(request: Request, inverse: str, rows: int) -> Callable[[ChunkInputs], Any]:
    """The forward kernel with another inverse or chunk size."""
    hb, launch = entry_points.chunk_launch(request, "forward")
    x = plan.make_chunk_grid(request, hb, launch.together)
    options = kernel_options(request, inverse, rows)
    schedule = dense_schedule(x)
    return lambda inputs: forward_kernel(request, inputs, x, options, schedule, launch, ("o", "final"))


VARIANTS = [(inverse, rows) for rows in (CHUNK // 2, CHUNK) for inverse in ("merging", "substitution")]


def recurrent_request(generation: str, B: int = 256, H: int = 32, K: int = 128, pool: int = 512) -> Request:
    """One token for each of B sequences, updating a pool in place."""
    return Request(
        op="fused_recurrent_kda", kind="jax", device=Device("tpu", arch=generation), B=B, T=1, H=H, HV=H, K=K, V=K, N=B,
        dtype="bfloat16", state_dtype="float32", tensors=(("initial_state", TensorSpec((pool, H, K, K), "float32")),),
        gate="softplus", scale=K**-0.5, qk_l2norm=True, beta_sigmoid=True, output_final_state=True, pool_size=pool,
        state_indices_ndim=1, inplace_state=True,
    )  # fmt: skip


def recurrent_inputs(request: Request, spec: Callable[..., Array]) -> RecurrentInputs:
    size = Size(request.B, 1, request.H, request.HV, request.K, request.V)
    pool = spec("float32", request.pool_size, request.HV, request.K, request.V)
    indices = spec("int32", request.B)
    return RecurrentInputs(*chunk_inputs(size, spec)[:7], initial_state=pool, state_indices=indices)


def recurrent_call(request: Request) -> Callable[[RecurrentInputs], Any]:
    limit = vmem.limit(vmem.recurrent_bytes(request), request.device.arch)
    return lambda inputs: recurrent.forward(request, inputs, Launch(vmem_bytes=limit))[:2]


def on(sharding: Any) -> Callable[..., Array]:
    """A ``spec`` for one sharding."""
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
