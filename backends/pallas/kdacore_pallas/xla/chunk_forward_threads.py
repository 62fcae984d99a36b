"""A chunked forward on a CPU, with the heads divided among threads.

XLA's kernels for a CPU are short (50 to 150 us each at common sizes) and each waits for the one
before: one program keeps 1.4 of two cores busy, and programs launched from one thread wait for one
another. So a call with concrete arrays runs one program in several threads, each on its own range
of heads. Heads are independent in this operation, and the results so far have had the bits of one
program. Inside the caller's own ``jit`` there is one program.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.xla import chunk_forward
from kdacore_pallas.xla.plan import HeadRange

MAX_THREADS = 8
"""Two have been measured."""


def thread_count(request: Request, inputs: ChunkInputs) -> int:
    """Among how many threads to divide a call's heads; 1 if that is impossible or gains nothing.

    It does not depend on the number of tokens, so appended tokens change no bits.
    """
    if request.device.type != "cpu" or request.needs_grad or not all(map(_on_one_device, inputs)):
        return 1
    return next(n for n in range(min(_cores(), MAX_THREADS), 0, -1) if request.H % n == 0)


def forward(request: Request, inputs: ChunkInputs, threads: int) -> Outputs:
    """:func:`kdacore_pallas.xla.chunk_forward.forward` of concrete arrays. Returns when the results
    are computed."""
    heads = request.H // threads
    part = replace(request, H=heads, HV=request.HV // threads)
    program = compiled_program(_forward_heads, part)
    device = inputs.q.device

    def run(n: int) -> Outputs:
        with jax.default_device(device):  # a setting of the caller's thread
            found: Outputs = jax.block_until_ready(program(inputs, _number(n * heads, device)))
        return found

    others = [_pool().submit(run, n) for n in range(1, threads)]
    parts = (run(0), *(other.result() for other in others))
    joined: Outputs = compiled_program(_join_heads, part)(parts)
    return joined


def _forward_heads(request: Request, inputs: ChunkInputs, first: Any) -> Outputs:
    return chunk_forward.forward(request, inputs, HeadRange(first, inputs.q.shape[2]))


def _join_heads(request: Request, parts: tuple[Outputs, ...]) -> Outputs:
    """Concatenate the results: heads are the axis after tokens, sequences or checkpoints."""

    def along(axis: int, name: str) -> Any:
        own = [getattr(part, name) for part in parts]
        return None if own[0] is None else jnp.concatenate(own, axis)

    checkpoints = along(1 if request.packed else 2, "checkpoints")
    return Outputs(along(2, "o"), along(1, "final_state"), checkpoints)


def _on_one_device(x: Any) -> bool:
    return x is None or (not isinstance(x, jax.core.Tracer) and len(x.sharding.device_set) == 1)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _number(n: int, device: Any) -> Any:
    """``n`` as an array on a device, transferred explicitly: callers may forbid implicit transfers.

    It is uncommitted; otherwise results would be committed although the caller's arrays are not.
    """
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        return jax.device_put(np.int32(n))


@cache
def _pool() -> ThreadPoolExecutor:
    """Used by all calls. Tasks wait for nothing but XLA, so callers cannot deadlock each other."""
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="kdacore-xla")
