"""``chunk_gated_delta_rule`` from JAX with gradients, whose kernels the CPU emulates: the bits of the same calls from
torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cuda_calls import MODEL, request_of
from emulated_backend import on_hopper
from gated_delta_backward_calls import WHOLE
from gated_delta_calls import OP, draw, state
from jax_calls import arrays_of, check, function, ints, normal
from jax_emulation import Device, to_jax

from kdacore.types import ChunkInputs, OutputGrads
from kdacore_cuda import choice
from kdacore_cuda.forms.gated_delta import backward_segments, segments
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients as gated_delta_gradients
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths

CASES = {
    "states": (
        draw(100, 1, 2, initial_state=state(1, 2)),
        MODEL | {"output_final_state": True, "state_v_first": True},
    ),
    "grouped": (draw(65, 2, 6, B=2), MODEL),
    "pack": (
        draw(100, cu_seqlens=ints(0, 64, 64, 90), initial_state=state(3, 2, dtype=torch.bfloat16)),
        MODEL | {"output_final_state": True},
    ),
    "float16": (draw(40)._replace(g=draw(40).g.half()), MODEL),
}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("name", "beside"), [*((name, False) for name in CASES), ("grouped", True), ("pack", True)]
)
def test_results_and_gradients(
    emulated: list[str], from_jax: Device, monkeypatch: pytest.MonkeyPatch, name: str, beside: bool
) -> None:
    """Of everything; and where records are made beside walks."""
    monkeypatch.setattr(choice, "most_cut", lambda count: 0)
    monkeypatch.setattr(choice, "use_records_beside", lambda *given: beside)
    check_launches(emulated, from_jax, *CASES[name])
    assert any(name.startswith("walk_records_beside") for name in emulated) == beside


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("packed", [False, True])
def test_segments(
    emulated: list[str], from_jax: Device, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """The same of calls that are cut."""
    for module in (segments, backward_segments):
        monkeypatch.setattr(module, "choose_lengths", lambda *given: SegmentLengths(1, 0, 2, 1, 1, 9, 1))
    given: dict[str, Any] = {"cu_seqlens": ints(0, 30, 290, 320)} if packed else {}
    inputs = draw(330, initial_state=state(3 if packed else 1, 2), **given)
    check_launches(emulated, from_jax, inputs, MODEL | {"output_final_state": True})
    assert {"walk_later_segments-WARPGROUPS1", "walk_inner_segments-WARPGROUPS1"} < {*emulated}


def check_launches(
    emulated: list[str], from_jax: Device, inputs: ChunkInputs, options: dict[str, Any]
) -> None:
    """Results and gradients of everything have the bits of the same calls from torch, by the same launches."""
    x = arrays_of(inputs)
    fixed = {n: a for n, a in x.items() if n == "cu_seqlens"}
    run = function(OP, inputs, options, {})
    r = request_of(OP, inputs, **options)
    d_o = normal(*inputs.v.shape, seed=1, dtype=inputs.v.dtype)
    dtype = getattr(torch, r.state_dtype)
    d_state = normal(*r.state_shape, seed=2, dtype=dtype) if r.output_final_state else None

    def both(learned: Any) -> Any:
        results, pull = jax.vjp(lambda learned: run({**learned, **fixed}), learned)
        return results, pull((to_jax(d_o), None if d_state is None else to_jax(d_state)))[0]

    results, got = jax.block_until_ready(jax.jit(both)({n: a for n, a in x.items() if n not in fixed}))
    launched = [x.kernel.path.split("/")[-1].removesuffix(".cu") for x in from_jax.launched]
    emulated.clear()
    out = on_hopper(gated_delta.forward)(r, inputs)
    check(results[:2], (out.o, out.final_state))
    want = on_hopper(gated_delta_gradients.backward)(r, inputs, (), OutputGrads(d_o, d_state))
    check([got.get(n) for n in want._fields], want)
    assert launched == [name.split("-")[0] for name in emulated]


def test_vmap_is_one_call_with_a_larger_batch(from_jax: Device) -> None:
    """Gradients of parameters are sums over each part of the batch."""
    x = arrays_of(draw(33, B=2, initial_state=state(2, 2)))
    shared = {n: x.pop(n) for n in ("A_log", "dt_bias")}
    run = function(OP, None, MODEL | {"output_final_state": True}, {})
    rows = {n: a[:, None] for n, a in x.items()}

    def gradients(x: Any) -> Any:
        def loss(x: Any, shared: Any) -> Any:
            o, final = run({**x, **shared})
            return o.astype(jnp.float32).sum() + final.sum()

        return jax.grad(loss, argnums=(0, 1))(x, shared)

    got = jax.block_until_ready(jax.jit(jax.vmap(gradients))(rows))
    names = [x.kernel.entry for x in from_jax.launched]
    assert names == WHOLE[:3]
    each = jax.jit(gradients)
    for i in range(2):
        want = jax.block_until_ready(each({n: a[i] for n, a in rows.items()}))
        for n, a in want[0].items():
            assert np.array_equal(got[0][n][i].astype(jnp.float32), a.astype(jnp.float32)), n
        for n, a in want[1].items():  # added up in another order
            assert np.allclose(got[1][n][i], a, rtol=1e-5, atol=1e-5), n


def test_vmap_over_packs_is_a_loop(from_jax: Device) -> None:
    x = arrays_of(draw(40, cu_seqlens=ints(0, 10, 40)))
    ends = jnp.array([[0, 10, 40], [0, 25, 40]], jnp.int32)
    run = function(OP, None, MODEL, {})

    def gradient(v: Any, ends: Any) -> Any:
        return jax.grad(lambda v: run({**x, "v": v, "cu_seqlens": ends})[0].astype(jnp.float32).sum())(v)

    got = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(x["v"], ends)
    for i in range(2):
        want = jax.jit(gradient)(x["v"], ends[i])
        assert np.array_equal(got[i].astype(jnp.float32), want.astype(jnp.float32))
