"""A chunked forward on a CPU, its heads shared out over threads.

XLA's kernels for a CPU are short (50 to 150 us each at common sizes) and one waits for the next: one program keeps 1.4
of two cores busy, however it is written, and programs launched from one thread wait for one another. So a call with
concrete arrays runs one program several times side by side, each on its own heads. Heads never meet in this operation,
and the bits have been those of one program. Inside the caller's own ``jit`` there is one program, and no share.
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
from kdacore_pallas.compiled import compiled
from kdacore_pallas.xla import chunk
from kdacore_pallas.xla.layout import Share

MOST = 8
"""Shares at most. Two have been measured."""


def count(request: Request, inputs: ChunkInputs) -> int:
    """Into how many shares a call's heads go: 1 where it cannot be, or gains nothing.

    It does not depend on the number of tokens.
    """
    if request.device.type != "cpu" or request.needs_grad or not all(map(_on_one_device, inputs)):
        return 1
    return next(n for n in range(min(_cores(), MOST), 0, -1) if request.H % n == 0)


def forward(request: Request, inputs: ChunkInputs, shares: int) -> Outputs:
    """:func:`kdacore_pallas.xla.chunk.forward` of concrete arrays. Returns when the results are there."""
    heads = request.H // shares
    own = replace(request, H=heads, HV=request.HV // shares)
    program = compiled(_one, own)
    device = inputs.q.device

    def run(n: int) -> Outputs:
        with jax.default_device(device):  # a setting of the caller's thread
            found: Outputs = jax.block_until_ready(program(inputs, _number(n * heads, device)))
        return found

    others = [_pool().submit(run, n) for n in range(1, shares)]
    parts = (run(0), *(other.result() for other in others))
    joined: Outputs = compiled(_join, own)(parts)
    return joined


def _one(request: Request, inputs: ChunkInputs, first: Any) -> Outputs:
    return chunk.forward(request, inputs, Share(first, inputs.q.shape[2]))


def _join(request: Request, parts: tuple[Outputs, ...]) -> Outputs:
    """The shares' results as one: heads are the axis after tokens, sequences or checkpoints."""

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
    """``n`` on a device, put there by name once: callers may forbid JAX to move what a program is given.

    Uncommitted, or results would be committed where the caller's arrays are not.
    """
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        return jax.device_put(np.int32(n))


@cache
def _pool() -> ThreadPoolExecutor:
    """Shared by all calls: a share waits for nothing but XLA, so callers cannot lock each other out."""
    return ThreadPoolExecutor(MOST - 1, thread_name_prefix="kdacore-xla")
