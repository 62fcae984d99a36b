"""The fused chunk backward: chunks from last to first, everything recomputed from the raw inputs.

The state each chunk starts from (``starts``) was kept by the forward, or comes from a forward pass that
writes nothing else. The visits of a pack go backwards as well: the last one of a block is its first step here.
The gradient of the state stays in VMEM from chunk to chunk. q and k gradients are summed over their
value heads in scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kdacore.types import ChunkInputs, OutputGrads, Request
from kdacore_pallas.gate_rates import SHRINK, held_as
from kdacore_pallas.tpu import chunk_forward_kernel as forward
from kdacore_pallas.tpu import chunk_step, gate, head_rows, tiles
from kdacore_pallas.tpu.chunk_step import WithinChunk
from kdacore_pallas.tpu.chunk_step_backward import ChunkGrads, pairs_backward, state_backward, step_backward
from kdacore_pallas.tpu.grid_step import Refs, Step, over_own_rows, read_step
from kdacore_pallas.tpu.launch import KernelOperands, Launch, call_chunk_kernel
from kdacore_pallas.tpu.operands import (
    F32,
    Operand,
    block_states_spec,
    chunk_operands,
    flat,
    lanes_spec,
    rows_spec,
    state_spec,
)
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.own_rows import OwnRows
from kdacore_pallas.tpu.plan import ChunkGrid
from kdacore_pallas.tpu.schedule import CLOSES, FIRST, LAST, OPENS, ChunkSchedule

Array = Any


ROWS = ("dq", "dk", "dv", "dg", "dbeta")
"""Outputs with a row for each token."""


def _begin_step(x: ChunkGrid, names: list[str], v_first: bool, refs_: tuple[Any, ...]) -> Step:
    """Set the state's gradient at a sequence's end, and the sums over chunks to zero at a head block's first step."""
    step = read_step(x, names, refs_, _backwards(x))
    refs = step.refs

    @pl.when(step.has(LAST))
    def _() -> None:
        if "dfinal" in refs:
            d = refs["dfinal"][0].astype(F32)
            refs["dstate"][...] = d if v_first else jnp.swapaxes(d, 1, 2)
        else:
            refs["dstate"][...] = jnp.zeros_like(refs["dstate"])

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for name in ("dA", "dbias"):
            if name in refs:
                refs[name][...] = jnp.zeros_like(refs[name])

    return step


def _end_step(step: Step, v_first: bool) -> None:
    """The gradient of a sequence's initial state, at its first step."""
    refs = step.refs
    if "dinitial" in refs:

        @pl.when(step.has(FIRST))
        def _() -> None:
            d = refs["dstate"][...]
            refs["dinitial"][0] = d if v_first else jnp.swapaxes(d, 1, 2)


def _stage_rows(step: Step, scalar: bool) -> None:
    forward.stage_rows(step.refs, scalar)
    head_rows.fill(step.refs, "do")


def _starts_kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    """The gradient of the initial state alone: no start states are read, and no rows written."""
    step = _begin_step(x, names, v_first, refs_)
    over_own_rows(x, step, CLOSES, (), partial(_step_to_start, x, options, step, scalar))
    _end_step(step, v_first)


def _step_to_start(x: ChunkGrid, options: KernelOptions, step: Step, scalar: bool) -> None:
    """The gradient of the state before the step's rows."""
    refs = step.refs
    _stage_rows(step, scalar)

    def start(within: WithinChunk, do: Array, dend: Array) -> Array:
        return state_backward(options, within, chunk_step.keys(options, within), do, dend).state

    def some(i: Any, carry: None) -> None:
        heads, block = forward.side_by_side(x, i)
        within, do = _read_heads(x, options, step, heads, scalar)
        refs["dstate"][block] = jax.vmap(start)(forward.stacked(within), jnp.stack(do), refs["dstate"][block])
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)


def _kernel(
    x: ChunkGrid, options: KernelOptions, names: list[str], scalar: bool, v_first: bool, *refs_: Any
) -> None:
    step = _begin_step(x, names, v_first, refs_)
    over_own_rows(x, step, CLOSES, ROWS, partial(_step_backward, x, options, step, scalar, v_first))
    _end_step(step, v_first)


def _step_backward(x: ChunkGrid, options: KernelOptions, step: Step, scalar: bool, v_first: bool) -> None:
    """Gradients of the step's rows, and of the state before them."""
    refs, _, own, first_head = step
    _stage_rows(step, scalar)

    def some(i: Any, carry: None) -> None:
        heads, block = forward.side_by_side(x, i)
        within, do = _read_heads(x, options, step, heads, scalar)
        state = _start_states(x, step, block, v_first)
        found = jax.vmap(partial(step_backward, options))(
            forward.stacked(within), state, jnp.stack(do), refs["dstate"][block]
        )
        refs["dstate"][block] = found.state
        for j, h in enumerate(heads):
            d = pairs_backward(options, within[j], jax.tree.map(lambda a, j=j: a[j], found))
            _write_head(x, options, refs, h, first_head + h, d, own, scalar)
        return carry

    lax.fori_loop(0, x.hvb // x.together, some, None)
    for name in ("dq", "dk", "dv") if scalar else ("dq", "dk", "dv", "dg"):
        head_rows.flush(refs, name, own)


def _start_states(x: ChunkGrid, step: Step, heads: Any, v_first: bool) -> Array:
    """``[heads, V, K]`` states that the step starts from. A pack keeps those of a block's first visit: at the others a
    sequence begins."""
    kept = step.refs["starts"][0, 0, heads]
    if not x.packed:
        return kept
    begun: Any = 0.0
    if "initial" in step.refs:
        begun = step.refs["initial"][0, heads].astype(F32)
        begun = begun if v_first else jnp.swapaxes(begun, 1, 2)
    return jnp.where(step.has(OPENS), kept, begun)


def _read_heads(
    x: ChunkGrid, options: KernelOptions, step: Step, heads: list[Any], scalar: bool
) -> tuple[list[WithinChunk], list[Array]]:
    """Decays and interactions of each head, and the gradient of its output."""
    refs, _, own, first_head = step
    rows = [forward.read_rows(x, options, refs, h, first_head + h, own, scalar) for h in heads]
    do = [own.only(head_rows.read(refs, "do", h, x.V)) for h in heads]
    return [chunk_step.within_chunk(options, r) for r in rows], do


def _write_head(
    x: ChunkGrid,
    options: KernelOptions,
    refs: Refs,
    h: Any,
    at: Any,
    d: ChunkGrads,
    own: OwnRows,
    scalar: bool,
) -> None:
    """Gradients of a head, to scratch; those of q and k are added up. Heads as in :func:`forward.gate_input`."""
    key_head = h if x.R == 1 else lax.div(h, x.R)
    _write_lanes(refs, "dbeta", h, tiles.to_row(own.only(d.beta)), own)
    head_rows.write(refs, "dv", h, d.v, own)
    _gate_grads(x, options, refs, h, at, own.only(d.g), own, scalar)
    for name, dx in (("q", d.q * options.scale), ("k", d.k)):
        if options.qk_l2norm:
            raw = own.only(head_rows.read(refs, name, key_head, x.K))
            dx = gate.qk_l2norm_backward(raw, dx)
        _accumulate(x, refs, "d" + name, key_head, dx, h, own)


def _write_lanes(refs: Refs, name: str, h: Any, row: Array, own: OwnRows) -> None:
    """One number a row, ``[1, C]``, of head ``h``; of a shared block, its own rows."""
    if own.shared:
        row = own.merged_lanes(row, refs[name][0, pl.ds(h, 1), :])
    refs[name][0, pl.ds(h, 1), :] = row


def _accumulate(x: ChunkGrid, refs: Refs, name: str, key_head: Any, d: Array, h: Any, own: OwnRows) -> None:
    """Sum over the value heads of one q/k head, which follow each other, in float32; all of them write."""
    if x.R > 1:
        d = d + jnp.where(lax.rem(h, x.R) == 0, 0.0, refs[name + "_sum"][...])
        refs[name + "_sum"][...] = d
    head_rows.write(refs, name, key_head, d, own)


def _gate_grads(
    x: ChunkGrid, options: KernelOptions, refs: Refs, h: Any, at: Any, dlog: Array, own: OwnRows, scalar: bool
) -> None:
    """Gradients of the gate. Of a scalar gate the kernel writes the gradient of the log decay only:
    XLA does the rest, which is elementwise and small.
    """
    if scalar:
        _write_lanes(refs, "dg", h, tiles.to_row(jnp.sum(dlog, axis=1, keepdims=True)), own)
        return
    raw, slope = forward.gate_input(x, refs, h, at, scalar)
    dx, dA = gate.log_decay_backward(options, own.only(raw), slope, dlog)
    bounded = options.gate == "sigmoid"  # its gradients alone may be as large as float32 allows
    stored = held_as(dx, refs["dg"].dtype).astype(F32) if bounded else dx
    head_rows.write(refs, "dg", h, stored, own)
    for name, d in (("dbias", dx * SHRINK if bounded else dx), ("dA", dA)):
        if name in refs:
            refs[name][0, pl.ds(h, 1), :] += jnp.sum(d, axis=0, keepdims=True)


def _read(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    x: ChunkGrid,
    at: Callable[[Any], Any],
) -> list[Operand]:
    """Inputs, the gradients that reach them, and no start states."""
    given = chunk_operands(request, inputs, x, at)
    do = jnp.zeros_like(inputs.v) if grads.o is None else grads.o
    do = flat(do)
    given.append(Operand("do", rows_spec(x, x.hvb, x.V, at), do.shape, do.dtype, do))
    if grads.final_state is not None:
        s = grads.final_state
        given.append(Operand("dfinal", state_spec(x, s.shape[2:], s.shape[0], at), s.shape, s.dtype, s))
    return given


def _backwards(x: ChunkGrid) -> Callable[[Any], Any]:
    """The step at a grid position: from last to first."""
    return lambda c: x.NC - 1 - c


def backward_operands(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    starts: Array,
    x: ChunkGrid,
) -> KernelOperands:
    """What the backward kernel reads and writes."""
    at = _backwards(x)
    given = _read(request, inputs, grads, x, at)
    given.append(Operand("starts", block_states_spec(x, at), starts.shape, jnp.dtype(F32), starts))
    if x.packed and inputs.initial_state is not None:
        s = inputs.initial_state
        given.append(Operand("initial", state_spec(x, s.shape[2:], s.shape[0], at), s.shape, s.dtype, s))
    return given, *_made(request, inputs, x, at)


def start_gradients(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    x: ChunkGrid,
    options: KernelOptions,
    schedule: ChunkSchedule,
    launch: Launch,
) -> Array:
    """``dinitial`` of :func:`chunk_backward`, and nothing else."""
    at, scalar = _backwards(x), request.scalar_gate
    scratch = [("dstate", (x.hvb, x.V, x.K)), *forward.row_scratch(x, scalar)]
    scratch += head_rows.scratch("do", x.C, x.hvb, x.V)

    def body(names: list[str], *refs: Any) -> None:
        _starts_kernel(x, options, names, scalar, request.state_v_first, *refs)

    read = _read(request, inputs, grads, x, at)
    written = [_initial(request, x, at)]
    name = "kdacore_chunk_start_gradients"
    found: Array = call_chunk_kernel(name, body, x, schedule, read, written, scratch, launch)[0]
    return found


def _initial(request: Request, x: ChunkGrid, at: Callable[[Any], Any]) -> Operand:
    spec = state_spec(x, request.state_tail, request.N, at)
    return Operand("dinitial", spec, (request.N, x.HV, *request.state_tail), jnp.dtype(F32))


def chunk_backward(
    request: Request,
    inputs: ChunkInputs,
    grads: OutputGrads,
    starts: Array,
    x: ChunkGrid,
    options: KernelOptions,
    schedule: ChunkSchedule,
    launch: Launch,
) -> dict[str, Array]:
    """Gradients as the kernel writes them: ``dq dk dv dg`` rows ``[B, T, heads * D]`` (``dg`` of a scalar gate
    ``[B, HV, blocks * C]``), ``dbeta`` ``[B, HV, blocks * C]`` of beta after its sigmoid, ``dA`` and
    ``dbias`` ``[B, HV, K]``, times SHRINK of a bounded gate, to be summed over B (and K), ``dinitial`` float32.
    """
    read, written, scratch = backward_operands(request, inputs, grads, starts, x)

    def body(names: list[str], *refs: Any) -> None:
        _kernel(x, options, names, request.scalar_gate, request.state_v_first, *refs)

    outs = call_chunk_kernel("kdacore_chunk_backward", body, x, schedule, read, written, scratch, launch)
    return {o.name: a for o, a in zip(written, outs, strict=True)}


def _made(
    request: Request, inputs: ChunkInputs, x: ChunkGrid, at: Any
) -> tuple[list[Operand], list[tuple[str, tuple[int, ...]]]]:
    """Outputs and scratch."""
    scalar = request.scalar_gate
    lanes = (x.B, x.HV, x.blocks * x.C)
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
        made.append(_initial(request, x, at))
    return made, scratch
