"""The Pallas kernels in interpret mode against the float64 oracle: options, packs, hard gates, head
layouts."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax

from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import OutputGrads, RecurrentInputs, Request
from kdacore_pallas.tpu import chunk_backward, chunk_forward, inverse, recurrent, vmem
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.products import Passes

GDN = "chunk_gated_delta_rule"
INTERPRET = Launch(interpret=True)
CASES = {
    "two chunks, mixed gates": Case(T=200, K=16, V=8, gates="mixed"),
    "pack, GVA, v first": Case(
        lengths=(0, 1, 130, 128, 0, 40),
        H=2,
        HV=4,
        gate="softplus",
        v_first=True,
        K=24,
        V=40,
        beta_sigmoid=True,
    ),
    "bf16, bounded gate": Case(
        dtype="bfloat16", B=2, T=70, K=64, gate="sigmoid", lower_bound=-5.0, bias=False
    ),
    "gdn": Case(op=GDN, gate="softplus", T=140, HV=3, K=16, V=16),
    "more than 128 channels": Case(T=20, K=136, V=200, HV=1, initial=False, final=False),
}


def side_by_side(request: Request, kernel: str) -> Launch:
    """As many heads together as the number of heads allows."""
    return dataclasses.replace(INTERPRET, together=vmem.heads_together(request, kernel, request.H))


@partial(jax.jit, static_argnums=0)
def forward(request: Request, inputs: Any) -> Any:
    return chunk_forward.forward(request, inputs, request.H, side_by_side(request, "forward"))


@partial(jax.jit, static_argnums=0)
def backward(request: Request, inputs: Any, grads: OutputGrads) -> Any:
    launch = side_by_side(request, "backward")
    return chunk_backward.backward(request, inputs, (), grads, request.H, launch)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if n != "two chunks, mixed gates" else ()) for n in CASES],
)
def test_forward_and_backward(name: str) -> None:
    request, inputs = build(CASES[name])
    check_forward(forward(request, to_jax(inputs)), request, inputs)
    grads = output_grads(request)
    d = OutputGrads(*(None if x is None else jnp.asarray(x) for x in grads))
    check_backward(backward(request, to_jax(inputs), d), request, inputs, grads)


HEADS = {
    "whole registers": (Case(T=20, H=2, HV=4, K=128, V=128, dtype="bfloat16", gate="softplus", seed=41), 2),
    "two head blocks": (Case(T=20, H=16, HV=16, K=16, V=8, gate="softplus", seed=42), 8),
    "keys in whole registers": (Case(B=2, T=20, H=1, HV=2, K=128, V=64, beta_sigmoid=True, seed=43), 1),
    "values in whole registers": (Case(lengths=(3, 0, 17), H=2, HV=2, K=40, V=128, gate="softplus", seed=44), 2),
    "one gate a head, two head blocks": (Case(op=GDN, T=20, H=16, HV=32, K=16, V=16, seed=45), 8),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "whole registers" else pytest.mark.exhaustive) for n in HEADS]
)
def test_where_heads_lie_in_the_lanes(name: str) -> None:
    """Heads that fill whole registers are read where they are, others from scratch; a grid step has some of them."""
    case, hb = HEADS[name]
    request, inputs = build(case)
    check_forward(
        jax.jit(lambda x: chunk_forward.forward(request, x, hb, INTERPRET))(to_jax(inputs)), request, inputs
    )
    grads = output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    got = jax.jit(lambda x, d: chunk_backward.backward(request, x, (), d, hb, INTERPRET))(to_jax(inputs), d)
    check_backward(got, request, inputs, grads)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("collinear", [False, True], ids=["", "collinear"])
def test_hard_gates(dtype: str, collinear: bool) -> None:
    case = Case(T=256, K=64, V=64, HV=1, dtype=dtype, collinear=collinear)
    for gates in ("zero", "five", "sixty", "mixed"):
        request, inputs = build(dataclasses.replace(case, gates=gates))
        check_forward(forward(request, to_jax(inputs)), request, inputs, factor=2)


@pytest.mark.exhaustive
def test_later_tokens_change_no_bit() -> None:
    case = Case(T=256, K=16, V=16, HV=1, gates="mixed", final=False)
    request, inputs = build(case)
    other = build(dataclasses.replace(case, seed=5))[1]
    t = 150
    rows = ("q", "k", "v", "g", "beta")
    changed = inputs._replace(
        **{n: np.concatenate([getattr(inputs, n)[:, :t], getattr(other, n)[:, t:]], 1) for n in rows}
    )
    do = np.array(output_grads(request).o)
    do[:, t:] = 0
    results = []
    for x in (inputs, changed):
        o = forward(request, to_jax(x)).o
        d = backward(request, to_jax(x), OutputGrads(jnp.asarray(do)))
        results.append([np.asarray(a)[:, :t] for a in (o, *d[:5])])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("solve", [inverse.by_substitution, inverse.by_merging])
@pytest.mark.parametrize("C", [64, 128])
def test_inverse_of_collinear_keys(solve: Any, C: int) -> None:
    """L full of ones: its powers reach 1e37, the inverse only 1."""
    from jax.experimental import pallas as pl

    L = np.tril(np.full((C, C), 0.999, np.float32), -1)

    def kernel(x: Any, y: Any) -> None:
        y[...] = solve(x[...], Passes.EXACT)

    found = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((C, C), jnp.float32), interpret=True)(L)
    assert error(found, np.linalg.inv(np.eye(C) + L.astype(np.float64))) < 2e-6


RECURRENT = "fused_recurrent_kda"


def run_recurrent(request: Request, inputs: RecurrentInputs) -> Any:
    return jax.jit(lambda x: recurrent.forward(request, x, INTERPRET))(to_jax(inputs))


@pytest.mark.parametrize(
    "case",
    [
        Case(op=RECURRENT, B=2, T=3, H=2, HV=4, K=24, V=40, gate="softplus", beta_sigmoid=True),
        Case(op=RECURRENT, lengths=(1, 0, 4, 2), v_first=True, gates="mixed"),
        Case(op="fused_recurrent_gated_delta_rule", B=2, T=2, gate="softplus", state_dtype="bfloat16"),
        Case(op=RECURRENT, T=3, initial=False, final=False, dtype="bfloat16", K=136, V=8),
    ],
    ids=["dense", "pack", "gdn", "no state"],
)
def test_recurrent(case: Case) -> None:
    request, inputs = build(case)
    check_forward(run_recurrent(request, inputs), request, inputs)


POOLS = {
    "slots": (Case(op=RECURRENT, B=4, T=1), [4, -1, 0, 2], None, {"inplace_state": True}),
    "fresh": (Case(op=RECURRENT, B=3, T=2, v_first=True), [4, -1, 0], None, {}),
    "accepted": (
        Case(op=RECURRENT, B=3, T=2), [[0, 1, 2], [3, 4, -1], [5, 6, -1]], [2, 0, 1], {"inplace_state": True}
    ),
    "read only": (Case(op=RECURRENT, B=2, T=4, final=False), [5, 2], None, {"read_only_state": True}),
}  # fmt: skip


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("name", POOLS)
def test_recurrent_on_a_pool(name: str) -> None:
    case, indices, accepted, options = POOLS[name]
    request, inputs = build(case)
    table = np.asarray(indices, np.int32)
    pool = np.random.default_rng(3).standard_normal((7, *request.state_shape[1:])).astype(np.float32)
    accepted_ = None if accepted is None else np.asarray(accepted, np.int32)
    inputs = inputs._replace(initial_state=pool, state_indices=table, num_accepted_tokens=accepted_)
    request = dataclasses.replace(request, pool_size=7, state_indices_ndim=table.ndim, **options)
    out, want = run_recurrent(request, inputs), oracle_forward(request, inputs)
    assert error(out.o, want.o) < 2e-5
    assert (out.final_state is None) == (want.final_state is None)
    if want.final_state is not None:
        assert error(out.final_state, want.final_state) < 2e-5
    if request.inplace_state:
        for row in set(range(7)) - set(table.ravel().tolist()):
            assert np.array_equal(np.asarray(out.final_state[row]), pool[row])
