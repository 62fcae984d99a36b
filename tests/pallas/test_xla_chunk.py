"""The chunked ops of the xla backend against the float64 oracle: every option, hard gates, packs."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax, with_grad

from kdacore.types import OutputGrads
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.xla import entry_points

GDN = "chunk_gated_delta_rule"
EDGES = (0, 1, 15, 16, 17, 0, 63, 64, 65, 130, 0)
BOTH_WAYS = {
    "plain, no state, short": Case(T=5, initial=False, final=False, l2norm=False),
    "batch, GVA, odd dims, softplus gate": Case(B=2, T=100, H=2, HV=4, K=60, V=100, gate="softplus"),
    "bounded gate without A_log, beta logits": Case(
        T=70, gate="sigmoid", lower_bound=-5.0, A_log=False, beta_sigmoid=True, neg_eigval=True, v_first=True
    ),
    "bf16, bf16 state": Case(
        dtype="bfloat16", gate="sigmoid", lower_bound=-4.0, state_dtype="bfloat16", K=64
    ),
    "fp16": Case(dtype="float16", gate="softplus", beta_sigmoid=True, bias=False),
    "pack with a state": Case(lengths=EDGES, gate="softplus", HV=4, H=2, v_first=True, K=24),
    "pack without a state": Case(lengths=(63, 0, 65), initial=False, gates="mixed"),
    "gdn": Case(op=GDN, T=150, gate="softplus", H=1, HV=3),
    "gdn pack": Case(op=GDN, lengths=(1, 70, 0, 40), gates="mixed", beta_sigmoid=True),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_forward_and_backward(name: str) -> None:
    request, inputs = build(BOTH_WAYS[name])
    request = with_grad(request)
    out = entry_points.chunk_forward(request, to_jax(inputs))
    check_forward(out, request, inputs)
    grads = output_grads(request)
    d = OutputGrads(*(None if x is None else jnp.asarray(x) for x in grads))
    check_backward(entry_points.chunk_backward(request, to_jax(inputs), out.saved, d), request, inputs, grads)


@pytest.mark.exhaustive
def test_backward_without_what_the_forward_saved() -> None:
    """It is computed again: another program, so the same numbers up to rounding."""
    request, inputs = build(Case(T=200, gate="softplus", needs_grad=True))
    arrays = to_jax(inputs)
    saved = entry_points.chunk_forward(request, arrays).saved
    d = OutputGrads(*(jnp.asarray(x) for x in output_grads(request)))
    one = entry_points.chunk_backward(request, arrays, saved, d)
    two = entry_points.chunk_backward(request, arrays, (), d)
    for a, b in zip(one, two, strict=True):
        assert a is b is None or error(a, b) < 2e-6


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=330, checkpoint_every=128),
        Case(lengths=(0, 64, 65, 200), checkpoint_every=64, v_first=True),
    ],
    ids=["dense", "pack"],
)
def test_checkpoints(case: Case) -> None:
    request, inputs = build(case)
    check_forward(entry_points.chunk_forward(request, to_jax(inputs)), request, inputs)


HARD = ["zero", "five", "sixty", "mixed", "random"]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("collinear", [False, True], ids=["", "collinear"])
def test_hard_gates(dtype: str, collinear: bool) -> None:
    """All gates of one shape share one compilation."""
    case = Case(T=200, K=64, V=64, HV=1, dtype=dtype, collinear=collinear, beta_sigmoid=False)
    for gates in HARD:
        request, inputs = build(dataclasses.replace(case, gates=gates, needs_grad=True))
        out = entry_points.chunk_forward(request, to_jax(inputs))
        check_forward(out, request, inputs, factor=2)
        grads = output_grads(request)
        d = OutputGrads(*(jnp.asarray(x) for x in grads))
        got = entry_points.chunk_backward(request, to_jax(inputs), out.saved, d)
        check_backward(got, request, inputs, grads, factor=2)


def test_values_of_cu_seqlens_do_not_recompile() -> None:
    """Shapes depend on shapes alone: another pack of the same size runs the same program."""
    first, inputs = build(Case(lengths=(10, 100, 20)))
    entry_points.chunk_forward(first, to_jax(inputs))
    before = compiled_program.cache_info().misses
    request, inputs = build(Case(lengths=(65, 1, 64), seed=3))
    check_forward(entry_points.chunk_forward(request, to_jax(inputs)), request, inputs)
    assert compiled_program.cache_info().misses == before
    program: Any = compiled_program(entry_points._one_program, replace(request, tensors=()))
    assert program._cache_size() == 1
