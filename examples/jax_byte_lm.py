"""A byte-level language model in flax nnx: data-parallel training, a checkpoint, and decoding from a pool of states.

    pip install . jax flax optax orbax-checkpoint        # in a checkout of kdacore
    python examples/jax_byte_lm.py                # two CPU devices, under a minute
    python examples/jax_byte_lm.py --goal 3.4     # exit 1 unless held-out bits per byte end below 3.4

The text is the help of this Python, so nothing is downloaded. Bits per byte start at 8 (a uniform guess) and are
measured on topics that the model never saw. The short convolution that published models have before q, k
and v is left out.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kdacore

WIDTH, HEADS, LAYERS = 128, 4, 2
DIM = WIDTH // HEADS


class KDALayer(nnx.Module):
    """Kimi Delta Attention with a bounded gate and a gated output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.beta = nnx.Linear(WIDTH, HEADS, rngs=rngs)
        self.A_log = nnx.Param(jnp.zeros(HEADS))
        # Half-lives from a few tokens to a few thousand, spread over the channels.
        self.dt_bias = nnx.Param(jnp.linspace(-8.0, -1.0, WIDTH).reshape(HEADS, DIM))
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.out_gate = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, pool: Any = None, rows: Any = None) -> tuple[jax.Array, Any]:
        """``x [B, T, WIDTH]``. With a pool, sequence b continues from ``pool[rows[b]]`` and updates it."""
        B, T, _ = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(B, T, 3 * HEADS, DIM), 3, axis=2)
        inputs = q, k, v, self.gate(x).reshape(B, T, HEADS, DIM), self.beta(x)
        options = {
            "A_log": self.A_log,  # an nnx.Param is taken for the array that it holds
            "dt_bias": self.dt_bias,
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "lower_bound": -5.0,
        }
        if pool is None:
            o, _ = kdacore.chunk_kda(*inputs, **options)
        else:
            o, pool = kdacore.fused_recurrent_kda(
                *inputs, **options,
                initial_state=pool, state_indices=rows, inplace_state=True, output_final_state=True,
            )  # fmt: skip
        return self.out(self.norm(o).reshape(B, T, WIDTH) * jax.nn.silu(self.out_gate(x))), pool


class Block(nnx.Module):
    """A KDA layer and an MLP, each added to its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mixer = KDALayer(rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, pool: Any = None, rows: Any = None) -> tuple[jax.Array, Any]:
        mixed, pool = self.mixer(self.norm1(x), pool, rows)
        x = x + mixed
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)))), pool


class ByteLM(nnx.Module):
    """Bytes in, logits over the next byte out. The blocks' parameters are stacked, and one scan runs them."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(rngs(), LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        # Training starts from the uniform guess, 8 bits.
        self.head = nnx.Linear(
            WIDTH, 256, use_bias=False, kernel_init=nnx.initializers.zeros_init(), rngs=rngs
        )

    def __call__(self, tokens: jax.Array, pool: Any = None, slots: Any = None) -> tuple[jax.Array, Any]:
        """``tokens [B, T]`` to logits ``[B, T, 256]`` and the pool, which is described at ``new_pool``."""
        definition, stacked = nnx.split(self.blocks)

        @jax.checkpoint  # the backward recomputes each block from its input
        def block(carry: Any, layer: Any) -> Any:
            x, pool = carry
            number, parameters = layer
            rows = None if pool is None else jnp.where(slots < 0, -1, slots + number * (len(pool) // LAYERS))
            return nnx.merge(definition, parameters)(x, pool, rows), None

        (x, pool), _ = jax.lax.scan(block, (self.embed(tokens), pool), (jnp.arange(LAYERS), stacked))
        return self.head(self.norm(x)), pool


def new_pool(slots: int) -> jax.Array:
    """Empty states of all layers in one array: layer i keeps slot s in row ``i * slots + s``."""
    return jnp.zeros((LAYERS * slots, HEADS, DIM, DIM))


def bits_per_byte(definition: Any, parameters: Any, windows: jax.Array) -> jax.Array:
    """Mean bits that the model needs for each byte of ``windows [B, T + 1]``."""
    logits, _ = nnx.merge(definition, parameters)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean() / math.log(2)


def make_step(definition: Any, optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """The compiled training step. Each device takes its part of the windows, and has all the parameters."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def loss(parameters: Any, windows: jax.Array) -> jax.Array:
        return jax.lax.pmean(bits_per_byte(definition, parameters, windows), "data")

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, moments: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        bits, gradients = jax.value_and_grad(loss)(parameters, windows)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, bits

    return step


@partial(jax.jit, static_argnums=0, donate_argnames="pool")
def decode(definition: Any, parameters: Any, tokens: jax.Array, pool: jax.Array, slots: jax.Array) -> Any:
    """Continue the sequences in ``slots`` by ``tokens [B, T]``: logits of the next byte, and the updated pool."""
    logits, pool = nnx.merge(definition, parameters)(tokens, pool, slots)
    return logits[:, -1], pool


def sample(definition: Any, parameters: Any, prompts: list[bytes], count: int) -> list[bytes]:
    """Continue prompts of one length, each in a slot of one pool."""
    pool, slots, key = new_pool(len(prompts) + 1), jnp.arange(len(prompts)), jax.random.key(0)
    tokens = jnp.array([list(prompt) for prompt in prompts])
    written = []
    for _ in range(count):
        logits, pool = decode(definition, parameters, tokens, pool, slots)
        key, used = jax.random.split(key)
        tokens = jax.random.categorical(used, logits / 0.7)[:, None]
        written.append(np.asarray(tokens))
    return [bytes(row.tolist()) for row in np.concatenate(written, axis=1).astype(np.uint8)]


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Training bytes and held-out bytes, every tenth topic."""
    topics = [topic.encode() for _, topic in sorted(pydoc_data.topics.topics.items())]
    held, train = b"\n".join(topics[::10]), b"\n".join(t for i, t in enumerate(topics) if i % 10)
    return np.frombuffer(train, np.uint8).astype(np.int32), np.frombuffer(held, np.uint8).astype(np.int32)


def windows(data: np.ndarray, batch: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``[batch, length + 1]``: random windows of the text."""
    starts = rng.integers(len(data) - length - 1, size=batch)
    return data[starts[:, None] + np.arange(length + 1)]


def save(folder: Path, training: Any) -> None:
    """Write the parameters, the optimizer's moments and the step, as one tree."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, training)


def restore(folder: Path, like: Any) -> Any:
    """Read what ``save`` wrote into arrays with the shapes, dtypes and shardings of ``like``."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def main(arguments: list[str] | None = None) -> float:
    """Train, save, restore, evaluate, sample. Returns the held-out bits per byte."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step (default 16)")
    parser.add_argument("--length", type=int, default=64, help="bytes a window (default 64)")
    parser.add_argument("--sample", type=int, default=100, help="bytes to write at the end (default 100)")
    parser.add_argument("--goal", type=float, help="fail unless held-out bits per byte end below this")
    options = parser.parse_args(arguments)

    mesh = Mesh(jax.devices()[: math.gcd(len(jax.devices()), options.batch)], ("data",))
    replicated = jax.NamedSharding(mesh, P())
    definition, parameters = nnx.split(ByteLM(seed=0))
    parameters = jax.device_put(parameters, replicated)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, max(options.steps, 21), 5e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    moments = jax.device_put(optimizer.init(parameters), replicated)
    step = make_step(definition, optimizer, mesh)
    text, held = read_text()
    rng = np.random.default_rng(0)
    for number in range(options.steps):
        batch = windows(text, options.batch, options.length, rng)
        parameters, moments, bits = step(parameters, moments, batch)
        if number % 25 == 0:
            print(f"  step {number:4d}  {bits:.3f} bits per byte on {mesh.size} devices", flush=True)

    evaluate = jax.jit(partial(bits_per_byte, definition))
    test = windows(held, 32, options.length, np.random.default_rng(1))
    after = float(evaluate(parameters, test))
    with tempfile.TemporaryDirectory() as folder:
        training = {"parameters": parameters, "moments": moments, "step": options.steps}
        save(Path(folder) / "checkpoint", training)
        restored = restore(Path(folder) / "checkpoint", training)
    again = float(evaluate(restored["parameters"], test))
    print(f"held-out: {after:.3f} bits per byte, the same after restoring: {after == again}")
    written = sample(definition, restored["parameters"], [b"The ", b"If a"], options.sample)
    for prompt, more in zip(("The ", "If a"), written, strict=True):
        print(prompt + more.decode("utf-8", "replace"))
    if options.goal is not None and not after < options.goal:
        raise SystemExit(f"{after:.3f} bits per byte; wanted less than {options.goal}")
    return after


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # where there is no accelerator
    main()
