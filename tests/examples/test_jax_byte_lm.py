"""The language model in flax: it learns on several devices, comes back from a checkpoint, decodes from a pool."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import kdacore


@pytest.fixture(scope="module")
def parts(jax_byte_lm: ModuleType) -> tuple[Any, Any]:
    """The model's definition, and parameters with a head that is not zero."""
    from flax import nnx

    model = jax_byte_lm.ByteLM(seed=0)
    model.head.kernel[...] = jax.random.normal(jax.random.key(1), model.head.kernel.shape) / 8
    return nnx.split(model)


@pytest.mark.exhaustive
def test_devices_learn_together_and_go_on_from_a_checkpoint(
    jax_byte_lm: ModuleType, parts: Any, tmp_path: Path
) -> None:
    m, (definition, parameters) = jax_byte_lm, parts
    mesh = Mesh(jax.devices()[:2], ("data",))
    parameters = jax.device_put(jax.tree.map(jnp.copy, parameters), jax.NamedSharding(mesh, jax.P()))
    windows = m.windows(m.read_text()[0], 4, 24, np.random.default_rng(0))
    with jax.default_matmul_precision("highest"):
        alone = float(jax.jit(m.bits_per_byte, static_argnums=0)(definition, parts[1], windows))
    optimizer = optax.adam(3e-3)
    moments = jax.device_put(optimizer.init(parameters), jax.NamedSharding(mesh, jax.P()))
    with kdacore.record_selections() as ran:
        step = m.make_step(definition, optimizer, mesh)
        parameters, moments, first = step(parameters, moments, windows)
    assert {s.backend for s in ran} == {"xla"}
    assert float(first) == pytest.approx(alone, rel=1e-5)
    for _ in range(4):
        parameters, moments, _ = step(parameters, moments, windows)

    training = {"parameters": parameters, "moments": moments}
    m.save(tmp_path / "saved", training)
    restored = m.restore(tmp_path / "saved", training)
    for was, now in zip(jax.tree.leaves(training), jax.tree.leaves(restored), strict=True):
        assert np.array_equal(was, now) and was.sharding == now.sharding
    # A step donates its arguments, so each takes its own.
    next_bits, again = (step(t["parameters"], t["moments"], windows)[2] for t in (training, restored))
    assert next_bits == again < first - 0.5
    assert step._cache_size() == 1


def test_decoding_from_a_pool_equals_one_pass(jax_byte_lm: ModuleType, parts: Any) -> None:
    m, (definition, parameters) = jax_byte_lm, parts
    from flax import nnx

    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, 256)
    want = jax.jit(lambda p, t: nnx.merge(definition, p)(t)[0])(parameters, tokens)
    slots, others = jnp.array([3, 1]), [0, 2]
    with kdacore.record_selections() as ran:
        before = m.new_pool(4).at[jnp.array([0, 2, 4, 6])].set(7.0)
        logits, pool = m.decode(definition, parameters, tokens[:, :5], before, slots)
    assert {(s.op, s.backend) for s in ran} == {("fused_recurrent_kda", "xla")}
    assert before.is_deleted()
    for t in range(5, 10):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=1e-3, atol=1e-3)
        if t < 9:
            logits, pool = m.decode(definition, parameters, tokens[:, t : t + 1], pool, slots)
    rows = np.asarray(pool).reshape(m.LAYERS, 4, -1)
    assert (rows[:, others] == 7.0).all() and rows[:, [1, 3]].any(axis=-1).all()


def test_no_pool_is_copied(jax_byte_lm: ModuleType, parts: Any) -> None:
    m, (definition, parameters) = jax_byte_lm, parts
    pool = m.new_pool(512)
    program = m.decode.lower(definition, parameters, jnp.zeros((2, 1), int), pool, jnp.arange(2)).compile()
    shape = f"f32[{','.join(map(str, pool.shape))}]"
    assert shape in program.as_text()
    assert [
        x for x in program.as_text().splitlines() if " copy(" in x and shape in x.split(" copy(")[0]
    ] == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes > memory.temp_size_in_bytes


@pytest.mark.exhaustive
def test_the_whole_example(jax_byte_lm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert jax_byte_lm.main(["--goal", "3.4"]) < 3.4
    printed = capsys.readouterr().out
    assert "step    0  8.000 bits" in printed
    assert "the same after restoring: True" in printed


@pytest.mark.exhaustive
def test_missing_the_goal_is_an_exit_status(jax_byte_lm: ModuleType) -> None:
    with pytest.raises(SystemExit, match="wanted less than 1.0"):
        jax_byte_lm.main(["--steps", "1", "--batch", "2", "--length", "8", "--sample", "1", "--goal", "1"])
