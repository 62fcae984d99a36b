"""The fused chunk forward: gate, decays, interactions, inverse, recurrence and output in one
kernel.

Grid ``(batch, head block, chunk)``, chunks in order; the states of a head block stay in VMEM
scratch from chunk to chunk and are initialised at the first chunk of each sequence. HBM holds
inputs and outputs only.
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
from kdacore_pallas.tpu.launch import KernelOperands, Launch, Scratch, call_chunk_kernel
from kdacore_pallas.tpu.operands import F32, Operand, chunk_operands, rows_spec, state_spec
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.plan import FIRST, LAST, ChunkGrid, ChunkSchedule
from kdacore_pallas.xla.plan import ChunkTable

Array = Any
Refs = dict[str, Any]


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
    x: ChunkGrid, options: KernelOptions, refs: Refs, h: Any, at: Any, valid: Any, scalar: bool
) -> Rows:
    """The recurrence's inputs of one value head; padding rows change nothing. Heads as in
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
    if x.ragged:
        q, k, v, g, beta = (jnp.where(tiles.row_index(*a.shape) < valid, a, 0.0) for a in (q, k, v, g, beta))
    return Rows(q, k, v, g, beta)


def side_by_side(x: ChunkGrid, i: Any) -> tuple[list[Any], Any]:
    """The ``i``-th heads of a block that are computed together, and their slice."""
    first = i * x.together
    return [first + j for j in range(x.together)], pl.ds(first, x.together)


def stacked(heads: list[Any]) -> Any:
    """One tree of arrays with the heads along a first axis."""
    return jax.tree.map(lambda *a: jnp.stack(a), *heads)


def _kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    _seq, flags, valid, *rest = refs_
    refs = dict(zip(names, rest, strict=True))
    at = pl.program_id(0) * x.NC + pl.program_id(2)
    flag, valid_rows = flags[at], valid[at]
    first_head = pl.program_id(1) * x.hvb

    @pl.when(flag & FIRST != 0)
    def _() -> None:
        if "initial" in refs:
            state = refs["initial"][0].astype(F32)
            refs["state"][...] = state if v_first else jnp.swapaxes(state, 1, 2)
        else:
            refs["state"][...] = jnp.zeros_like(refs["state"])

    stage_rows(refs, scalar)

    def some(i: Any, carry: None) -> None:
        heads, block = side_by_side(x, i)
        rows = [read_rows(x, options, refs, h, first_head + h, valid_rows, scalar) for h in heads]
        state, outs = refs["state"][block], []
        if "starts" in refs:
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
                head_rows.write(refs, "o", h, o[j])
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)
    if "o" in refs:
        head_rows.flush(refs, "o")
    if "final" in refs:

        @pl.when(flag & LAST != 0)
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
    request: Request, inputs: ChunkInputs, x: ChunkGrid, table: ChunkTable | None, want: tuple[str, ...]
) -> KernelOperands:
    """What the forward kernel reads and writes for the outputs in ``want``."""

    def at(c: Any) -> Any:
        return c

    given = chunk_operands(request, inputs, x, table, at)
    if inputs.initial_state is not None:
        s = inputs.initial_state
        given.append(Operand("initial", state_spec(x, s.shape[2:], s.shape[0], at), s.shape, s.dtype, s))
    sequences = request.N + (table is not None)
    final_shape = (sequences, x.HV, *request.state_tail)
    final = state_spec(x, request.state_tail, sequences, at)
    starts = pl.BlockSpec((1, 1, x.hvb, x.V, x.K), lambda b, h, c, *_: (b, c, h, 0, 0))
    every = {
        "o": Operand("o", rows_spec(x, x.hvb, x.V, at), (x.B, x.T, x.HV * x.V), inputs.v.dtype),
        "final": Operand("final", final, final_shape, jnp.dtype(request.state_dtype)),
        "starts": Operand("starts", starts, (x.B, x.NC, x.HV, x.V, x.K), jnp.dtype(F32)),
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
    table: ChunkTable | None,
    launch: Launch,
    want: tuple[str, ...],
) -> dict[str, Array]:
    """Run the kernel for the outputs in ``want``: ``o`` ``[B, T, HV * V]``, ``final`` (a pack has one more row,
    unused), ``starts`` (the state ``[V, K]`` each chunk starts from).
    """
    given, made, scratch = forward_operands(request, inputs, x, table, want)

    def body(names: list[str], *refs: Any) -> None:
        _kernel(x, options, names, request.scalar_gate, request.state_v_first, *refs)

    outs = call_chunk_kernel("kdacore_chunk_forward", body, x, schedule, given, made, scratch, launch)
    return dict(zip(want, outs, strict=True))
