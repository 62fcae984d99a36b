"""The cuda backend from JAX: ``python -m benchmarks.jax_calls``.

On a Hopper GPU, K = V = 128, bfloat16, gates, norms and sigmoids in the kernels. Before anything is timed, calls from
JAX are held against the float64 oracle, and against the same calls from torch, whose bits they must have; in a program
that XLA replays as a CUDA graph too. Then whole calls are timed from jitted functions: forward, forward and backward,
decoding in a loop with a donated pool, and the host's part of a call, alone and beside a busy Python thread.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import kdacore
from kdacore.bench import results
from kdacore.bench.results import Figure, Results, Row

PRESET = "jax-calls"
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUNDED = OPTIONS | {"safe_gate": True, "lower_bound": -5.0}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
MUST = {"forward": 0.45e-3, "forward and backward": 2.4e-3, "decode": 60e-6, "host": 60e-6}
"""Seconds, by what is timed."""
BOUND = 4.5e-3
"""Of the relative error of outputs, for bfloat16; twice that for a few tokens (contract, section 4)."""
BACKEND = "cuda"
"""Which backend calls are to have, unasked."""
FORWARD: list[dict[str, int]] = [
    {"B": 1, "T": 333, "H": 64},
    {"B": 1, "T": 333, "H": 8},
    {"B": 1, "T": 2100, "H": 4},
    {"B": 1, "T": 333, "H": 20},
    {"B": 2, "T": 65, "H": 3, "HV": 6},
    {"B": 1, "T": 129, "H": 70, "K": 64},
    {"B": 3, "T": 1, "H": 2},
    {"B": 1, "T": 17, "H": 40, "HV": 80},
]
"""Sizes of the forward calls that are checked: each form of the kernels, and head dim 64."""
BACKWARD: list[dict[str, int]] = [
    {"B": 1, "T": 333, "H": 64},
    {"B": 1, "T": 2100, "H": 4},
    {"B": 2, "T": 130, "H": 3, "HV": 6},
]
"""Sizes of the backward calls: both scans, grouped and not."""


def draw(seed: int, B: int, T: int, H: int, HV: int = 0, K: int = 128) -> dict[str, np.ndarray[Any, Any]]:
    """Random arrays in float32 that bfloat16 holds exactly, but for those of the gate."""
    rng, HV = np.random.default_rng(seed), HV or H
    shapes = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, HV, K),
        "g": (B, T, HV, K),
        "beta": (B, T, HV),
    }
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    arrays["A_log"] = np.log(1 + 15 * rng.random(HV, np.float32))
    arrays["dt_bias"] = 0.5 * rng.standard_normal((HV, K), np.float32)
    return arrays


def in_jax(arrays: dict[str, Any]) -> dict[str, Any]:
    """On the GPU, tokens in bfloat16."""
    return {name: jnp.asarray(x, jnp.bfloat16 if name in NAMES[:5] else None) for name, x in arrays.items()}


def in_torch(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    return {name: x.bfloat16() if name in NAMES[:5] else x for name, x in tensors.items()}


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """A JAX array or torch tensor in float32, which loses nothing."""
    if isinstance(x, torch.Tensor):
        return np.asarray(x.detach().float().cpu())
    return np.asarray(jnp.asarray(x, jnp.float32))


def chunk(x: dict[str, Any], options: dict[str, Any], **more: Any) -> Any:
    if isinstance(x["q"], torch.Tensor):  # choice may prefer another backend, whose bits are others
        more = {"backend": BACKEND} | more
    q, k, v, g, beta = (x[n] for n in NAMES[:5])
    return kdacore.chunk_kda(q, k, v, g, beta, A_log=x["A_log"], dt_bias=x["dt_bias"], **options, **more)


def same(what: str, got: Any, want: Any) -> None:
    """Raises AssertionError unless both have the same bits."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not np.array_equal(on_host(a), on_host(b)):
            worst = np.abs(on_host(a) - on_host(b)).max()
            raise AssertionError(f"{what}: result {i} differs from torch's by up to {worst}")


def near(what: str, got: Any, want: Any, bound: float) -> None:
    """Raises AssertionError where a result is further from the oracle's than ``bound``."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        x, y = on_host(a).astype(np.float64), np.asarray(b, np.float64)
        error = float(np.linalg.norm(x - y) / np.linalg.norm(y))
        if not error < bound:
            raise AssertionError(f"{what}: result {i} is {error:.2e} from the oracle, bound {bound:.1e}")


def check_forward() -> int:
    """The forms of the forward: fused, in segments, side by side; packed; head dim 64."""
    count = 0
    for seed, case in enumerate(FORWARD):
        for options in (OPTIONS, BOUNDED):
            arrays = draw(seed, **case)
            run = functools.partial(chunk, options=options, output_final_state=True)
            with kdacore.record_selections() as ran:
                got = jax.jit(run)(in_jax(arrays))
            assert [r.backend for r in ran] == [BACKEND], ran
            same(f"forward {case}", got, run(in_torch(arrays)))
            bound = BOUND if case["T"] > 65 else 2 * BOUND
            rounded = {name: on_host(x) for name, x in in_jax(arrays).items()}
            want = chunk(rounded, options, output_final_state=True, backend="reference")
            near(f"forward {case}", got, want, bound)
            count += 1
    arrays = draw(50, 1, 700, 6)
    ends = np.array([0, 1, 1, 66, 400, 700], np.int32)
    state = np.random.default_rng(1).standard_normal((5, len(arrays["A_log"]), 128, 128), np.float32)
    got = jax.jit(lambda x, s, e: chunk(x, OPTIONS, initial_state=s, cu_seqlens=e, output_final_state=True))(
        in_jax(arrays), jnp.asarray(state), jnp.asarray(ends)
    )
    want = chunk(
        in_torch(arrays), OPTIONS, initial_state=torch.from_numpy(state).cuda(),
        cu_seqlens=torch.from_numpy(ends).cuda(), output_final_state=True,
    )  # fmt: skip
    same("a pack", got, want)
    return count + 1


def check_backward() -> int:
    """Gradients of everything, by both scans, grouped and not."""
    for seed, case in enumerate(BACKWARD):
        arrays = draw(seed, **case)
        weights = np.random.default_rng(9).standard_normal(arrays["v"].shape, np.float32)

        def loss(x: dict[str, Any], w: Any) -> Any:
            return (chunk(x, OPTIONS)[0].astype(jnp.float32) * w).sum()

        with kdacore.record_selections() as ran:
            got = jax.jit(jax.grad(loss))(in_jax(arrays), jnp.asarray(weights))
        assert [r.backend for r in ran] == [BACKEND], ran
        tensors = {name: x.requires_grad_() for name, x in in_torch(arrays).items()}
        (chunk(tensors, OPTIONS)[0].float() * torch.from_numpy(weights).cuda()).sum().backward()
        same(f"backward {case}", [got[n] for n in NAMES], [tensors[n].grad for n in NAMES])
        again = jax.jit(jax.grad(jax.checkpoint(loss)))(in_jax(arrays), jnp.asarray(weights))
        same(f"backward {case} with checkpoint", [again[n] for n in NAMES], [got[n] for n in NAMES])
    return 2 * len(BACKWARD)


def decode_step(pool: Any, x: dict[str, Any], slots: Any) -> Any:
    return kdacore.fused_recurrent_kda(
        *(x[n] for n in NAMES[:5]), A_log=x["A_log"], dt_bias=x["dt_bias"], initial_state=pool, state_indices=slots,
        inplace_state=True, output_final_state=True, backend=BACKEND if isinstance(pool, torch.Tensor) else None,
        **OPTIONS,
    )  # fmt: skip


def decode_loop(pool: Any, x: dict[str, Any], slots: Any, steps: int) -> Any:
    """The pool after so many steps, and the sum of their outputs, so that none is left out."""

    def step(_: Any, carried: Any) -> Any:
        pool, total = carried
        o, pool = decode_step(pool, x, slots)
        return pool, total + o

    return jax.lax.fori_loop(0, steps, step, (pool, jnp.zeros(x["v"].shape, jnp.bfloat16)))


def check_decode() -> int:
    """A jitted loop over a donated pool, twenty steps: the bits of twenty calls from torch."""
    arrays = draw(3, 8, 1, 32)
    pool = 0.1 * np.random.default_rng(4).standard_normal((11, len(arrays["A_log"]), 128, 128), np.float32)
    slots = np.array([3, 0, -1, 10, 7, 1, 2, 9], np.int32)
    run = jax.jit(decode_loop, donate_argnames="pool", static_argnames="steps")
    got, _ = run(jnp.asarray(pool), in_jax(arrays), jnp.asarray(slots), steps=20)
    tensors, theirs = in_torch(arrays), torch.from_numpy(pool).cuda()
    for _ in range(20):
        decode_step(theirs, tensors, torch.from_numpy(slots).cuda())
    same("decoding", [got], [theirs])
    return 1


def check_layers() -> int:
    """Decoding through a scan over layers, each with a pool of its own in one array: the bits of torch's calls. XLA
    hands over slices of that array, which a call is to change in place."""
    arrays, layers = draw(3, 8, 1, 32), 3
    pools = 0.1 * np.random.default_rng(4).standard_normal((layers, 11, 32, 128, 128), np.float32)
    slots = np.array([3, 0, -1, 10, 7, 1, 2, 9], np.int32)

    def step(pools: Any, x: dict[str, Any], slots: Any) -> Any:
        def layer(v: Any, pool: Any) -> Any:
            o, pool = decode_step(pool, {**x, "v": v}, slots)
            return o, pool

        return jax.lax.scan(layer, x["v"], pools)

    run = jax.jit(step, donate_argnums=0)
    kept, x = jnp.asarray(pools), in_jax(arrays)
    for _ in range(3):
        o, kept = run(kept, x, jnp.asarray(slots))
    tensors, theirs = in_torch(arrays), torch.from_numpy(pools).cuda()
    for _ in range(3):
        v = tensors["v"]
        for pool in theirs:
            v, _ = decode_step(pool, {**tensors, "v": v}, torch.from_numpy(slots).cuda())
    same("decoding through layers", [o, kept], [v, theirs])
    return 1


def check_transformations() -> int:
    """vmap and a scan over layers: the results of one call after the other."""
    layers = [in_jax(draw(20 + i, 2, 200, 6)) for i in range(3)]
    stacked = {name: jnp.stack([x[name] for x in layers]) for name in NAMES}
    shared = {name: layers[0][name] for name in NAMES[5:]}

    def one(x: dict[str, Any]) -> Any:
        return chunk({**x, **shared}, OPTIONS)[0]

    tokens = {name: stacked[name] for name in NAMES[:5]}
    got = jax.jit(jax.vmap(one))(tokens)
    joined = {name: x.reshape(-1, *x.shape[2:]) for name, x in tokens.items()}
    same("vmap, one call of all rows", [got.reshape(-1, *got.shape[2:])], [one(joined)])
    for i, x in enumerate(layers):
        rounded = {name: on_host(a) for name, a in {**x, **shared}.items()}
        near("vmap", [got[i]], [chunk(rounded, OPTIONS, backend="reference")[0]], 2 * BOUND)

    def layer(v: Any, x: dict[str, Any]) -> Any:
        o = chunk({**x, "v": v}, OPTIONS)[0]
        return o, o.astype(jnp.float32).sum()

    def stack(x: dict[str, Any]) -> Any:
        return jax.lax.scan(layer, layers[0]["v"], x)[0]

    v = layers[0]["v"]
    for x in layers:
        v = chunk({**x, "v": v}, OPTIONS)[0]
    same("scan", [jax.jit(stack)(stacked)], [v])
    gradients = jax.jit(jax.grad(lambda x: stack(x).astype(jnp.float32).sum()))(stacked)
    if not all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in gradients.values()):
        raise AssertionError("scan: gradients that are not finite")
    return 2


def check_slices() -> int:
    """A row in two slices, the ranks those of a mapped axis on this one GPU: outputs and gradients near those of the
    oracle's and of one call, each slice by the kernels for slices."""
    arrays = draw(30, 1, 4096, 4)
    weights = np.random.default_rng(31).standard_normal(arrays["v"].shape, np.float32)

    def rank(x: dict[str, Any], w: Any) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            o = chunk(x, OPTIONS, cp="seq")[0]
            return (o.astype(jnp.float32) * w).sum(), o

        grads, o = jax.grad(loss, has_aux=True)(x)
        return o, grads

    def cut(a: Any) -> Any:
        return jnp.stack(jnp.split(a, 2, axis=1))

    x = in_jax(arrays)
    mine = {n: cut(a) if n in NAMES[:5] else a for n, a in x.items()}
    axes = {n: 0 if n in NAMES[:5] else None for n in NAMES}
    run = jax.jit(jax.vmap(rank, in_axes=(axes, 0), axis_name="seq"))
    with kdacore.record_selections() as ran:
        o, grads = run(mine, cut(jnp.asarray(weights)))
    assert {r.backend for r in ran} == {BACKEND}, ran
    rounded = {name: on_host(a) for name, a in x.items()}
    o = jnp.concatenate([*o], axis=1)
    near("slices", [o], [chunk(rounded, OPTIONS, backend="reference")[0]], BOUND)
    alone = jax.jit(jax.grad(lambda x: (chunk(x, OPTIONS)[0].astype(jnp.float32) * weights).sum()))(x)
    for n in NAMES:
        got = jnp.concatenate([*grads[n]], axis=1) if n in NAMES[:5] else grads[n].sum(0)
        near(f"slices, gradient of {n}", [got], [on_host(alone[n])], 2 * 8e-3)
    return 1


def per_call(step: Callable[[], Any], calls: int, repeats: int = 7) -> list[float]:
    """Seconds of one of ``calls`` calls that follow each other, without waiting between."""
    jax.block_until_ready(step())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            last = step()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - start) / calls)
    return found


def host_only(step: Callable[[], Any], calls: int = 200, repeats: int = 7) -> list[float]:
    """Seconds until a call returns, whatever the device still does."""
    found = []
    for _ in range(repeats):
        jax.block_until_ready(step())
        start = time.perf_counter()
        for _ in range(calls):
            last = step()
        found.append((time.perf_counter() - start) / calls)
        jax.block_until_ready(last)
    return found


@contextmanager
def busy_thread() -> Iterator[None]:
    """A Python thread that computes all the time."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def row(case: str, contender: str, found: list[float], note: str = "") -> Row:
    return Row(
        preset=PRESET, case=case, phase=case.split(",")[0], contender=contender, status="ok", backend="cuda",
        gates="random", shape=case, dtype="bfloat16", device="cuda", seconds=statistics.median(found), low=min(found),
        high=max(found), samples=len(found), note=note,
    )  # fmt: skip


def time_all(T: int, H: int) -> Iterator[Row]:
    """Every row of the report."""
    arrays = draw(0, 1, T, H)
    x, tensors = in_jax(arrays), in_torch(arrays)
    forward = jax.jit(lambda x: chunk(x, OPTIONS)[0])
    case = f"forward, B1 T{T} H{H}"
    yield row(case, "jax", per_call(lambda: forward(x), 50))
    with busy_thread():
        yield row(f"{case}, beside a busy thread", "jax", per_call(lambda: forward(x), 50))
    xla = jax.jit(lambda x: chunk(x, OPTIONS, backend="xla")[0])
    yield row(case, "jax, xla", per_call(lambda: xla(x), 10, 3))

    def torch_forward() -> Any:
        with torch.no_grad():
            return chunk(tensors, OPTIONS)[0]

    yield row(case, "torch", torch_times(torch_forward))

    # Only what flows back into the layer: a product and its gradient are memory traffic that is none of ours.
    def training(x: dict[str, Any], d_o: Any) -> Any:
        o, pull = jax.vjp(lambda x: chunk(x, OPTIONS)[0], x)
        return o, pull(d_o)

    d_o = jnp.ones(x["v"].shape, jnp.bfloat16)
    both = jax.jit(training)
    yield row(f"forward and backward, B1 T{T} H{H}", "jax", per_call(lambda: both(x, d_o), 20))

    decoding = draw(5, 32, 1, 32)
    step, slots = in_jax(decoding), jnp.arange(32, dtype=jnp.int32)
    pool = jnp.zeros((33, 32, 128, 128), jnp.float32)
    loop = jax.jit(decode_loop, donate_argnames="pool", static_argnames="steps")
    found = []
    for i in range(6):
        start = time.perf_counter()
        pool, total = loop(pool, step, slots, steps=500)
        jax.block_until_ready(total)
        if i:
            found.append((time.perf_counter() - start) / 500)
    yield row("decode, B32 H32, in a jitted loop", "jax", found)
    eager = jax.jit(decode_step, donate_argnums=0)
    held = [pool]

    def one() -> Any:
        o, held[0] = eager(held[0], step, slots)
        return o

    yield row("decode, B32 H32, a call each", "jax", per_call(one, 200))

    small = in_jax(draw(6, 1, 64, 2))
    yield row("host, T64 H2", "jax", host_only(lambda: forward(small)))
    plain = jax.jit(lambda x: x["v"] + x["g"])
    yield row("host, T64 H2", "jax, an addition", host_only(lambda: plain(small)))
    with busy_thread():
        yield row("host, T64 H2, beside a busy thread", "jax", host_only(lambda: forward(small), 50, 3))
        yield row(
            "host, T64 H2, beside a busy thread", "jax, an addition", host_only(lambda: plain(small), 50, 3)
        )


def torch_times(step: Callable[[], Any]) -> list[float]:
    step()
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / 50)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--only-check", action="store_true", help="time nothing")
    arguments = parser.parse_args()
    before = results.load()
    checks = (check_forward, check_backward, check_decode, check_layers, check_transformations, check_slices)
    for check in checks:
        start = time.perf_counter()
        count = check()
        print(f"{check.__name__}: {count} right ({time.perf_counter() - start:.1f} s)", flush=True)
    if arguments.only_check:
        return
    found = Results()
    for one in time_all(8192, 64):
        found.rows.append(one)
        print(f"{one.case:45} {one.contender:16} {1e6 * (one.seconds or 0):9.1f} us", flush=True)
    for what, must in MUST.items():
        seconds = next(r.seconds for r in found.rows if r.phase == what and r.contender == "jax") or 0.0
        want = f"at most {1e6 * must:.0f}"
        found.figures.append(
            Figure(preset=PRESET, name=what, value=1e6 * seconds, unit="us", want=want, met=seconds <= must)
        )
    if arguments.json:
        results.write(arguments.json, results.document(found, [PRESET], before))


if __name__ == "__main__":
    main()
