"""The fused chunk forward: gate, decays, interactions, inverse, recurrence and output in one
kernel.

Grid ``(batch, head block, step)``: the chunks of a row in order, or the visits of a pack
(:mod:`kdacore_pallas.tpu.schedule`). The states of a head block stay in VMEM scratch from step to
step and are initialised at the first step of each sequence. HBM holds inputs and outputs only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.tpu import chunk_step, gate, head_rows, tiles
from kdacore_pallas.tpu.chunk_step import Rows
from kdacore_pallas.tpu.grid_step import Refs, Step, over_own_rows, read_step
from kdacore_pallas.tpu.launch import KernelOperands, Launch, Scratch, call_chunk_kernel
from kdacore_pallas.tpu.operands import F32, Operand, block_states_spec, chunk_operands, rows_spec, state_spec
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.own_rows import OwnRows
from kdacore_pallas.tpu.plan import ChunkGrid
from kdacore_pallas.tpu.schedule import FIRST, LAST, OPENS, ChunkSchedule

Array = Any


def stage_rows(refs: Refs, scalar: bool) -> None:
    """Copy the step's rows to scratch, where they can be read one head at a time."""
    for name in ("q", "k", "v") if scalar else ("q", "k", "v", "g"):
        head_rows.fill(refs, name)


def gate_input(x: ChunkGrid, refs: Refs, h: Any, at: Any, scalar: bool) -> tuple[Array, Any]:
    """``g + bias`` of a head (``[C, K]``, or ``[1, C]`` along lanes) and its ``exp(A_log)``.

    ``h`` counts heads within the block, ``at`` within the call.
    """
    g = refs["g"][0, pl.ds(h, 1), :] if scalar else head_rows.read(refs, "g", h, x.K)
    if "bias" in refs:
        g = g + (refs["bias"][at] if scalar else refs["bias"][pl.ds(h, 1), :])
    return g, refs["slope"][at] if "slope" in refs else 1.0


def read_rows(
    x: ChunkGrid, options: KernelOptions, refs: Refs, h: Any, at: Any, own_rows: OwnRows, scalar: bool
) -> Rows:
    """The recurrence's inputs of one value head; rows of others change nothing. Heads as in
    :func:`gate_input`."""
    own = h if x.R == 1 else lax.div(h, x.R)
    q, k = (head_rows.read(refs, n, own, x.K) for n in ("q", "k"))
    v = head_rows.read(refs, "v", h, x.V)
    if options.qk_l2norm:
        q, k = gate.qk_l2norm(q), gate.qk_l2norm(k)
    q = q * options.scale
    raw, slope = gate_input(x, refs, h, at, scalar)
    g = gate.log_decay(options, raw, slope)
    beta = tiles.to_column(gate.beta_forward(options, refs["beta"][0, pl.ds(h, 1), :]))
    if scalar:
        g = jnp.broadcast_to(tiles.to_column(g), (x.C, x.K))
    return Rows(*(own_rows.only(a) for a in (q, k, v, g, beta)))


def side_by_side(x: ChunkGrid, i: Any) -> tuple[list[Any], Any]:
    """The ``i``-th heads of a block that are computed together, and their slice."""
    first = i * x.together
    return [first + j for j in range(x.together)], pl.ds(first, x.together)


def stacked(heads: list[Any]) -> Any:
    """One tree of arrays with the heads along a first axis."""
    return jax.tree.map(lambda *a: jnp.stack(a), *heads)


def _in_order(c: Any) -> Any:
    """The step at a grid position."""
    return c


def _begin_step(x: ChunkGrid, step: Step, v_first: bool) -> None:
    """Set the state at a sequence's start. A pack keeps the state at the first visit of a block: that of the sequence
    which comes from the block before, or of the first sequence of the block."""
    refs = step.refs

    @pl.when(step.has(FIRST))
    def _() -> None:
        if "initial" in refs:
            state = refs["initial"][0].astype(F32)
            refs["state"][...] = state if v_first else jnp.swapaxes(state, 1, 2)
        else:
            refs["state"][...] = jnp.zeros_like(refs["state"])

    if x.packed and "starts" in refs:

        @pl.when(step.has(OPENS))
        def _() -> None:
            refs["starts"][0, 0] = refs["state"][...]


def _step_forward(x: ChunkGrid, options: KernelOptions, step: Step, scalar: bool) -> None:
    """Outputs of the step's rows, and the state after them."""
    refs, _, own, first_head = step
    stage_rows(refs, scalar)

    def some(i: Any, carry: None) -> None:
        heads, block = side_by_side(x, i)
        rows = [read_rows(x, options, refs, h, first_head + h, own, scalar) for h in heads]
        state, outs = refs["state"][block], []
        if "starts" in refs and not x.packed:
            refs["starts"][0, 0, block] = state
        for first in range(0, x.C, options.chunk):
            cut = slice(first, first + options.chunk)
            within = [chunk_step.within_chunk(options, Rows(*(a[cut] for a in r))) for r in rows]
            o, state = jax.vmap(partial(chunk_step.forward_step, options))(stacked(within), state)
            outs.append(o)
        refs["state"][block] = state
        if "o" in refs:
            o = jnp.concatenate(outs, axis=1)
            for j, h in enumerate(heads):
                head_rows.write(refs, "o", h, o[j], own)
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)
    if "o" in refs:
        head_rows.flush(refs, "o", own)


def _kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    step = read_step(x, names, refs_, _in_order)
    refs = step.refs
    _begin_step(x, step, v_first)
    over_own_rows(x, step, OPENS, ("o",), partial(_step_forward, x, options, step, scalar))
    if "final" in refs:

        @pl.when(step.has(LAST))
        def _() -> None:
            state = refs["state"][...]
            state = state if v_first else jnp.swapaxes(state, 1, 2)
            refs["final"][0] = state.astype(refs["final"].dtype)


def row_scratch(x: ChunkGrid, scalar: bool) -> Scratch:
    """Float32 copies of a step's rows."""
    sizes = [("q", x.hb, x.K), ("k", x.hb, x.K), ("v", x.hvb, x.V)]
    sizes += [] if scalar else [("g", x.hvb, x.K)]
    return [found for name, heads, D in sizes for found in head_rows.scratch(name, x.C, heads, D)]


def forward_operands(
    request: Request, inputs: ChunkInputs, x: ChunkGrid, want: tuple[str, ...]
) -> KernelOperands:
    """What the forward kernel reads and writes for the outputs in ``want``."""

    given = chunk_operands(request, inputs, x, _in_order)
    if inputs.initial_state is not None:
        s = inputs.initial_state
        given.append(
            Operand("initial", state_spec(x, s.shape[2:], s.shape[0], _in_order), s.shape, s.dtype, s)
        )
    final_shape = (request.N, x.HV, *request.state_tail)
    final = state_spec(x, request.state_tail, request.N, _in_order)
    every = {
        "o": Operand("o", rows_spec(x, x.hvb, x.V, _in_order), (x.B, x.T, x.HV * x.V), inputs.v.dtype),
        "final": Operand("final", final, final_shape, jnp.dtype(request.state_dtype)),
        "starts": Operand(
            "starts", block_states_spec(x, _in_order), (x.B, x.blocks, x.HV, x.V, x.K), jnp.dtype(F32)
        ),
    }
    scratch: Scratch = [("state", (x.hvb, x.V, x.K)), *row_scratch(x, request.scalar_gate)]
    if "o" in want:
        scratch += head_rows.scratch("o", x.C, x.hvb, x.V)
    return given, [every[n] for n in want], scratch


def chunk_forward(
    request: Request,
    inputs: ChunkInputs,
    x: ChunkGrid,
    options: KernelOptions,
    schedule: ChunkSchedule,
    launch: Launch,
    want: tuple[str, ...],
) -> dict[str, Array]:
    """Run the kernel for the outputs in ``want``: ``o`` ``[B, T, HV * V]``, ``final``, ``starts`` (``[B, blocks,
    HV, V, K]``: the state that each chunk starts from; of a pack, that at the first visit of each block of rows).
    """
    given, made, scratch = forward_operands(request, inputs, x, want)

    def body(names: list[str], *refs: Any) -> None:
        _kernel(x, options, names, request.scalar_gate, request.state_v_first, *refs)

    outs = call_chunk_kernel("kdacore_chunk_forward", body, x, schedule, given, made, scratch, launch)
    return dict(zip(want, outs, strict=True))
