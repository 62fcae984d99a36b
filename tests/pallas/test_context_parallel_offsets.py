"""``cp="axis"`` in JAX with offsets that are none of the row, or not the same on every rank, on fake CPU devices.

``test_context_parallel.py`` has those that a program traced for a pack is given.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kdacore
from kdacore.errors import ContractError

R, T, N = 2, 16, 3
"""Ranks, tokens of each, sequences."""
TOKENS = ("q", "k", "v", "g", "beta")
SPLIT = P(None, "seq")


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:R]), ("seq",))


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x: dict[str, Any] = {name: rng.standard_normal((1, R * T, 1, 8)) for name in ("q", "k", "v")}
    x |= {"g": -rng.random((1, R * T, 1, 8)), "beta": rng.random((1, R * T, 1))}
    x["initial_state"] = rng.standard_normal((N, 1, 8, 8))
    return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}


def split(check_vma: bool, offsets_spec: Any) -> Any:
    def local(x: dict[str, Any], offsets: Any) -> Any:
        offsets = offsets.reshape(N + 1)
        return kdacore.chunk_kda(**x, cu_seqlens=offsets, output_final_state=True, cp="seq")

    specs = dict.fromkeys(TOKENS, SPLIT) | {"initial_state": P()}
    return jax.shard_map(
        local, mesh=mesh(), in_specs=(specs, offsets_spec), out_specs=(SPLIT, P()), check_vma=check_vma
    )


@pytest.fixture(scope="module")
def program() -> Any:
    """Results, and gradients of all of them, by the offsets of every rank ``[R, N+1]``. JAX does not keep track of
    whether these are the same."""
    call = split(False, P("seq"))

    def loss(x: dict[str, Any], offsets: Any) -> Any:
        o, states = call(x, offsets.reshape(-1))
        return o.sum() + (states * states).sum(), (o, states)

    return jax.jit(jax.grad(loss, has_aux=True))


VALID = ([0, 10, 20, 32], [0, 0, 0, 0], [0, 32, 32, 32], [0, 7, 7, 9])
HOSTILE = {
    "beyond": [0, 10, 20, 33],
    "far-beyond": [0, 10, 20, 2**31 - 1],
    "first": [3, 10, 20, 32],
    "first-on-the-second-rank": [17, 18, 20, 32],
    "negative": [-1, 10, 20, 32],
    "falls": [0, 20, 10, 32],
    "falls-to-nothing": [0, 20, 0, 0],
    "wraps": [0, 2**31 - 1, -5, 32],
    "wraps-at-the-end": [0, 10, 20, -(2**31)],
}


def on_all(offsets: list[int]) -> Any:
    return jnp.tile(jnp.asarray(offsets), (R, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("offsets", VALID, ids=str)
def test_offsets_of_the_row(offsets: list[int], program: Any, arrays: dict[str, Any]) -> None:
    grads, (o, states) = program(arrays, on_all(offsets))
    for x in (o, states, *grads.values()):
        assert np.isfinite(x).all()


def assert_no_result(grads: dict[str, Any], results: Any) -> None:
    """NaN in every token, state and gradient, on every rank."""
    for name, x in (*zip(("o", "states"), results, strict=True), *grads.items()):
        assert np.isnan(x).all(), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HOSTILE)
def test_traced_offsets_give_nan(name: str, program: Any, arrays: dict[str, Any]) -> None:
    assert_no_result(*program(arrays, on_all(HOSTILE[name])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("changed", [(1, 1, 11), (1, 3, 31), (0, 0, 1), (0, 2, 19)], ids=str)
def test_offsets_that_differ_between_ranks(
    changed: tuple[int, int, int], program: Any, arrays: dict[str, Any]
) -> None:
    rank, at, value = changed
    assert_no_result(*program(arrays, on_all(VALID[0]).at[rank, at].set(value)))


@pytest.mark.exhaustive
def test_traced_offsets_that_jax_knows_to_be_the_same(arrays: dict[str, Any]) -> None:
    call = jax.jit(split(True, P()))
    for offsets in VALID:
        assert all(np.isfinite(x).all() for x in call(arrays, jnp.asarray(offsets)))
    for offsets in HOSTILE.values():
        assert all(np.isnan(x).all() for x in call(arrays, jnp.asarray(offsets)))


@pytest.mark.parametrize("name", HOSTILE)
def test_offsets_with_values_are_refused(name: str, arrays: dict[str, Any]) -> None:
    """Constants of the program, and host copies: while it is traced."""
    wrong, fine = HOSTILE[name], jnp.asarray(VALID[0])
    specs = dict.fromkeys(TOKENS, SPLIT) | {"initial_state": P()}
    for argument, given in (
        ("cu_seqlens", {"cu_seqlens": jnp.asarray(wrong)}),
        ("cu_seqlens_cpu", {"cu_seqlens": fine, "cu_seqlens_cpu": np.asarray(wrong)}),
    ):

        def local(x: dict[str, Any], given: dict[str, Any] = given) -> Any:
            return kdacore.chunk_kda(**x, **given, cp="seq")[0]

        call = jax.shard_map(local, mesh=mesh(), in_specs=(specs,), out_specs=SPLIT)
        with pytest.raises(ContractError, match=f"'{argument}'.*(offset|decrease)"):
            jax.eval_shape(call, arrays)


def test_host_copies_of_other_offsets(arrays: dict[str, Any]) -> None:
    specs = dict.fromkeys(TOKENS, SPLIT) | {"initial_state": P()}
    given = {"cu_seqlens": jnp.asarray(VALID[0]), "cu_seqlens_cpu": np.asarray([0, 11, 20, 32])}
    call = jax.shard_map(
        lambda x: kdacore.chunk_kda(**x, **given, cp="seq")[0],
        mesh=mesh(), in_specs=(specs,), out_specs=SPLIT,
    )  # fmt: skip
    with pytest.raises(ContractError, match=r"'cu_seqlens_cpu'.*\[0, 11, 20, 32\].*\[0, 10, 20, 32\]"):
        jax.eval_shape(call, arrays)
