"""A slice of a row that goes on on other ranks (:class:`kdacore.types.SliceFunctions`), by the TPU kernels.

The map of a slice takes the forward kernel without its outputs; the gradient before a slice takes the backward kernel
without anything but the gradient of the state. The rest are the whole forward and backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from kdacore.types import (
    ChunkInputs,
    InputGrads,
    OutputGrads,
    Outputs,
    Request,
    SliceForward,
    SliceFunctions,
)
from kdacore_pallas.tpu import chunk_backward, chunk_forward, entry_points, verifiers, vmem
from kdacore_pallas.xla import slices
from kdacore_pallas.xla.slices import leaving_part, map_of, started, with_columns_of_one

Array = Any


def slice_functions(request: Request) -> SliceFunctions:
    """The functions of every slice whose whole call the kernels serve."""
    return SliceFunctions(begin, finish, backward_begin, backward_finish)


def _ends(request: Request, inputs: ChunkInputs) -> Array:
    return chunk_forward.last_states(request, inputs, *entry_points.chunk_launch(request, "forward"))


def _fits(request: Request) -> bool:
    """Whether the kernel serves a call of these sizes."""
    return verifiers.tile_alignment(request) is None and verifiers.chunk_vmem(request) is None


def begin(request: Request, inputs: ChunkInputs, leaving: Array | None) -> SliceForward:
    """The map of the leaving part: by one kernel where ``V + K`` columns of values fit, else by two."""
    call, arrays = leaving_part(request, inputs._replace(cu_seqlens_cpu=None), leaving)
    joint = with_columns_of_one(call, arrays)
    if _fits(joint[0]):
        return map_of(request, _ends(*joint))
    M = _ends(*with_columns_of_one(replace(call, V=0), arrays._replace(v=arrays.v[..., :0])))
    C = _ends(call, arrays._replace(initial_state=jnp.zeros(call.state_shape, jnp.float32)))
    return map_of(request, jnp.concatenate([C, M], -1))


def finish(request: Request, inputs: ChunkInputs, pending: None, starts: Array) -> Outputs:
    """The results, by the whole forward."""
    out = entry_points.chunk_forward(*started(request, inputs, starts))
    return out if request.output_final_state else out._replace(final_state=None)


def backward_begin(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
    starts: Array,
    entering: Array | None,
) -> tuple[Array, None]:
    """The gradient of the state before the slice, by one kernel, or in plain JAX where it needs too much VMEM."""
    call, arrays = started(request, inputs, starts)
    hb = vmem.heads_per_step(call)
    need = vmem.chunk_backward_bytes(call, hb)  # of the kernel that also computes the rest
    if need > vmem.VMEM.get(call.device.arch, need):
        d = slices.start_gradients(call, arrays, (), grads)
    else:
        d = chunk_backward.start_gradients(call, arrays, grads, *entry_points.chunk_launch(call, "backward"))
    return (d if entering is None else d[entering]), None


def backward_finish(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    pending: None,
    grads: OutputGrads,
    starts: Array,
    ends: Array,
) -> InputGrads:
    """The gradients, by the whole backward."""
    call, arrays = started(request, inputs, starts)
    return entry_points.chunk_backward(call, arrays, saved, OutputGrads(grads.o, ends))
