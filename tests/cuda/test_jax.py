"""Calls from JAX, whose kernels the CPU emulates: the bits of the same calls from torch."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stages_calls
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, request_of
from emulated_backend import on_hopper
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax_calls import BACKEND, arrays_of, check, draw, from_torch, function, ints, normal
from jax_emulation import Device, to_jax

import kdacore
import kdacore.stages
from kdacore.errors import UnsupportedError
from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.recurrent import forward as recurrent
from kdacore_cuda.forms.stages import forward as stages
from kdacore_cuda.kernel_parameters import RECURRENT

FORMS = {"segments": (1, 150, 2), "dataflow": (1, 33, 18), "fused": (1, 20, 30)}
CASES: dict[str, tuple[ChunkInputs, dict[str, Any]]] = {
    "grouped": (draw(2, 65, 1, 2), BOUNDED_MODEL | {"output_final_state": True}),
    "states": (
        draw(1, 129, 2, initial_state=normal(1, 2, 128, 128, dtype=torch.bfloat16)),
        MODEL | {"output_final_state": True, "state_v_first": True},
    ),
    "float16": (draw(1, 40, 1)._replace(g=-torch.rand(1, 40, 1, 128).half(), A_log=None, dt_bias=None), {}),
    "pack": (
        draw(1, 200, 2, cu_seqlens=ints(0, 1, 1, 17, 190), initial_state=normal(4, 2, 128, 128)),
        MODEL | {"output_final_state": True, "checkpoint_every": 64},
    ),
    "pool": (
        draw(
            *(1, 150, 2),
            cu_seqlens=ints(0, 70, 70, 130),
            initial_state=normal(6, 2, 128, 128),
            state_indices=ints(4, 0, -1),
            has_initial_state=torch.tensor([False, True, True]),
            write_indices=ints(2, 5, -1),
            checkpoint_offsets=ints(0, 48, 32),
            checkpoint_indices=ints(1, 3, -1),
        ),
        MODEL | {"output_final_state": True, "inplace_state": True},
    ),
    "other pool": (
        draw(
            *(2, 33, 1),
            initial_state=normal(3, 1, 128, 128),
            state_indices=ints(2, 0),
            write_pool=normal(4, 1, 128, 128, seed=8),
            write_indices=ints(3, 1),
        ),
        MODEL | {"output_final_state": True, "inplace_state": True, "null_index": 0},
    ),
    "head dim 64": (draw(2, 33, 2, K=64), MODEL | {"output_final_state": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_forward(emulated: list[str], from_jax: Device, form: str) -> None:
    inputs, options = draw(*FORMS[form]), MODEL | {"output_final_state": True}
    run = jax.jit(function("chunk_kda", inputs, options, {}))
    got = jax.block_until_ready(run(arrays_of(inputs)))
    names = [x.kernel.path.split("/")[-1] for x in from_jax.launched]
    emulated.clear()
    check(got, from_torch(chunk_forward.forward, "chunk_kda", inputs, options))
    assert [name.removesuffix(".cu") for name in names] == [name.split("-")[0] for name in emulated]
    assert all(x.overlaps for x in from_jax.launched)


@pytest.mark.parametrize("name", CASES)
def test_every_option_of_the_forward(emulated: list[str], from_jax: Device, name: str) -> None:
    inputs, options = CASES[name]
    got = jax.block_until_ready(jax.jit(function("chunk_kda", inputs, options, {}))(arrays_of(inputs)))
    want = from_torch(chunk_forward.forward, "chunk_kda", inputs, options)
    check([x for x in got if x is not None], want)


@pytest.mark.parametrize("name", ["segments", "scan", "grouped", "pack"])
def test_gradients(emulated: list[str], from_jax: Device, name: str) -> None:
    """Of everything, as the backward of torch's calls gives them."""
    state = normal(1, 1, 128, 128)
    inputs, options = {
        "segments": (draw(1, 150, 1, initial_state=state), MODEL | {"output_final_state": True}),
        "scan": (draw(1, 20, 13), MODEL),
        "grouped": (draw(2, 65, 1, 2), BOUNDED_MODEL),
        "pack": (draw(1, 100, 1, cu_seqlens=ints(0, 64, 64, 90)), MODEL),
    }[name]
    x = arrays_of(inputs)
    fixed = {n: a for n, a in x.items() if n == "cu_seqlens"}
    run = function("chunk_kda", inputs, options, {})
    d_o = normal(*inputs.v.shape, seed=1, dtype=torch.bfloat16)
    d_state = normal(*state.shape, seed=2) if options.get("output_final_state") else None

    def gradients(learned: Any) -> Any:
        _, pull = jax.vjp(lambda learned: run({**learned, **fixed}), learned)
        return pull((to_jax(d_o), to_jax(d_state)))[0]

    got = jax.block_until_ready(jax.jit(gradients)({n: a for n, a in x.items() if n not in fixed}))
    request = request_of("chunk_kda", inputs, **options)
    want = on_hopper(chunk_backward.backward)(request, inputs, (), OutputGrads(d_o, d_state))
    check([got.get(n) for n in want._fields], want)


CALLS: dict[str, tuple[RecurrentInputs, dict[str, Any]]] = {
    "pool": (
        RecurrentInputs(
            *draw(3, 1, 2, 4)[:7], initial_state=normal(5, 4, 128, 128), state_indices=ints(4, -1, 0)
        ),
        MODEL | {"output_final_state": True, "inplace_state": True},
    ),
    "candidates": (
        RecurrentInputs(
            *draw(2, 3, 1)[:7],
            initial_state=normal(8, 1, 128, 128),
            state_indices=ints([1, 2, 3], [5, 6, 7]),
            num_accepted_tokens=ints(2, 1),
        ),
        MODEL | {"output_final_state": True, "inplace_state": True},
    ),
    "head dim 64": (
        RecurrentInputs(*draw(2, 2, 2, K=64)[:7], initial_state=normal(2, 2, 64, 64)),
        MODEL | {"output_final_state": True, "state_v_first": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_recurrent_op(emulated: list[str], from_jax: Device, name: str) -> None:
    inputs, options = CALLS[name]
    got = jax.block_until_ready(
        jax.jit(function("fused_recurrent_kda", inputs, options, {}))(arrays_of(inputs))
    )
    check(got, from_torch(recurrent.forward, "fused_recurrent_kda", inputs, options))


def drawn(seed: int) -> tuple[str, Any, Any, dict[str, Any]]:
    """A random call: its op, the function that computes it, its arrays and options."""
    rng = np.random.default_rng(seed)
    chunked, packed = bool(rng.integers(2)), bool(rng.integers(2))
    T = int(rng.integers(1, 150 if chunked else 6))
    B, H, K = 1 if packed else int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.choice([64, 128]))
    HV = H * int(rng.integers(1, 3))
    inner = sorted(rng.integers(0, T + 1, int(rng.integers(1, 4))).tolist())
    more: dict[str, Any] = {"cu_seqlens": ints(0, *inner, T)} if packed else {}
    if rng.integers(2):
        dtype = torch.bfloat16 if rng.integers(2) else torch.float32
        more["initial_state"] = normal(len(inner) + 1 if packed else B, HV, K, K, seed=seed, dtype=dtype)
    options = dict(BOUNDED_MODEL if rng.integers(2) else MODEL)
    options |= {
        name: True for name in ("output_final_state", "state_v_first", "allow_neg_eigval") if rng.integers(2)
    }
    inputs = draw(B, T, H, HV, K, seed, **more)
    if chunked:
        return "chunk_kda", chunk_forward.forward, inputs, options
    fields = {n: x for n, x in inputs._asdict().items() if n in RecurrentInputs._fields}
    return "fused_recurrent_kda", recurrent.forward, RecurrentInputs(**fields), options


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_have_the_bits_of_torch_s(emulated: list[str], from_jax: Device, seed: int) -> None:
    op, forward, inputs, options = drawn(seed)
    got = jax.block_until_ready(jax.jit(function(op, inputs, options, {}))(arrays_of(inputs)))
    assert from_jax.launched
    check([x for x in got if x is not None], from_torch(forward, op, inputs, options))


def test_the_random_calls_differ() -> None:
    calls = [drawn(seed) for seed in range(8)]
    assert {op for op, *_ in calls} == {"chunk_kda", "fused_recurrent_kda"}
    assert {inputs.q.shape[-1] for _, _, inputs, _ in calls} == {64, 128}
    for name in ("cu_seqlens", "initial_state"):
        assert {getattr(inputs, name) is None for _, _, inputs, _ in calls} == {True, False}


def test_a_donated_pool_is_updated_in_its_memory(from_jax: Device) -> None:
    inputs, options = CALLS["pool"]
    x = arrays_of(inputs)
    pool = x.pop("initial_state")
    call = function("fused_recurrent_kda", inputs, options, {})

    def step(pool: Any, x: Any) -> Any:
        return call({**x, "initial_state": pool})

    place = pool.unsafe_buffer_pointer()
    program = jax.jit(step, donate_argnums=0).lower(pool, x).compile()
    form = ",".join(map(str, pool.shape))
    assert not re.findall(rf"f32\[{form}\]\S* copy\w*[-(]", program.as_text())
    o, after = program(pool, x)
    assert after.unsafe_buffer_pointer() == place and pool.is_deleted()
    jax.block_until_ready(o)
    (launched,) = from_jax.launched
    named = dict(zip((name for name, _ in RECURRENT.fields), launched.values, strict=True))
    assert named["h0"] == named["ht"] == place


def test_a_pool_that_is_still_used_is_copied(from_jax: Device) -> None:
    inputs, options = CALLS["pool"]
    x = arrays_of(inputs)
    before = np.array(x["initial_state"])
    _, after = jax.jit(function("fused_recurrent_kda", inputs, options, {}))(x)
    assert not np.array_equal(after, before)
    assert np.array_equal(x["initial_state"], before)


def test_an_eager_call(emulated: list[str], from_jax: Device) -> None:
    inputs, options = draw(1, 20, 1), MODEL | {"output_final_state": True}
    with kdacore.record_selections() as ran:
        got = function("chunk_kda", inputs, options, {})(arrays_of(inputs))
    assert [x.backend for x in ran] == [BACKEND]
    jax.block_until_ready(got)
    check(got[:2], from_torch(chunk_forward.forward, "chunk_kda", inputs, options))


def test_vmap_is_one_call_with_a_larger_batch(from_jax: Device) -> None:
    """Two axes, one of them not in front; results and gradients of one row after the other."""
    x = arrays_of(draw(4, 17, 1, 2, initial_state=normal(4, 2, 128, 128)))
    shared = {n: x.pop(n) for n in ("A_log", "dt_bias")}
    run = function("chunk_kda", None, MODEL | {"output_final_state": True}, {})
    rows = {n: a.reshape(2, 2, 1, *a.shape[1:]) for n, a in x.items()}
    # The second axis is mapped over from behind.
    moved = {n: jnp.moveaxis(a, 1, -1) for n, a in rows.items()}

    def gradients(x: Any) -> Any:
        def loss(x: Any, shared: Any) -> Any:
            o, state = run({**x, **shared})
            return o.astype(jnp.float32).sum() + state.sum()

        return run({**x, **shared}), jax.grad(loss, argnums=(0, 1))(x, shared)

    mapped = jax.jit(jax.vmap(jax.vmap(gradients, in_axes=-1)))
    got = jax.block_until_ready(mapped(moved))
    count = len(from_jax.launched)
    each = jax.jit(gradients)
    for i in range(2):
        for j in range(2):
            want = jax.block_until_ready(each({n: a[i, j] for n, a in rows.items()}))
            flat, _ = jax.tree.flatten(jax.tree.map(lambda a: a[i, j], got))  # noqa: B023
            for a, b in zip(flat, jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype
                assert np.allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=2e-2)
    assert count < 2 * (len(from_jax.launched) - count) / 4


def test_vmap_over_packs_and_parameters_is_a_loop(from_jax: Device) -> None:
    inputs = draw(1, 40, 1, cu_seqlens=ints(0, 10, 40))
    x = arrays_of(inputs)
    stacked = {n: jnp.stack([a, a]) for n, a in x.items() if n in ("q", "A_log", "cu_seqlens")}
    stacked["cu_seqlens"] = jnp.array([[0, 10, 40], [0, 25, 40]], jnp.int32)
    run = function("chunk_kda", inputs, MODEL | {"output_final_state": True}, {})
    got = jax.jit(jax.vmap(lambda mapped: run({**x, **mapped})[:2]))(stacked)
    for i in range(2):
        want = jax.jit(run)({**x, **{n: a[i] for n, a in stacked.items()}})
        for a, b in zip(got, want, strict=False):
            assert np.array_equal(a[i].astype(jnp.float32), b.astype(jnp.float32))


def test_a_checkpointed_scan_over_layers(from_jax: Device) -> None:
    layers = [arrays_of(draw(1, 33, 1, seed=i)) for i in range(3)]
    stacked = {n: jnp.stack([x[n] for x in layers]) for n in layers[0]}
    run = function("chunk_kda", None, MODEL, {})

    @jax.checkpoint
    def layer(v: Any, x: Any) -> Any:
        return run({**x, "v": v})[0], None

    def loss(stacked: Any) -> Any:
        return jax.lax.scan(layer, layers[0]["v"], stacked)[0].astype(jnp.float32).sum()

    def unrolled(stacked: Any) -> Any:
        v = layers[0]["v"]
        for i in range(3):
            v = run({**{n: a[i] for n, a in stacked.items()}, "v": v})[0]
        return v.astype(jnp.float32).sum()

    got, want = (jax.jit(jax.grad(f))(stacked) for f in (loss, unrolled))
    for n, a in got.items():
        assert np.array_equal(a.astype(jnp.float32), want[n].astype(jnp.float32)), n


@pytest.mark.parametrize("checked", [True, False])
def test_shard_map(from_jax: Device, checked: bool) -> None:
    """Gradients of parameters that every device has are sums over the devices."""
    x = arrays_of(draw(2, 33, 1))
    run = function("chunk_kda", None, MODEL, {})
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    specs = {n: P() if n in ("A_log", "dt_bias") else P("data") for n in x}

    def loss(x: Any) -> Any:
        split = jax.shard_map(
            lambda x: run(x)[0], mesh=mesh, in_specs=(specs,), out_specs=P("data"), check_vma=checked
        )
        return split(x).astype(jnp.float32).sum()

    got = jax.jit(jax.grad(loss))(x)
    want = jax.jit(jax.grad(lambda x: run(x)[0].astype(jnp.float32).sum()))(x)
    for n, a in got.items():
        assert np.array_equal(a.astype(jnp.float32), want[n].astype(jnp.float32)), n


STAGES = {"dense": {"T": 40, "H": 1, "HV": 2, "B": 2}, "pack": {"lengths": [0, 1, 17, 64, 15]}}


@pytest.mark.parametrize("name", STAGES)
def test_the_stages(emulated: list[str], from_jax: Device, name: str) -> None:
    drawn = stages_calls.Drawn(**STAGES[name])
    for op, inputs in (
        ("kda_chunk_intra", drawn.intra()),
        ("kda_recompute_w_u", drawn.recompute()),
        ("kda_recompute_w_u", drawn.recompute(with_q=False)),
    ):
        x = arrays_of(inputs)
        scale = {"scale": 0.25} if op == "kda_chunk_intra" else {}

        def run(x: Any, op: str = op, scale: Any = scale) -> Any:
            return getattr(kdacore.stages, op)(**x, **scale, backend=BACKEND)

        got = jax.block_until_ready(jax.jit(run)(x))
        forward = stages.chunk_intra if op == "kda_chunk_intra" else stages.recompute_w_u
        want = on_hopper(forward)(stages_calls.stage_request(op, inputs, **scale), inputs)
        rows = slice(0, None if inputs.cu_seqlens is None else int(inputs.cu_seqlens[-1]))
        check(*([None if a is None else a[:, rows] for a in some] for some in (got, want)))


def test_pools_are_not_differentiated(from_jax: Device) -> None:
    inputs, options = CALLS["pool"]
    run = function("fused_recurrent_kda", inputs, options, {})
    with pytest.raises(UnsupportedError, match="has no gradients of pools and stages"):
        jax.jit(jax.grad(lambda x: run(x)[0].astype(jnp.float32).sum(), allow_int=True))(arrays_of(inputs))
