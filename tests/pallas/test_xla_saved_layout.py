"""The forward saves arrays in the gradients' buffers: nothing is lost, and nothing is allocated or
copied for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, to_jax

import kdacore
from kdacore_pallas.xla import chunk_forward
from kdacore_pallas.xla.numerics import F32
from kdacore_pallas.xla.plan import make_plan
from kdacore_pallas.xla.saved_layout import SavedLayout, make_saved_layout

CASES = {
    "everything fits": Case(T=200, H=8, HV=8, K=64, V=64),
    "one q head": Case(T=130, H=1, HV=8, K=16, V=64),
    "a part of a state beside the rest": Case(T=130, H=2, HV=8, K=64, V=64),
    "several chunks a segment": Case(T=1200, H=1, HV=1, K=32, V=32),
    "more than the gradients hold": Case(T=200, H=8, HV=8, K=64, V=256),
    "one gate a head": Case(op="chunk_gated_delta_rule", T=200, H=2, HV=2, K=64, V=32),
    "narrow q, k and v": Case(T=200, H=2, HV=2, dtype="bfloat16"),
}


def layout_of(case: Case) -> tuple[SavedLayout, Any]:
    request, inputs = build(case)
    arrays = to_jax(inputs)
    plan = make_plan(request, None)
    initial = chunk_forward.states_in(request, plan, arrays.initial_state, frozenset())
    return chunk_forward.saved_layout(request, plan, arrays, initial), arrays


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_saved_arrays_are_intact_until_gradients_are_written(name: str) -> None:
    layout, inputs = layout_of(CASES[name])
    rng = np.random.default_rng(0)
    saved = [
        tuple(jnp.asarray(rng.standard_normal(s), F32) for s in layout.saved) for _ in range(layout.segments)
    ]
    buffers = layout.new_buffers(frozenset())
    assert buffers.keys() == set(layout.used)
    for s, arrays in enumerate(saved):
        buffers = layout.store(buffers, jnp.int32(s), arrays)
    for n in range(5):
        buffers.setdefault(n, layout.new_buffer(n, inputs[n].dtype, frozenset()))
    written = {}
    for s in reversed(range(layout.segments)):
        for found, want in zip(layout.load(buffers, jnp.int32(s)), saved[s], strict=True):
            np.testing.assert_array_equal(found, want)
        written[s] = tuple(jnp.full((1, layout.sizes[n]), s + n / 8, inputs[n].dtype) for n in range(5))
        buffers = layout.write_gradients(buffers, jnp.int32(s), written[s])
    for n in range(5):
        np.testing.assert_array_equal(
            buffers[n], jnp.concatenate([written[s][n] for s in range(layout.segments)])
        )


def test_which_buffers_are_used() -> None:
    """Corrected values are saved only if they need no memory; 16-bit gradients hold nothing."""
    for exact in (CASES["everything fits"], Case(T=130, H=8, HV=8, K=128, V=128)):
        assert layout_of(exact)[0].used == (0, 1, 2, 3) and len(layout_of(exact)[0].saved) == 4
    assert layout_of(CASES["narrow q, k and v"])[0].used == (3, 4, 5)
    request, inputs = build(CASES["one gate a head"])
    plan = make_plan(request, None)
    full = make_saved_layout(plan, to_jax(inputs), ((plan.M, 8),), ((10**6,),))
    assert full.saved == ((plan.M, 8),) and full.sizes[5] == 0


def temporaries(T: int, K: int, grads: Callable[..., Any]) -> int:
    x = {n: jax.ShapeDtypeStruct((1, T, 8, K), F32) for n in ("q", "k", "v", "g")}
    x["beta"] = jax.ShapeDtypeStruct((1, T, 8), F32)
    return int(jax.jit(grads).lower(x, x["v"]).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("K", [64, 128])
def test_gradients_take_no_memory_that_grows_but_their_own(K: int) -> None:
    """If the compiler copied a buffer, memory would grow with the number of tokens."""

    def loss(x: dict[str, Any], do: Any) -> Any:
        return (kdacore.chunk_kda(**x, backend="xla")[0] * do).sum()

    one, two = (temporaries(T, K, jax.grad(loss)) for T in (1024, 2048))
    assert two - one < 1024 * 8 * K * 4 / 10, "a tenth of one gradient of the tokens appended"
