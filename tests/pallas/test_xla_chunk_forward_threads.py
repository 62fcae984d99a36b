"""Heads divided among threads: the results are those of one program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import O_BOUND, STATE_BOUND, Case, build, error, to_jax

import kdacore
from kdacore.oracle.recurrence import oracle_forward
from kdacore_pallas.program_cache import compiled_program
from kdacore_pallas.xla import chunk_forward
from kdacore_pallas.xla import chunk_forward_threads as threads

CASES = {
    "padded, flat bias": Case(T=70, H=2, HV=2, K=16, V=16, gate="softplus"),
    "value heads, V first, checkpoints": Case(
        T=128, H=2, HV=4, K=16, V=24, v_first=True, state_dtype="bfloat16", checkpoint_every=64
    ),
    "packed, checkpoints": Case(lengths=(5, 0, 130), H=2, HV=4, K=16, V=16, checkpoint_every=64),
    "one gate a head, no states": Case(
        op="chunk_gated_delta_rule",
        B=2,
        T=64,
        H=2,
        HV=2,
        K=16,
        V=16,
        gate="softplus",
        initial=False,
        final=False,
    ),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_same_as_one_program(name: str) -> None:
    case = CASES[name]
    request, inputs = build(case)
    if "flat" in name:
        inputs = inputs._replace(dt_bias=inputs.dt_bias.reshape(-1))
    arrays = to_jax(inputs)
    whole = compiled_program(chunk_forward.forward, request)(arrays)
    parts = threads.forward(request, arrays, case.H)
    want = oracle_forward(request, inputs)
    for field, bound in (("o", O_BOUND), ("final_state", STATE_BOUND), ("checkpoints", STATE_BOUND)):
        one, shared, right = (getattr(x, field) for x in (whole, parts, want))
        if one is None:
            assert shared is None
            continue
        assert shared.shape == one.shape and shared.dtype == one.dtype
        assert error(shared, one) < 1e-6 or case.dtype != "float32"
        assert error(shared, right) < max(bound[case.dtype], bound[case.state_dtype] if field != "o" else 0)


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    request, inputs = build(Case(T=3, H=6, HV=6, K=16, V=16))
    arrays = to_jax(inputs)
    for cores, parts in ((1, 1), (2, 2), (4, 3), (5, 3), (6, 6), (64, 6)):
        monkeypatch.setattr(threads, "_cores", lambda cores=cores: cores)
        assert threads.thread_count(request, arrays) == parts
        assert (
            threads.thread_count(replace(request, T=10**6), arrays) == parts
        )  # or appended tokens could change bits
    assert threads.thread_count(replace(request, needs_grad=True), arrays) == 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
    spread = jax.device_put(arrays.q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert threads.thread_count(request, arrays._replace(q=spread)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_public_calls_use_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = threads.forward
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    monkeypatch.setattr(threads, "forward", lambda r, i, n: (used.append(n), real(r, i, n))[1])
    _, inputs = build(Case(T=70, H=2, HV=2, K=16, V=16, gate="softplus"))
    x = {n: getattr(inputs, n) for n in ("q", "k", "v", "g", "beta", "A_log")}
    if kind == "jax":
        x = {n: jnp.asarray(a) for n, a in x.items()}

    def call(x: Any) -> Any:
        return kdacore.chunk_kda(**x, use_gate_in_kernel=True, output_final_state=True, backend="xla")

    o, state = call(x)
    assert used == [2]
    if kind == "jax":
        traced = jax.jit(call)(x)
        assert used == [2], "a traced call is one program"
        assert error(o, traced[0]) < 1e-6 and error(state, traced[1]) < 1e-6
        jax.grad(lambda q: call({**x, "q": q})[0].sum())(x["q"])
        assert used == [2]


def test_on_the_device_of_the_arrays() -> None:
    """The default device is a setting of the caller's thread, which another thread does not see."""
    request, inputs = build(Case(T=20, H=2, HV=2, K=16, V=16))
    device = jax.devices()[3]
    arrays = to_jax(inputs)
    for there in (jax.device_put(arrays, device), None):
        with jax.default_device(device):
            found = threads.forward(request, there or to_jax(inputs), 2)
        assert found.o.devices() == found.final_state.devices() == {device}


def test_no_implicit_transfer() -> None:
    request, inputs = build(Case(T=20, H=2, HV=2, K=16, V=16))
    arrays = to_jax(inputs)
    with jax.transfer_guard("disallow"):
        found = threads.forward(request, arrays, 2)
    assert not found.o.committed
    assert jax.jit(lambda: threads.forward(request, arrays, 2).o)().shape == found.o.shape


def test_an_error_in_any_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    request, inputs = build(Case(T=20, H=2, HV=2, K=16, V=16))
    arrays = to_jax(inputs)

    def broken(request: Any, inputs: Any, first: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(threads, "_forward_heads", broken)
    with pytest.raises(RuntimeError, match="planted"):
        threads.forward(request, arrays, 2)
