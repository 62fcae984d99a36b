"""Calls whose arrays plain jit splits over eight devices, in a process of its own: prints one line for each check.

Run by test_jax_partitioning.py, which sets how many devices XLA's CPU backend has.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_emulation as emulation
import numpy as np
from cuda_calls import MODEL, Draw
from emulated_backend import NAME, Plugin
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pytest import MonkeyPatch

import kdacore
from kdacore.registry import REGISTRY

TOKENS = ("q", "k", "v", "g", "beta")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
B, T, H, K = 4, 40, 2, 128
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "heads"))


def call(x: dict[str, Any], op: str = "chunk_kda", **options: Any) -> Any:
    others = {n: a for n, a in x.items() if n not in TOKENS}
    return getattr(kdacore, op)(*(x[n] for n in TOKENS), **others, **MODEL, **options, backend=NAME)


def draw(HV: int, H: int = H) -> dict[str, Any]:
    d = Draw(0)
    tokens = {"q": d.normal(B, T, H, K), "k": d.normal(B, T, H, K), "v": d.normal(B, T, HV, K)}
    x = {**tokens, "beta": d.normal(B, T, HV), **d.gate("random", B, T, HV, K)}
    return {n: emulation.to_jax(a) for n, a in x.items()}


def place(x: dict[str, Any], rows: str | None, **others: Any) -> dict[str, Any]:
    """Tokens split by rows and heads, parameters by heads."""
    specs = {n: P(rows, None, "heads") if n in TOKENS else P("heads") for n in x} | others
    return {n: jax.device_put(a, NamedSharding(MESH, specs[n])) for n, a in x.items()}


def equal(path: Any, got: Any, want: Any) -> bool:
    """Whether one result has the bits of another; a parameter's gradient, which is added up over rows in another
    order, whether it is within a millionth."""
    a, b = (np.asarray(x, np.float32) for x in (got, want))
    if any(getattr(key, "key", None) in ("A_log", "dt_bias") for key in path):
        return bool(np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b))
    return bool(np.array_equal(a, b))


def check(name: str, function: Callable[..., Any], split: Any, whole: Any) -> None:
    """Print the collectives of the program for the split arrays, and whether results are one device's."""
    program = jax.jit(function).lower(*split).compile()
    found = {n: len(re.findall(rf"= .*{n}\(", program.as_text())) for n in COLLECTIVES}
    got, want = program(*split), jax.jit(function)(*whole)
    same = jax.tree.structure(got) == jax.tree.structure(want) and all(
        equal(path, a, b)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    )
    print(name, "same" if same else "DIFFERENT", *(f"{n}={count}" for n, count in found.items() if count))


def run(HV: int) -> None:
    x = draw(HV)
    states = {
        "initial_state": jnp.asarray(np.random.default_rng(0).standard_normal((B, HV, K, K)), jnp.float32)
    }

    def training(x: dict[str, Any]) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            o, state = call(x, output_final_state=True)
            return o.astype(jnp.float32).sum() + state.sum()

        return call(x, output_final_state=True), jax.grad(loss)(x)

    whole = x | states
    check("training", training, [place(whole, "data", initial_state=P("data", "heads"))], [whole])

    ends = jnp.array([0, 30, 30, T], jnp.int32)
    row = {n: a[:1] if n in TOKENS else a for n, a in x.items()}

    def pack(x: dict[str, Any], ends: Any) -> Any:
        return call(x, cu_seqlens=ends, output_final_state=True, checkpoint_every=64)

    check("pack", pack, [place(row, None), ends], [row, ends])

    pool = jnp.asarray(np.random.default_rng(1).standard_normal((5, HV, K, K)), jnp.float32)
    slots = jnp.array([4, 0, -1, 2], jnp.int32)
    token = {n: a[:, :1] if n in TOKENS else a for n, a in x.items()}

    def decode(pool: Any, x: dict[str, Any], slots: Any) -> Any:
        pools = {
            "initial_state": pool,
            "state_indices": slots,
            "inplace_state": True,
            "output_final_state": True,
        }
        return call(x, "fused_recurrent_kda", **pools)

    split = jax.device_put(pool, NamedSharding(MESH, P(None, "heads")))
    check("decode", decode, [split, place(token, None), slots], [pool, token, slots])

    rng, rows = np.random.default_rng(2), jnp.array([1, 3, 0, -1], jnp.int32)
    parts = [(HV, K), (token["q"].shape[2], K), (HV, K)]
    records = tuple([jnp.asarray(0.3 * rng.random((4, 2, *part)), jnp.float32) for part in parts])
    counts = jnp.array([2, 1, 0, 0], jnp.int32)

    def verify(pool: Any, x: dict[str, Any], slots: Any, records: Any) -> Any:
        given = {"records": records, "record_indices": rows, "num_replayed": counts}
        return decode(pool, x | given, slots)

    def commit(pool: Any, slots: Any, records: Any) -> Any:
        return kdacore.commit_records(pool, slots, records, rows, counts, backend=NAME)

    heads = jax.device_put(records, NamedSharding(MESH, P(None, None, "heads")))
    check("verify", verify, [split, place(token, None), slots, heads], [pool, token, slots, records])
    check("commit", commit, [split, slots, heads], [pool, slots, records])

    flat = x | {"dt_bias": x["dt_bias"].reshape(-1)}
    check("flat", lambda x: call(x)[0], [place(flat, "data")], [flat])


def run_gated_delta() -> None:
    """Grouped value heads with states and gradients, and a pack."""
    x, op = draw(4), "chunk_gated_delta_rule"
    x |= {"g": x["g"][..., 0], "dt_bias": x["dt_bias"][..., 0]}
    states = jnp.asarray(np.random.default_rng(0).standard_normal((B, 4, K, K)), jnp.float32)

    def training(x: dict[str, Any]) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            o, state = call(x, op, output_final_state=True)
            return o.astype(jnp.float32).sum() + state.sum()

        return call(x, op, output_final_state=True), jax.grad(loss)(x)

    whole = x | {"initial_state": states}
    check("training", training, [place(whole, "data", initial_state=P("data", "heads"))], [whole])

    ends = jnp.array([0, 30, 30, T], jnp.int32)
    row = {n: a[:1] if n in TOKENS else a for n, a in x.items()}

    def pack(x: dict[str, Any], ends: Any) -> Any:
        return jax.grad(lambda x: call(x, op, cu_seqlens=ends)[0].astype(jnp.float32).sum())(x)

    check("pack", pack, [place(row, None), ends], [row, ends])


def run_one_head() -> None:
    """One query/key head for all value heads: its axis has size 1, which XLA takes into no product."""
    x = draw(2, H=1)

    def training(x: dict[str, Any]) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            return call(x)[0].astype(jnp.float32).sum()

        return call(x, output_final_state=True), jax.grad(loss)(x)

    specs = {n: P("data") if n in TOKENS else P() for n in x}
    split = {n: jax.device_put(a, NamedSharding(MESH, specs[n])) for n, a in x.items()}
    check("training", training, [split], [x])


def run_ranks() -> None:
    """A row over two devices of shard_map, replication checked and unchecked; the bits of a mapped axis."""
    x = {n: a[:1] for n, a in draw(1, H=1).items()}
    d_o = jnp.asarray(np.random.default_rng(5).standard_normal(x["v"].shape), jnp.bfloat16)
    mesh = Mesh(np.array(jax.devices()[:2]), ("seq",))
    specs = {n: P(None, "seq") if n in TOKENS else P() for n in x}

    def rank(x: dict[str, Any], d_o: Any) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            return (call(x, cp="seq")[0].astype(jnp.float32) * d_o).sum()

        return call(x, cp="seq")[0], jax.grad(loss)(x)

    def cut(a: Any) -> Any:
        return jnp.stack(jnp.split(a, 2, axis=1))

    def joined(a: Any) -> Any:
        return jnp.concatenate([*a], axis=1)

    mine = {n: cut(a) if n in TOKENS else a for n, a in x.items()}
    axes = {n: 0 if n in TOKENS else None for n in x}
    mapped = jax.jit(jax.vmap(rank, in_axes=(axes, 0), axis_name="seq"))(mine, cut(d_o))
    want = joined(mapped[0]), {n: joined(a) if n in TOKENS else a.sum(0) for n, a in mapped[1].items()}
    for checked in (True, False):
        # Of what every rank holds, JAX adds the gradients up where it keeps track of that.
        shares = {n: specs[n] if checked or n in TOKENS else P("seq") for n in x}
        over = jax.shard_map(
            rank,
            mesh=mesh,
            in_specs=(specs, P(None, "seq")),
            out_specs=(P(None, "seq"), shares),
            check_vma=checked,
        )
        program = jax.jit(over).lower(x, d_o).compile()
        found = len(re.findall(r"= .*all-gather(?:-start)?\(", program.as_text()))
        o, grads = program(x, d_o)
        if not checked:
            grads = {n: a if n in TOKENS else a.reshape(2, *x[n].shape).sum(0) for n, a in grads.items()}
        same = all(
            np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
            for a, b in zip(jax.tree.leaves((o, grads)), jax.tree.leaves(want), strict=True)
        )
        print("checked" if checked else "unchecked", "same" if same else "DIFFERENT", f"all-gather={found}")
    names = {launched.kernel.name.split("-")[0] for launched in device.launched}
    print("kernels", *sorted(names & {"transition", "slice_starts", "slice_gradient", "chunk_forward"}))


def refusal(x: dict[str, Any], specs: dict[str, P]) -> str:
    """What compiling a call says whose arrays are split like this, with its gradients."""
    split = {n: jax.device_put(a, NamedSharding(MESH, specs.get(n, P()))) for n, a in x.items()}
    loss = jax.jit(jax.value_and_grad(lambda x: call(x)[0].astype(jnp.float32).sum()))
    try:
        loss.lower(split).compile()
    except jax.errors.JaxRuntimeError as error:
        wanted = r"argument '(\w+)'.*along its tokens.*'data'.*with_sharding_constraint.*shard_map, cp="
        return " ".join(re.findall(wanted, str(error))) or str(error)
    return "nothing"


def run_tokens() -> None:
    """Rows split along their tokens are refused; results may be, and arrays over an axis of one device."""
    x = draw(H)
    rows = P(None, "data")
    print("refused", refusal(x, dict.fromkeys(TOKENS, rows)), refusal(x, {"beta": rows}))

    four = {n: a[:, :4] if n in TOKENS else a for n, a in x.items()}

    def steps(x: dict[str, Any]) -> Any:
        return call(x, "fused_recurrent_kda")[0]

    def whole_first(x: dict[str, Any]) -> Any:
        whole = NamedSharding(MESH, P(None, None, "heads"))
        return steps(x | {n: jax.lax.with_sharding_constraint(x[n], whole) for n in TOKENS})

    def split_after(x: dict[str, Any]) -> Any:
        doubled = x | {n: 2 * x[n] for n in TOKENS}  # XLA decides how these are split
        return jax.lax.with_sharding_constraint(steps(doubled), NamedSharding(MESH, rows))

    def placed(spec: P, mesh: Mesh = MESH) -> dict[str, Any]:
        return {
            n: jax.device_put(a, NamedSharding(mesh, spec if n in TOKENS else P())) for n, a in four.items()
        }

    check("whole-first", whole_first, [placed(rows)], [four])
    check("split-after", split_after, [placed(P())], [four])
    one = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "tokens"))
    check("axis-of-one", steps, [placed(P("data", "tokens"), one)], [four])


if __name__ == "__main__":
    device = emulation.Device(Path(tempfile.mkdtemp()))
    handler = emulation.native_handler(device)
    emulation.register(handler, "test.native")
    emulation.install(MonkeyPatch(), device, handler, "test.native")
    device.run = device.emulate
    ops = "chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda", "commit_records"
    REGISTRY.register(Plugin(*ops, kind="jax"), NAME)
    if sys.argv[1] == "tokens":
        run_tokens()
    elif sys.argv[1] == "one-head":
        run_one_head()
    elif sys.argv[1] == "gated-delta":
        run_gated_delta()
    elif sys.argv[1] == "ranks":
        run_ranks()
    else:
        run(int(sys.argv[1]))
