"""Bit for bit: later tokens change nothing before them, neighbours in a batch change nothing,
reruns change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdacore.oracle.host_values import to_numpy
from kdacore.types import Backend, InputGrads, OutputGrads, Outputs

Make = Callable[..., Any]
TOKENS = ("q", "k", "v", "g", "beta")


def run(backend: Backend, call: Any, do: np.ndarray) -> tuple[Outputs, InputGrads]:
    op = backend.ops[call.request.op]
    out = op.forward(call.request, call.inputs)
    if call.request.kind == "torch":
        import torch

        do = torch.from_numpy(do)
    elif call.request.kind == "jax":
        import jax.numpy as jnp

        do = jnp.asarray(do)
    return out, op.backward(call.request, call.inputs, out.saved, OutputGrads(do))


def same_bits(a: Any, b: Any, what: str) -> None:
    x, y = to_numpy(a), to_numpy(b)
    assert x.shape == y.shape and x.dtype == y.dtype, what
    np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32), err_msg=what)


def prefix_loss(call: Any, t: int) -> np.ndarray:
    r = call.request
    do = call.rng.standard_normal((r.B, r.T, r.HV, r.V)).astype(np.float32)
    do[:, t:] = 0
    return do


OPTIONS: list[dict[str, Any]] = [
    {"HV": 4, "gate": "softplus", "qk_l2norm": True},
    {"gate": "sigmoid", "lower_bound": -5.0, "beta_sigmoid": True},
    {"gate": "sigmoid", "lower_bound": -5.0, "HV": 4, "qk_l2norm": True},
    {"gates": "mixed"},
    {"op": "chunk_gated_delta_rule", "HV": 4, "gate": "softplus"},
    {"op": "fused_recurrent_kda"},
]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("t", [1, 16, 31, 64, 65, 100, 149])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_changing_later_tokens(
    options: dict[str, Any], t: int, kind: str, make_call: Make, backend: Backend
) -> None:
    call = make_call(**{"T": 150, "H": 2, "K": 16, "V": 16, "output_final_state": False, **options})
    _compare_changed(call, t, kind, backend)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_later_tokens_in_jax(make_call: Make, backend: Backend) -> None:
    """Changed and appended in one test: eager JAX compiles every primitive for every shape."""
    call = make_call(T=150, H=2, HV=4, K=16, V=16, output_final_state=False)
    for t in (1, 31, 100):
        _compare_changed(call, t, "jax", backend)
    _compare_appended(call, 65, "jax", backend)


def _compare_changed(call: Any, t: int, kind: str, backend: Backend) -> None:
    do = prefix_loss(call, t)
    changed = {}
    for name in TOKENS:
        array = getattr(call.inputs, name).copy()
        tail = array[:, t:]
        array[:, t:] = -np.abs(tail) * 1.7 - 0.1 if name == "g" else -1.7 * tail + 0.1
        changed[name] = array
    (a, da), (b, db) = (run(backend, c.of_kind(kind), do) for c in (call, call.replaced(**changed)))
    same_bits(a.o[:, :t], b.o[:, :t], "o")
    for name in TOKENS:
        same_bits(getattr(da, name)[:, :t], getattr(db, name)[:, :t], name)
    for name in ("A_log", "dt_bias", "initial_state"):
        if getattr(da, name) is not None:
            same_bits(getattr(da, name), getattr(db, name), name)


@pytest.mark.first_cases(8)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("t", [1, 17, 64, 65, 130])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_appending_tokens(
    options: dict[str, Any], t: int, kind: str, make_call: Make, backend: Backend
) -> None:
    """Lengths on both sides of a chunk's and of a slab's end."""
    call = make_call(**{"T": 2500, "H": 1, "K": 4, "V": 4, "output_final_state": False, **options})
    if call.request.op.startswith("fused"):
        call = call.replaced({"T": 150}, **{n: getattr(call.inputs, n)[:, :150] for n in TOKENS})
    _compare_appended(call, t, kind, backend)


def _compare_appended(call: Any, t: int, kind: str, backend: Backend) -> None:
    do = prefix_loss(call, t)
    short = call.replaced({"T": t}, **{n: getattr(call.inputs, n)[:, :t] for n in TOKENS})
    long_out, long_grads = run(backend, call.of_kind(kind), do)
    short_out, short_grads = run(backend, short.of_kind(kind), do[:, :t])
    same_bits(long_out.o[:, :t], short_out.o, "o")
    for name in TOKENS:
        same_bits(getattr(long_grads, name)[:, :t], getattr(short_grads, name), name)
    for name in ("A_log", "dt_bias", "initial_state"):
        if getattr(long_grads, name) is not None:
            same_bits(getattr(long_grads, name), getattr(short_grads, name), name)


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, op",
    [
        (k, op)
        for k in ("numpy", "torch")
        for op in ("chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda")
    ]
    + [("jax", "chunk_kda")],
)
def test_batch_invariance(op: str, kind: str, make_call: Make, backend: Backend) -> None:
    """A sequence alone and in a pack: the same bits of everything it returns."""
    lengths = [70, 0, 33] if kind == "jax" else [70, 0, 1, 200, 64, 3]
    call = make_call(op=op, lengths=lengths, H=2, HV=4, K=16, V=16, gate="softplus")
    do = call.rng.standard_normal((1, sum(lengths), 4, 16)).astype(np.float32)
    packed, packed_grads = run(backend, call.of_kind(kind), do)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        if not length:
            continue
        cut = {name: getattr(call.inputs, name)[:, rows] for name in TOKENS}
        alone = call.replaced(
            {"packed": False, "T": length, "N": 1},
            **cut,
            cu_seqlens=None,
            initial_state=call.inputs.initial_state[n : n + 1],
        )
        out, grads = run(backend, alone.of_kind(kind), do[:, rows])
        same_bits(out.o, packed.o[:, rows], "o")
        same_bits(out.final_state[0], packed.final_state[n], "final_state")
        for name in TOKENS:
            same_bits(getattr(grads, name), getattr(packed_grads, name)[:, rows], name)
        same_bits(grads.initial_state[0], packed_grads.initial_state[n], "initial_state")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_deterministic(kind: str, make_call: Make, backend: Backend) -> None:
    call = make_call(B=2, T=150, H=3, HV=6, K=20, V=12, gate="softplus")
    do = prefix_loss(call, 150)
    (a, da), (b, db) = (run(backend, call.of_kind(kind), do) for _ in range(2))
    same_bits(a.o, b.o, "o")
    for name, x in da._asdict().items():
        if x is not None:
            same_bits(x, getattr(db, name), name)
