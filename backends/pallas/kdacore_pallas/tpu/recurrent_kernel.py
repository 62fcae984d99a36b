"""The recurrent kernel: one token after another over a pool of states, which the kernel copies
itself.

Grid ``(tokens,)``, the tokens of a sequence together. A sequence's state is fetched while the
sequence before it runs, kept in VMEM in float32 over its tokens, and copied back only to rows the
caller named: a negative index neither reads nor writes. Updating a pool in place touches nothing
but those rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdacore.types import RecurrentInputs, Request
from kdacore_pallas.gate_rates import gate_rate, held
from kdacore_pallas.tpu import gate, tiles
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.operands import F32
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.xla.numerics import out_struct

Array = Any
Refs = dict[str, Any]


@dataclass(frozen=True)
class RecurrentPlan:
    """Reads and writes of each token, int32 ``[tokens]`` each."""

    first: Array
    """1 on the first token of a sequence."""
    read: Array
    """Row that a sequence's first token starts from, negative for zeros."""
    buffer: Array
    """Which of two buffers the sequence's state is fetched into."""
    write: Array
    """The row to write the state after this token to, negative for none."""
    writes: Array
    """How many writes came before."""

    def arrays(self) -> tuple[Array, ...]:
        return self.first, self.read, self.buffer, self.write, self.writes


NAMES = ("first", "read", "buffer", "write", "writes")


def make_recurrent_plan(first: Array, read: Array, write: Array) -> RecurrentPlan:
    """The plan from each token's place in its sequence and the rows it reads and writes."""
    first, read, write = (x.astype(jnp.int32) for x in (first, read, write))
    writes = (write >= 0).astype(jnp.int32)  # integers: strict type promotion does not subtract masks
    return RecurrentPlan(first, read, (jnp.cumsum(first) - 1) & 1, write, jnp.cumsum(writes) - writes)


def _fetch(refs: Refs, row: Any, slot: Any) -> Any:
    return pltpu.make_async_copy(refs["pool"].at[row], refs["fetched"].at[slot], refs["fetch_done"].at[slot])


def _store(refs: Refs, row: Any, slot: Any) -> Any:
    return pltpu.make_async_copy(
        refs["outgoing"].at[slot], refs["states"].at[row], refs["store_done"].at[slot]
    )


def _start_fetch(refs: Refs, i: Any) -> None:
    """Start fetching the state of the sequence that begins at token ``i``."""
    row = refs["read"][i]

    @pl.when((refs["first"][i] != 0) & (row >= 0))
    def _() -> None:
        _fetch(refs, row, refs["buffer"][i]).start()


def _load_state(refs: Refs, i: Any, tokens: int) -> None:
    """Set the running state, and start to fetch that of the next sequence."""
    fresh = refs["first"][i] != 0
    if "pool" in refs:

        @pl.when(i == 0)
        def _() -> None:
            _start_fetch(refs, i)

        @pl.when(i + 1 < tokens)
        def _() -> None:
            _start_fetch(refs, jnp.minimum(i + 1, tokens - 1))

        row, slot = refs["read"][i], refs["buffer"][i]

        @pl.when(fresh & (row >= 0))
        def _() -> None:
            _fetch(refs, row, slot).wait()
            refs["state"][...] = refs["fetched"][slot].astype(F32)

        fresh = fresh & (row < 0)

    @pl.when(fresh)
    def _() -> None:
        refs["state"][...] = jnp.zeros_like(refs["state"])


def _store_state(refs: Refs, i: Any, tokens: int) -> None:
    """Copy the state out if the token has a row to write; at most two copies are in flight, none at
    the end."""
    row, before = refs["write"][i], refs["writes"][i]

    @pl.when(row >= 0)
    def _() -> None:
        slot = before & 1

        @pl.when(before >= 2)
        def _() -> None:
            _store(refs, row, slot).wait()

        refs["outgoing"][slot] = refs["state"][...].astype(refs["outgoing"].dtype)
        _store(refs, row, slot).start()

    @pl.when(i == tokens - 1)
    def _() -> None:
        total = before + (row >= 0).astype(jnp.int32)
        for n in (1, 2):

            @pl.when(total >= n)
            def _(n: int = n) -> None:
                _store(refs, 0, (total - n) & 1).wait()


def _token_rows(options: KernelOptions, refs: Refs, scalar: bool) -> None:
    """Normalise and gate this token's rows, into float32 scratch ``[heads, D]``."""
    q, k = refs["q"][0].astype(F32), refs["k"][0].astype(F32)
    if options.qk_l2norm:
        q, k = gate.qk_l2norm(q), gate.qk_l2norm(k)
    refs["qs"][...] = q * options.scale
    refs["ks"][...] = k
    refs["vs"][...] = refs["v"][0].astype(F32)
    raw = tiles.to_column(refs["g"][0].astype(F32)) if scalar else refs["g"][0].astype(F32)
    if "bias" in refs:
        raw = raw + (tiles.to_column(refs["bias"][...]) if scalar else refs["bias"][...])
    slope = tiles.to_column(refs["slope"][...]) if "slope" in refs else 1.0
    decay = jnp.exp(gate.log_decay(options, raw, slope))
    refs["decay"][...] = jnp.broadcast_to(decay, refs["decay"].shape)
    beta = tiles.to_column(gate.beta_forward(options, refs["beta"][0]))
    refs["betas"][...] = jnp.broadcast_to(beta, refs["betas"].shape)


def _advance(refs: Refs, R: int, v_first: bool, h: Any) -> None:
    """One head's state and output for this token, exactly in float32 on the vector unit."""
    own = h if R == 1 else lax.div(h, R)
    row = pl.ds(h, 1)
    q, k = refs["qs"][pl.ds(own, 1), :], refs["ks"][pl.ds(own, 1), :]
    v, beta, decay = refs["vs"][row, :], refs["betas"][row, :], refs["decay"][row, :]
    if v_first:
        state = refs["state"][h] * decay
        read = jnp.sum(state * k, axis=1, keepdims=True)
        state = state + tiles.to_column(beta * v) * k - tiles.to_column(beta) * read * k
        o = _row(jnp.sum(state * q, axis=1, keepdims=True))
    else:
        key = tiles.to_column(k)
        state = refs["state"][h] * tiles.to_column(decay)
        read = jnp.sum(state * key, axis=0, keepdims=True)
        state = state + key * (beta * (v - read))
        o = jnp.sum(state * tiles.to_column(q), axis=0, keepdims=True)
    refs["state"][h] = state
    refs["os"][row, :] = o


def _row(column: Array) -> Array:
    n = column.shape[0]
    diagonal = tiles.row_index(n, n) == lax.broadcasted_iota(jnp.int32, (n, n), 1)
    return jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)


def _kernel(request: Request, options: KernelOptions, names: list[str], tokens: int, *refs_: Any) -> None:
    refs = dict(zip(names, refs_, strict=True))
    i = pl.program_id(0)
    _load_state(refs, i, tokens)
    _token_rows(options, refs, request.scalar_gate)
    R = request.HV // request.H

    def one(h: Any, carry: None) -> None:
        _advance(refs, R, request.state_v_first, h)
        return carry

    lax.fori_loop(0, request.HV, one, None)
    refs["o"][0] = refs["os"][...].astype(refs["o"].dtype)
    if "states" in refs:
        _store_state(refs, i, tokens)


def recurrent_kernel(
    request: Request,
    inputs: RecurrentInputs,
    options: KernelOptions,
    plan: RecurrentPlan,
    rows_out: int,
    launch: Launch,
) -> tuple[Array, Array | None]:
    """``o`` ``[B, T, HV, V]`` and the written states: the pool updated in place when
    ``inplace_state``, else ``[rows_out, ...]`` of which only the written rows mean anything; None
    when ``rows_out`` is 0.
    """
    H, HV, K, V = request.H, request.HV, request.K, request.V
    tokens = request.B * request.T
    named: list[tuple[str, Array, Any]] = []

    def per_token(name: str, x: Array, *tail: int) -> None:
        spec = pl.BlockSpec((1, *tail), lambda i, *_: (i, 0, 0))
        named.append((name, x.reshape(tokens, *tail), spec))

    per_token("q", inputs.q, H, K)
    per_token("k", inputs.k, H, K)
    per_token("v", inputs.v, HV, V)
    per_token("beta", inputs.beta.astype(F32), 1, HV)
    per_token("g", inputs.g, *((1, HV) if request.scalar_gate else (HV, K)))
    _add_params(request, inputs, named)
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    if inputs.initial_state is not None:
        named.append(("pool", inputs.initial_state, any_space))
    tail = request.state_tail
    dtype = jnp.dtype(request.state_dtype)
    if inputs.write_pool is not None:
        named.append(("write_pool", inputs.write_pool, any_space))
    values = [x for _, x, _ in named]
    out_shape = [out_struct((tokens, HV, V), inputs.v.dtype, *values)]
    out_specs = [pl.BlockSpec((1, HV, V), lambda i, *_: (i, 0, 0))]
    made = ["o"]
    if rows_out:
        made.append("states")
        out_shape.append(out_struct((rows_out, HV, *tail), dtype, *values))
        out_specs.append(any_space)
    scratch = _scratch(request, dtype, inputs.initial_state is not None, rows_out > 0)
    names = [*NAMES, *(n for n, _, _ in named), *made, *(n for n, _ in scratch)]
    pool_at = len(NAMES) + len(named) - 1  # the written pool
    limit = {} if launch.vmem_bytes is None else {"vmem_limit_bytes": launch.vmem_bytes}
    kernel = pl.pallas_call(
        lambda *refs: _kernel(request, options, names, tokens, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(NAMES),
            grid=(tokens,),
            in_specs=[spec for _, _, spec in named],
            out_specs=out_specs,
            scratch_shapes=[shape for _, shape in scratch],
        ),
        out_shape=out_shape,
        input_output_aliases={pool_at: 1} if request.inplace_state else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), **limit),
        interpret=launch.interpret,
        name="kdacore_recurrent",
    )
    outs = launch.call(kernel, *plan.arrays(), *values)
    o = outs[0].reshape(request.B, request.T, HV, V)
    return o, outs[1] if rows_out else None


def _add_params(request: Request, inputs: RecurrentInputs, named: list[tuple[str, Array, Any]]) -> None:
    """Gate parameters, whole."""
    HV = request.HV
    if inputs.A_log is not None:
        spec = pl.BlockSpec((1, HV), lambda i, *_: (0, 0))
        named.append(("slope", gate_rate(inputs.A_log.astype(F32)).reshape(1, HV), spec))
    if inputs.dt_bias is not None:
        shape = (1, HV) if request.scalar_gate else (HV, request.K)
        spec = pl.BlockSpec(shape, lambda i, *_: (0, 0))
        named.append(("bias", held(inputs.dt_bias.astype(F32)).reshape(shape), spec))


def _scratch(request: Request, dtype: Any, reads: bool, writes: bool) -> list[tuple[str, Any]]:
    H, HV, K, V = request.H, request.HV, request.K, request.V
    state = (HV, *request.state_tail)
    found: list[tuple[str, Any]] = [
        ("state", pltpu.VMEM(state, F32)),
        ("qs", pltpu.VMEM((H, K), F32)),
        ("ks", pltpu.VMEM((H, K), F32)),
        ("vs", pltpu.VMEM((HV, V), F32)),
        ("betas", pltpu.VMEM((HV, V), F32)),
        ("decay", pltpu.VMEM((HV, K), F32)),
        ("os", pltpu.VMEM((HV, V), F32)),
    ]
    if reads:
        found += [("fetched", pltpu.VMEM((2, *state), dtype)), ("fetch_done", pltpu.SemaphoreType.DMA((2,)))]
    if writes:
        found += [("outgoing", pltpu.VMEM((2, *state), dtype)), ("store_done", pltpu.SemaphoreType.DMA((2,)))]
    return found
