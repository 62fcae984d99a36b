"""The fused chunk backward: chunks from last to first, everything recomputed from the raw inputs.

The state each chunk starts from (``starts``) was kept by the forward, or comes from a forward pass that
writes nothing else.
The gradient of the state stays in VMEM from chunk to chunk. q and k gradients are summed over their
value heads in scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdacore.types import ChunkInputs, OutputGrads, Request
from kdacore_pallas.tpu import chunk_forward_kernel as forward
from kdacore_pallas.tpu import chunk_step, gate, head_rows, tiles
from kdacore_pallas.tpu.chunk_forward_kernel import Refs
from kdacore_pallas.tpu.chunk_step import WithinChunk
from kdacore_pallas.tpu.chunk_step_backward import ChunkGrads, pairs_backward, state_backward, step_backward
from kdacore_pallas.tpu.launch import KernelOperands, Launch, call_chunk_kernel
from kdacore_pallas.tpu.operands import F32, Operand, chunk_operands, flat, lanes_spec, rows_spec, state_spec
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.plan import FIRST, LAST, ChunkGrid, ChunkSchedule, gather
from kdacore_pallas.xla.plan import ChunkTable

Array = Any


def _begin_chunk(refs: Refs, flag: Any, at_start: Any, v_first: bool) -> None:
    """Set the state's gradient at a sequence's end, and the sums over chunks to zero at a head
    block's first step."""

    @pl.when(flag & LAST != 0)
    def _() -> None:
        if "dfinal" in refs:
            d = refs["dfinal"][0].astype(F32)
            refs["dstate"][...] = d if v_first else jnp.swapaxes(d, 1, 2)
        else:
            refs["dstate"][...] = jnp.zeros_like(refs["dstate"])

    @pl.when(at_start)
    def _() -> None:
        for name in ("dA", "dbias"):
            if name in refs:
                refs[name][...] = jnp.zeros_like(refs[name])


def _write_outputs(x: ChunkGrid, refs: Refs, flag: Any, scalar: bool, v_first: bool) -> None:
    """Copy the gradients from scratch to the outputs."""
    for name in ("dq", "dk", "dv") if scalar else ("dq", "dk", "dv", "dg"):
        head_rows.flush(refs, name)
    _write_initial(refs, flag, v_first)


def _write_initial(refs: Refs, flag: Any, v_first: bool) -> None:
    """The gradient of a sequence's initial state, at its first chunk."""
    if "dinitial" in refs:

        @pl.when(flag & FIRST != 0)
        def _() -> None:
            d = refs["dstate"][...]
            refs["dinitial"][0] = d if v_first else jnp.swapaxes(d, 1, 2)


class Step(NamedTuple):
    """A grid step that has begun: its chunk's rows are in scratch, and the state's gradient is that of its end."""

    refs: Refs
    flag: Any
    valid_rows: Any
    first_head: Any
    token: Callable[[Array], Array]
    """Zeros in rows that are not tokens."""


def _begin_step(x: ChunkGrid, names: list[str], scalar: bool, v_first: bool, refs_: tuple[Any, ...]) -> Step:
    _, flags, valid, *rest = refs_
    refs = dict(zip(names, rest, strict=True))
    step = pl.program_id(2)
    at = pl.program_id(0) * x.NC + (x.NC - 1 - step)
    flag, valid_rows = flags[at], valid[at]
    _begin_chunk(refs, flag, step == 0, v_first)
    forward.stage_rows(refs, scalar)
    head_rows.fill(refs, "do")

    def token(a: Array) -> Array:
        return jnp.where(tiles.row_index(*a.shape) < valid_rows, a, 0.0) if x.ragged else a

    return Step(refs, flag, valid_rows, pl.program_id(1) * x.hvb, token)


def _starts_kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    """The gradient of the initial state alone: no start states are read, and no rows written."""
    refs, flag, valid_rows, first_head, token = _begin_step(x, names, scalar, v_first, refs_)

    def start(within: WithinChunk, do: Array, dend: Array) -> Array:
        return state_backward(options, within, chunk_step.keys(options, within), do, dend).state

    def some(i: Any, carry: None) -> None:
        heads, block = forward.side_by_side(x, i)
        within, do = _read_heads(x, options, refs, heads, first_head, valid_rows, token, scalar)
        refs["dstate"][block] = jax.vmap(start)(forward.stacked(within), jnp.stack(do), refs["dstate"][block])
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)
    _write_initial(refs, flag, v_first)


def _kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    refs, flag, valid_rows, first_head, token = _begin_step(x, names, scalar, v_first, refs_)

    def some(i: Any, carry: None) -> None:
        heads, block = forward.side_by_side(x, i)
        within, do = _read_heads(x, options, refs, heads, first_head, valid_rows, token, scalar)
        found = jax.vmap(partial(step_backward, options))(
            forward.stacked(within), refs["starts"][0, 0, block], jnp.stack(do), refs["dstate"][block]
        )
        refs["dstate"][block] = found.state
        for j, h in enumerate(heads):
            d = pairs_backward(options, within[j], jax.tree.map(lambda a, j=j: a[j], found))
            _write_head(x, options, refs, h, first_head + h, d, token, scalar)
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)
    _write_outputs(x, refs, flag, scalar, v_first)


def _read_heads(
    x: ChunkGrid,
    options: KernelOptions,
    refs: Refs,
    heads: list[Any],
    first_head: Any,
    valid_rows: Any,
    token: Callable[[Array], Array],
    scalar: bool,
) -> tuple[list[WithinChunk], list[Array]]:
    """Decays and interactions of each head, and the gradient of its output."""
    rows = [forward.read_rows(x, options, refs, h, first_head + h, valid_rows, scalar) for h in heads]
    do = [token(head_rows.read(refs, "do", h, x.V)) for h in heads]
    return [chunk_step.within_chunk(options, r) for r in rows], do


def _write_head(
    x: ChunkGrid, options: KernelOptions, refs: Refs, h: Any, at: Any, d: ChunkGrads, token: Any, scalar: bool
) -> None:
    """Gradients of a head, to scratch; those of q and k are added up. Heads as in :func:`forward.gate_input`."""
    own = h if x.R == 1 else lax.div(h, x.R)
    refs["dbeta"][0, pl.ds(h, 1), :] = tiles.to_row(token(d.beta))
    head_rows.write(refs, "dv", h, d.v)
    _gate_grads(x, options, refs, h, at, token(d.g), token, scalar)
    for name, dx in (("q", d.q * options.scale), ("k", d.k)):
        if options.qk_l2norm:
            raw = token(head_rows.read(refs, name, own, x.K))
            dx = gate.qk_l2norm_backward(raw, dx)
        _accumulate(x, refs, "d" + name, own, dx, h)


def _accumulate(x: ChunkGrid, refs: Refs, name: str, own: Any, d: Array, h: Any) -> None:
    """Sum over the value heads of one q/k head, which follow each other, in float32; all of them write."""
    if x.R > 1:
        d = d + jnp.where(lax.rem(h, x.R) == 0, 0.0, refs[name + "_sum"][...])
        refs[name + "_sum"][...] = d
    head_rows.write(refs, name, own, d)


def _gate_grads(
    x: ChunkGrid, options: KernelOptions, refs: Refs, h: Any, at: Any, dlog: Array, token: Any, scalar: bool
) -> None:
    """Gradients of the gate. Of a scalar gate the kernel writes the gradient of the log decay only:
    XLA does the rest, which is elementwise and small.
    """
    if scalar:
        refs["dg"][0, pl.ds(h, 1), :] = tiles.to_row(jnp.sum(dlog, axis=1, keepdims=True))
        return
    raw, slope = forward.gate_input(x, refs, h, at, scalar)
    dx, dA = gate.log_decay_backward(options, token(raw), slope, dlog)
    head_rows.write(refs, "dg", h, dx)
    for name, d in (("dbias", dx), ("dA", dA)):
        if name in refs:
            refs[name][0, pl.ds(h, 1), :] += jnp.sum(d, axis=0, keepdims=True)


def _read(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    x: ChunkGrid,
    table: ChunkTable | None,
    at: Callable[[Any], Any],
) -> list[Operand]:
    """Inputs, the gradients that reach them, and no start states."""
    given = chunk_operands(request, inputs, x, table, at)
    do = jnp.zeros_like(inputs.v) if grads.o is None else grads.o
    do = gather(table, flat(do))
    given.append(Operand("do", rows_spec(x, x.hvb, x.V, at), do.shape, do.dtype, do))
    if grads.final_state is not None:
        s = grads.final_state
        given.append(Operand("dfinal", state_spec(x, s.shape[2:], s.shape[0], at), s.shape, s.dtype, s))
    return given


def _backwards(x: ChunkGrid) -> Callable[[Any], Any]:
    """The chunk of a grid step: from last to first."""
    return lambda c: x.NC - 1 - c


def backward_operands(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    starts: Array,
    x: ChunkGrid,
    table: ChunkTable | None,
) -> KernelOperands:
    """What the backward kernel reads and writes."""
    at = _backwards(x)
    given = _read(request, inputs, grads, x, table, at)
    block = pl.BlockSpec((1, 1, x.hvb, x.V, x.K), lambda b, h, c, *_: (b, at(c), h, 0, 0))
    given.append(Operand("starts", block, starts.shape, jnp.dtype(F32), starts))
    return given, *_made(request, inputs, x, table, at)


def start_gradients(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    x: ChunkGrid,
    options: KernelOptions,
    schedule: ChunkSchedule,
    table: ChunkTable | None,
    launch: Launch,
) -> Array:
    """``dinitial`` of :func:`chunk_backward`, and nothing else."""
    at, scalar = _backwards(x), request.scalar_gate
    scratch = [("dstate", (x.hvb, x.V, x.K)), *forward.row_scratch(x, scalar)]
    scratch += head_rows.scratch("do", x.C, x.hvb, x.V)

    def body(names: list[str], *refs: Any) -> None:
        _starts_kernel(x, options, names, scalar, request.state_v_first, *refs)

    read = _read(request, inputs, grads, x, table, at)
    written = [_initial(request, x, table, at)]
    name = "kdacore_chunk_start_gradients"
    found: Array = call_chunk_kernel(name, body, x, schedule, read, written, scratch, launch)[0]
    return found


def _initial(request: Request, x: ChunkGrid, table: ChunkTable | None, at: Callable[[Any], Any]) -> Operand:
    sequences = request.N + (table is not None)
    spec = state_spec(x, request.state_tail, sequences, at)
    return Operand("dinitial", spec, (sequences, x.HV, *request.state_tail), jnp.dtype(F32))


def chunk_backward(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    starts: Array,
    x: ChunkGrid,
    options: KernelOptions,
    schedule: ChunkSchedule,
    table: ChunkTable | None,
    launch: Launch,
) -> dict[str, Array]:
    """Gradients as the kernel writes them: ``dq dk dv dg`` rows ``[B, T, heads * D]`` (``dg`` of a scalar gate
    ``[B, HV, NC * C]``), ``dbeta`` ``[B, HV, NC * C]`` of beta after its sigmoid, ``dA`` and
    ``dbias`` ``[B, HV, K]`` to be summed over B (and K), ``dinitial`` float32.
    """
    read, written, scratch = backward_operands(request, inputs, grads, starts, x, table)

    def body(names: list[str], *refs: Any) -> None:
        _kernel(x, options, names, request.scalar_gate, request.state_v_first, *refs)

    outs = call_chunk_kernel("kdacore_chunk_backward", body, x, schedule, read, written, scratch, launch)
    return {o.name: a for o, a in zip(written, outs, strict=True)}


def _made(
    request: Request, inputs: ChunkInputs, x: ChunkGrid, table: ChunkTable | None, at: Any
) -> tuple[list[Operand], list[tuple[str, tuple[int, ...]]]]:
    """Outputs and scratch."""
    scalar = request.scalar_gate
    lanes = (x.B, x.HV, x.NC * x.C)
    made = [
        Operand("dq", rows_spec(x, x.hb, x.K, at), (x.B, x.T, x.H * x.K), inputs.q.dtype),
        Operand("dk", rows_spec(x, x.hb, x.K, at), (x.B, x.T, x.H * x.K), inputs.k.dtype),
        Operand("dv", rows_spec(x, x.hvb, x.V, at), (x.B, x.T, x.HV * x.V), inputs.v.dtype),
        Operand("dbeta", lanes_spec(x, x.hvb, at), lanes, jnp.dtype(F32)),
    ]
    scratch = [("dstate", (x.hvb, x.V, x.K)), *forward.row_scratch(x, scalar)]
    sizes = [("do", x.hvb, x.V), ("dq", x.hb, x.K), ("dk", x.hb, x.K), ("dv", x.hvb, x.V)]
    sizes += [] if scalar else [("dg", x.hvb, x.K)]
    scratch += [found for name, heads, D in sizes for found in head_rows.scratch(name, x.C, heads, D)]
    scratch += [("dq_sum", (x.C, x.K)), ("dk_sum", (x.C, x.K))] if x.R > 1 else []
    if scalar:
        made.append(Operand("dg", lanes_spec(x, x.hvb, at), lanes, jnp.dtype(F32)))
    else:
        made.append(Operand("dg", rows_spec(x, x.hvb, x.K, at), (x.B, x.T, x.HV * x.K), inputs.g.dtype))
        sums = pl.BlockSpec((1, x.hvb, x.K), lambda b, h, c, *_: (b, h, 0))
        wanted = (("dA", inputs.A_log), ("dbias", inputs.dt_bias))
        made += [
            Operand(n, sums, (x.B, x.HV, x.K), jnp.dtype(F32)) for n, given in wanted if given is not None
        ]
    if inputs.initial_state is not None:
        made.append(_initial(request, x, table, at))
    return made, scratch
