"""The CUDA backend from JAX on several GPUs of one host: what plain ``jit`` splits, and ranks of ``shard_map``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kdacore

pytestmark = pytest.mark.gpu
TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
    "output_final_state": True,
}


@pytest.fixture
def devices() -> list[Any]:
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX has no GPU here")
    if len(found) < 2:
        pytest.skip("one GPU")
    return found[:2]


def draw(T: int, H: int, K: int = 128, rows: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(T + H)
    x = {n: jnp.asarray(rng.standard_normal((rows, T, H, K)), jnp.bfloat16) for n in ("q", "k", "v", "g")}
    x["beta"] = jnp.asarray(rng.standard_normal((rows, T, H)), jnp.bfloat16)
    x["A_log"] = jnp.asarray(np.log(1 + 15 * rng.random(H)), jnp.float32)
    x["dt_bias"] = jnp.asarray(0.5 * rng.standard_normal((H, K)), jnp.float32)
    return x


def call(x: dict[str, Any], **more: Any) -> Any:
    others = {n: x[n] for n in ("A_log", "dt_bias")}
    return kdacore.chunk_kda(*(x[n] for n in TOKENS), **others, **OPTIONS, **more, backend="cuda")


def loss(x: dict[str, Any]) -> Any:
    o, state = call(x)
    return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(state))


def error(got: Any, want: Any) -> float:
    x, y = (np.asarray(jnp.asarray(a, jnp.float32), np.float64) for a in (got, want))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize("axis", ["rows", "heads"])
def test_jit_splits_rows_and_heads(devices: list[Any], axis: str) -> None:
    """Results and gradients have one GPU's bits, but for sums over rows; nothing is gathered."""
    x = draw(700, 80)  # so many heads that one GPU and each of two take the same kernel
    with jax.default_device(devices[0]):
        wanted = jax.jit(lambda x: (call(x), jax.grad(loss)(x)))(x)
    mesh = Mesh(np.array(devices), ("d",))
    tokens = P("d") if axis == "rows" else P(None, None, "d")
    shared = P() if axis == "rows" else P("d")
    placed = {
        n: jax.device_put(a, NamedSharding(mesh, tokens if n in TOKENS else shared)) for n, a in x.items()
    }
    program = jax.jit(lambda x: (call(x), jax.grad(loss)(x))).lower(placed).compile()
    assert "all-gather" not in program.as_text()
    (o, state), grads = program(placed)
    assert len({s.device for s in o.addressable_shards}) == 2
    assert error(o, wanted[0][0]) == error(state, wanted[0][1]) == 0
    for name, got in grads.items():
        assert error(got, wanted[1][name]) < (1e-5 if axis == "rows" and name not in TOKENS else 1e-12), name


@pytest.mark.parametrize("heads", [4, 16])
def test_ranks_of_shard_map(devices: list[Any], heads: int) -> None:
    """One row over two GPUs with ``cp=``, against the same row on one."""
    x = draw(4096, heads, rows=1)
    with jax.default_device(devices[0]):
        wanted = jax.jit(call)(x)
    mesh = Mesh(np.array(devices), ("seq",))
    specs = {n: P(None, "seq") if n in TOKENS else P() for n in x}
    ranks = jax.jit(
        jax.shard_map(
            lambda x: call(x, cp="seq"), mesh=mesh, in_specs=(specs,), out_specs=(P(None, "seq"), P())
        )
    )
    o, state = ranks({n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in x.items()})
    assert error(o, wanted[0]) < 9e-3
    assert error(state, wanted[1]) < 6.6e-3
