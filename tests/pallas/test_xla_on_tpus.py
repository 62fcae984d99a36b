"""What the xla backend computes on TPUs, run on a CPU: plain JAX against the float64 oracle, and its promise of bits.

That it compiles for TPUs, quickly and to a small program, is checked in ``test_tpu_compiler.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, check_backward, check_forward, error, full_speed, output_grads, to_jax

from kdacore.types import ChunkInputs, Device, OutputGrads, Request
from kdacore_pallas.xla import chunk_backward, chunk_forward, parts

GDN = "chunk_gated_delta_rule"
EDGES = (0, 1, 15, 16, 17, 0, 63, 64, 65, 130, 0)
ROWS = ("q", "k", "v", "g", "beta")
forward = jax.jit(chunk_forward.forward, static_argnums=0)
backward = jax.jit(chunk_backward.backward, static_argnums=0)
optimised = full_speed(chunk_forward.forward)


def on_tpu(case: Case, **changes: Any) -> tuple[Request, Any]:
    request, inputs = build(replace(case, **changes))
    return replace(request, device=Device("tpu", arch="v6e")), inputs


BOTH_WAYS = {
    "plain, no state, short": Case(T=5, initial=False, final=False, l2norm=False),
    "batch, GVA, odd dims, softplus gate": Case(B=2, T=100, H=2, HV=4, K=60, V=100, gate="softplus"),
    "bounded gate without A_log, beta logits, several segments": Case(
        T=1100,
        gate="sigmoid",
        lower_bound=-5.0,
        A_log=False,
        beta_sigmoid=True,
        neg_eigval=True,
        v_first=True,
    ),
    "bf16, bf16 state": Case(
        dtype="bfloat16", gate="sigmoid", lower_bound=-4.0, state_dtype="bfloat16", K=64
    ),
    "pack with a state": Case(lengths=EDGES, gate="softplus", HV=4, H=2, v_first=True, K=24),
    "pack without a state": Case(lengths=(63, 0, 65), initial=False, gates="mixed"),
    "gdn": Case(op=GDN, T=150, gate="softplus", H=1, HV=3),
    "gdn pack": Case(op=GDN, lengths=(1, 70, 0, 40), gates="mixed", beta_sigmoid=True),
}


USUAL = ("bf16, bf16 state", "pack with a state", "gdn")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.exhaustive) for n in BOTH_WAYS]
)
def test_forward_and_backward(name: str) -> None:
    request, inputs = on_tpu(BOTH_WAYS[name], needs_grad=True)
    out = forward(request, to_jax(inputs))
    check_forward(out, request, inputs)
    grads = output_grads(request)
    d = OutputGrads(*(None if x is None else jnp.asarray(x) for x in grads))
    check_backward(backward(request, to_jax(inputs), out.saved, d), request, inputs, grads)


@pytest.mark.exhaustive
def test_backward_without_what_the_forward_saved() -> None:
    request, inputs = on_tpu(Case(T=200, gate="softplus", needs_grad=True))
    arrays, grads = to_jax(inputs), output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    saved = forward(request, arrays).saved
    for one, two in zip(backward(request, arrays, saved, d), backward(request, arrays, (), d), strict=True):
        assert one is two is None or error(one, two) < 2e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["chunk_kda", GDN])
@pytest.mark.parametrize("collinear", [False, True], ids=["", "collinear"])
def test_hard_gates(op: str, dtype: str, collinear: bool) -> None:
    """All gates of one shape share one compilation."""
    case = Case(op=op, T=200, K=64, V=64, HV=1, dtype=dtype, collinear=collinear, needs_grad=True)
    for gates in ("zero", "five", "sixty", "mixed", "random"):
        request, inputs = on_tpu(case, gates=gates)
        out = forward(request, to_jax(inputs))
        check_forward(out, request, inputs, factor=2)
        grads = output_grads(request)
        d = OutputGrads(*(jnp.asarray(x) for x in grads))
        check_backward(backward(request, to_jax(inputs), out.saved, d), request, inputs, grads, factor=2)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("op", ["chunk_kda", GDN])
def test_gates_without_a_bound(op: str) -> None:
    """Minus infinity times zero, in a sum over other rows, would not be a number."""
    request, inputs = on_tpu(Case(op=op, T=300, gates="mixed", needs_grad=True))
    g = np.array(inputs.g)
    g[:, 50:200:7] = -1e6
    g[:, 60:200:9] = -np.inf
    inputs = inputs._replace(g=g)
    out = forward(request, to_jax(inputs))
    check_forward(out, request, inputs, factor=2)
    d = OutputGrads(*(jnp.asarray(x) for x in output_grads(request)))
    assert all(
        bool(jnp.isfinite(x).all()) for x in backward(request, to_jax(inputs), out.saved, d) if x is not None
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=330, checkpoint_every=128),
        Case(lengths=(0, 64, 65, 200), checkpoint_every=64, v_first=True),
    ],
    ids=["dense", "pack"],
)
def test_checkpoints(case: Case) -> None:
    request, inputs = on_tpu(case)
    check_forward(forward(request, to_jax(inputs)), request, inputs)


def cut(request: Request, inputs: ChunkInputs, T: int) -> tuple[Request, ChunkInputs]:
    """The first T tokens of a dense call."""
    return replace(request, T=T), inputs._replace(**{n: getattr(inputs, n)[:, :T] for n in ROWS})


@pytest.mark.exhaustive
def test_later_tokens_change_no_bits() -> None:
    """Neither their values nor their number: the products of a level have later rows in them, times zero."""
    for op in ("chunk_kda", GDN):
        request, inputs = on_tpu(Case(op=op, B=2, T=600, HV=4, gates="random", dtype="bfloat16"))
        whole = optimised(request, to_jax(inputs)).o
        other = inputs._replace(**{n: np.array(getattr(inputs, n)) for n in ROWS})
        for n in ROWS:
            getattr(other, n)[:, 333:] *= 3
        changed = optimised(request, to_jax(other)).o
        assert bool((whole[:, :333] == changed[:, :333]).all()) and bool((whole != changed).any())
        for T in (1, 64, 70, 333, 512):
            short = optimised(*cut_to_jax(request, inputs, T)).o
            assert bool((short == whole[:, :T]).all()), (op, T)


def cut_to_jax(request: Request, inputs: ChunkInputs, T: int) -> tuple[Request, ChunkInputs]:
    request, inputs = cut(request, inputs, T)
    return request, to_jax(inputs)


def test_another_sequence_changes_no_bit() -> None:
    """NaN in a neighbour of a pack, whose rows a chunk may read and must not use."""
    request, inputs = on_tpu(Case(lengths=(100, 60, 90)))
    dirty = inputs._replace(
        **{n: np.array(getattr(inputs, n)) for n in ROWS}, initial_state=np.array(inputs.initial_state)
    )
    for n in ROWS:
        getattr(dirty, n)[:, 100:160] = np.nan
    dirty.initial_state[1] = np.nan
    one, two = (forward(request, to_jax(x)) for x in (inputs, dirty))
    for part in (slice(0, 100), slice(160, 250)):
        assert np.array_equal(np.asarray(one.o)[:, part], np.asarray(two.o)[:, part])
    assert np.array_equal(np.asarray(one.final_state)[[0, 2]], np.asarray(two.final_state)[[0, 2]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("H", [2, 48])
def test_shard_map_over_heads(H: int) -> None:
    """Loops carry arrays that vary over the mesh, those over parts of the heads too."""
    request, inputs = on_tpu(Case(B=1, T=70, H=H, HV=2 * H, K=8, V=8, gate="softplus", needs_grad=True))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    x = to_jax(inputs)
    rows, state = P(None, None, "heads"), P(None, "heads")
    specs = ChunkInputs(*[rows] * 5, P("heads"), P("heads"), state)
    local = replace(request, H=H // 2, HV=H)

    def both(x: ChunkInputs, do: Any, ds: Any) -> Any:
        out = parts.forward(local, x)
        return out.o, out.final_state, parts.backward(local, x, out.saved, OutputGrads(do, ds))[:7]

    grads = output_grads(request)
    run = jax.shard_map(
        both, mesh=mesh, in_specs=(specs, rows, state), out_specs=(rows, state, tuple(specs[:7]))
    )
    o, final, found = jax.jit(run)(x, jnp.asarray(grads.o), jnp.asarray(grads.final_state))
    want = forward(request, x)
    assert error(o, want.o) < 1e-6 and error(final, want.final_state) < 1e-6
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    for one, two in zip(found, backward(request, x, want.saved, d), strict=False):
        assert error(one, two) < 2e-6


PARTS = {
    "batch and heads, GVA": Case(B=3, T=70, H=32, HV=64, K=8, V=16, gate="softplus"),
    "heads of a pack": Case(lengths=(3, 0, 70), H=40, HV=40, K=8, V=8, gate="softplus", v_first=True),
    "rows of one q/k head": Case(B=2, T=20, H=1, HV=40, K=8, V=8),
    "gdn, checkpoints": Case(op=GDN, B=4, T=130, H=16, HV=16, K=8, V=8, gate="softplus", checkpoint_every=64),
}


@pytest.mark.exhaustive
def test_shard_map_over_the_batch_in_parts() -> None:
    """Parameters that the devices share: their gradients do not vary over the mesh."""
    request, inputs = on_tpu(Case(B=8, T=10, H=16, HV=16, K=8, V=8, gate="softplus", needs_grad=True))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    x, local = to_jax(inputs), replace(request, B=4, N=4)
    specs = ChunkInputs(*[P("data")] * 5, P(), P(), P("data"))
    grads = OutputGrads(*(jnp.asarray(g) for g in output_grads(request)))

    def gradients(x: ChunkInputs, do: Any, ds: Any) -> Any:
        return parts.backward(local, x, (), OutputGrads(do, ds))[:7]

    assert parts.parts_of(local).total > 1
    where = (specs, P("data"), P("data"))
    run = jax.shard_map(gradients, mesh=mesh, in_specs=where, out_specs=tuple(specs[:7]))
    for one, two in zip(jax.jit(run)(x, *grads), backward(request, x, (), grads), strict=False):
        assert error(one, two) < 2e-6


@pytest.mark.parametrize(
    "name",
    [n if n == "batch and heads, GVA" else pytest.param(n, marks=pytest.mark.exhaustive) for n in PARTS],
)
def test_many_heads_are_computed_in_parts(name: str) -> None:
    request, inputs = on_tpu(PARTS[name], needs_grad=True)
    assert parts.parts_of(request).total > 1
    out = jax.jit(parts.forward, static_argnums=0)(request, to_jax(inputs))
    check_forward(out, request, inputs)
    grads = output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    run = jax.jit(parts.backward, static_argnums=0)
    assert not out.saved
    check_backward(run(request, to_jax(inputs), (), d), request, inputs, grads)


def test_how_many_parts() -> None:
    request = on_tpu(Case(B=8, T=4, H=6, HV=6, K=8, V=8))[0]
    assert parts.parts_of(request) == (2, 1)
    assert parts.parts_of(replace(request, B=1, N=1, H=96, HV=96)) == (1, 3)
    assert parts.parts_of(replace(request, B=2, N=2, H=16, HV=64)) == (2, 2)
    assert parts.parts_of(replace(request, B=1, N=1, H=32, HV=32)) == (1, 1)
    assert parts.parts_of(replace(request, H=96, HV=96, device=Device("cpu"))) == (1, 1)
