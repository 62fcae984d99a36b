"""The fused chunk forward: gate, decays, interactions, inverse, recurrence and output in one kernel.

Grid ``(batch, head block, chunk)``, chunks in order; the states of a head block stay in VMEM scratch from chunk to
chunk and are set anew at the first chunk of each sequence. Nothing but inputs and outputs touches HBM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.kernels import head, rows
from kdacore_pallas.kernels.head import Math, Rows
from kdacore_pallas.kernels.layout import FIRST, LAST, Blocks, Schedule
from kdacore_pallas.kernels.operands import F32, Operand, chunk_operands, rows_spec, state_spec
from kdacore_pallas.xla.layout import ChunkTable
from kdacore_pallas.xla.numerics import out_struct

Array = Any
Scratch = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of float32 VMEM scratch."""
Refs = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """How kernels are run: compiled, or by one of Pallas' interpreters."""

    interpret: Any = False
    vmem_bytes: int | None = None

    def traced(self, kernel: Callable[..., Any], *arrays: Array) -> list[Array]:
        """Call a kernel. Outside JAX's x64 mode, where Python's integers get 64 bits: scalars of a TPU have 32."""
        with jax.enable_x64(False):
            outs: list[Array] = kernel(*arrays)
        return outs


def stage_rows(refs: Refs, scalar: bool) -> None:
    """The step's rows to scratch, from where they can be read one head at a time."""
    for name in ("q", "k", "v") if scalar else ("q", "k", "v", "g"):
        rows.fill(refs[name + "s"], refs[name][0])


def gate_input(x: Blocks, refs: Refs, h: Any, at: Any, scalar: bool) -> tuple[Array, Any]:
    """``g + bias`` of a head (``[C, K]``, or ``[1, C]`` along lanes) and its ``exp(A_log)``.

    ``h`` counts heads within the block, ``at`` within the call.
    """
    g = refs["g"][0, pl.ds(h, 1), :] if scalar else rows.read(refs["gs"], h, x.C, x.hvb, x.K)
    if "bias" in refs:
        g = g + (refs["bias"][at] if scalar else refs["bias"][pl.ds(h, 1), :])
    return g, refs["slope"][at] if "slope" in refs else 1.0


def read_rows(x: Blocks, math: Math, refs: Refs, h: Any, at: Any, valid: Any, scalar: bool) -> Rows:
    """One value head of this chunk, ready; rows that are no token are neutral. Heads as in :func:`gate_input`."""
    own = h if x.R == 1 else lax.div(h, x.R)
    q, k = (rows.read(refs[n], own, x.C, x.hb, x.K) for n in ("qs", "ks"))
    v = rows.read(refs["vs"], h, x.C, x.hvb, x.V)
    if math.l2norm:
        q, k = head.normalise(q), head.normalise(k)
    q = q * math.scale
    raw, slope = gate_input(x, refs, h, at, scalar)
    g = head.log_decay(math, raw, slope)
    beta = head.column(head.strength(math, refs["beta"][0, pl.ds(h, 1), :]))
    if scalar:
        g = jnp.broadcast_to(head.column(g), (x.C, x.K))
    if x.ragged:
        q, k, v, g, beta = (jnp.where(head.row_index(*a.shape) < valid, a, 0.0) for a in (q, k, v, g, beta))
    return Rows(q, k, v, g, beta)


def _kernel(x: Blocks, math: Math, names: list[str], scalar: bool, v_first: bool, *refs_: Any) -> None:
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

    def one(h: Any, carry: None) -> None:
        ready = read_rows(x, math, refs, h, first_head + h, valid_rows, scalar)
        state, outs = refs["state"][h], []
        if "starts" in refs:
            refs["starts"][0, 0, h] = state
        for first in range(0, x.C, math.chunk):
            prep = head.prepare(math, Rows(*(a[first : first + math.chunk] for a in ready)))
            v_new = head.corrected(math, prep, state)
            if "o" in refs:
                outs.append(head.output(math, prep, v_new, state))
            state = head.advance(math, prep, v_new, state)
        refs["state"][h] = state
        if outs:
            rows.write(refs["os"], h, x.hvb, jnp.concatenate(outs, axis=0))
        return carry

    lax.fori_loop(0, x.hvb, one, None)
    if "o" in refs:
        refs["o"][0] = rows.block(refs["os"], x.C, x.hvb, x.V).astype(refs["o"].dtype)
    if "final" in refs:

        @pl.when(flag & LAST != 0)
        def _() -> None:
            state = refs["state"][...]
            state = state if v_first else jnp.swapaxes(state, 1, 2)
            refs["final"][0] = state.astype(refs["final"].dtype)


def row_scratch(x: Blocks, scalar: bool) -> Scratch:
    """Float32 copies of a step's rows."""
    keys, values = rows.shape(x.C, x.hb, x.K), rows.shape(x.C, x.hvb, x.V)
    found: Scratch = [("qs", keys), ("ks", keys), ("vs", values)]
    return found if scalar else [*found, ("gs", rows.shape(x.C, x.hvb, x.K))]


def call(
    name: str,
    body: Callable[..., None],
    x: Blocks,
    schedule: Schedule,
    given: list[Operand],
    made: list[Operand],
    scratch: Scratch,
    launch: Launch,
) -> list[Array]:
    """``pallas_call`` over ``(B, head blocks, NC)``; ``body(names, *refs)`` gets its refs in the order of ``names``."""
    names = [o.name for o in (*given, *made)] + [n for n, _ in scratch]
    values = [o.value for o in given]
    limit = {} if launch.vmem_bytes is None else {"vmem_limit_bytes": launch.vmem_bytes}
    kernel = pl.pallas_call(
        lambda *refs: body(names, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(x.B, x.H // x.hb, x.NC),
            in_specs=[o.spec for o in given],
            out_specs=[o.spec for o in made],
            scratch_shapes=[pltpu.VMEM(shape, F32) for _, shape in scratch],
        ),
        out_shape=[out_struct(o.shape, o.dtype, *values) for o in made],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), **limit
        ),
        interpret=launch.interpret,
        name=name,
    )
    return launch.traced(kernel, *schedule.arrays(), *values)


Build = tuple[list[Operand], list[Operand], Scratch]
"""Inputs, outputs and scratch of a kernel."""


def forward_operands(
    request: Request, inputs: ChunkInputs, x: Blocks, table: ChunkTable | None, want: tuple[str, ...]
) -> Build:
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
        "o": Operand("o", rows_spec(x, x.hvb, x.V, at), (x.B, x.T, x.HV, x.V), inputs.v.dtype),
        "final": Operand("final", final, final_shape, jnp.dtype(request.state_dtype)),
        "starts": Operand("starts", starts, (x.B, x.NC, x.HV, x.V, x.K), jnp.dtype(F32)),
    }
    scratch: Scratch = [("state", (x.hvb, x.V, x.K)), *row_scratch(x, request.scalar_gate)]
    if "o" in want:
        scratch.append(("os", rows.shape(x.C, x.hvb, x.V)))
    return given, [every[n] for n in want], scratch


def chunk_forward(
    request: Request,
    inputs: ChunkInputs,
    x: Blocks,
    math: Math,
    schedule: Schedule,
    table: ChunkTable | None,
    launch: Launch,
    want: tuple[str, ...],
) -> dict[str, Array]:
    """Run the kernel for the outputs in ``want``: ``o``, ``final`` (a pack has one more row, unused), ``starts``
    (the state ``[V, K]`` each chunk starts from).
    """
    given, made, scratch = forward_operands(request, inputs, x, table, want)

    def body(names: list[str], *refs: Any) -> None:
        _kernel(x, math, names, request.scalar_gate, request.state_v_first, *refs)

    outs = call("kdacore_chunk_forward", body, x, schedule, given, made, scratch, launch)
    return dict(zip(want, outs, strict=True))
