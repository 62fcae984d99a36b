"""Fused decode calls that break the contract: each names the argument and nothing is written. Without values, and on a
backend that reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdacore

H, HV, K, V, P, N, W = 2, 4, 8, 6, 7, 3, 4
D = 2 * H * K + HV * V
decode = kdacore.fused_decode_kda


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).random(shape).astype(dtype)


def step(T: int = 2, **changes: Any) -> dict[str, Any]:
    """A valid call that uses all around the recurrence; None takes an argument away."""
    call: dict[str, Any] = {"x": numbers(N, T, D), "g": -numbers(N, T, HV, K), "beta": numbers(N, T, HV)}
    call |= {
        "initial_state": numbers(P, HV, K, V),
        "state_indices": np.array([4, 2, 0]),
        "inplace_state": True,
    }
    call |= {"conv_weight": numbers(D, W), "conv_bias": numbers(D), "conv_state": numbers(P, D, W + T - 2)}
    call |= {"z": numbers(N, T, HV, V), "norm_weight": numbers(V)}
    return {name: x for name, x in {**call, **changes}.items() if x is not None}


def candidates(T: int = 2, **changes: Any) -> dict[str, Any]:
    """A valid call that writes the state and the window after each candidate."""
    more = {"write_pool": numbers(20, HV, K, V), "write_indices": np.arange(N * T).reshape(N, T)}
    return step(T, **{**more, "conv_windows": numbers(N, T, W - 1, D), **changes})


def pack(*lengths: int, **changes: Any) -> dict[str, Any]:
    call = step(sum(lengths), **changes)
    return {
        **call,
        **{n: call[n][:1] for n in ("x", "g", "beta", "z")},
        "cu_seqlens": np.cumsum([0, *lengths]),
    }


def records(n: int = 3) -> tuple[Any, ...]:
    return numbers(5, n, HV, V), numbers(5, n, H, K), numbers(5, n, HV, K)


_NO_CONV: dict[str, Any] = dict.fromkeys(("conv_weight", "conv_bias", "conv_state"))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no x": (step(x=None) | {"x": None}, "x"),
    "channels": (step(x=numbers(N, 2, D + 1)), "x"),
    "channels of no head": (step(x=numbers(N, 2, HV * V)), "x"),
    "heads that do not divide": (step(x=numbers(N, 2, 2 * 3 * K + HV * V)), "x"),
    "x of two dimensions": (step(x=numbers(N, D)), "x"),
    "17 tokens": (step(T=17), "x"),
    "gates of one decay a head": (step(g=-numbers(N, 2, HV)), "g"),
    "another beta": (step(beta=numbers(N, 2, H)), "beta"),
    "a state of three dimensions": (step(initial_state=numbers(HV, K, V)), "initial_state"),
    "five taps": (step(conv_weight=numbers(D, 5)), "conv_weight"),
    "one tap": (step(conv_weight=numbers(D, 1)), "conv_weight"),
    "taps of fewer channels": (step(conv_weight=numbers(D - 1, W)), "conv_weight"),
    "integer taps": (step(conv_weight=np.ones((D, W), int)), "conv_weight"),
    "a bias for each tap": (step(conv_bias=numbers(D, W)), "conv_bias"),
    "no conv_state": (step(conv_state=None), "conv_state"),
    "a conv_state without weights": (step(conv_weight=None, conv_bias=None), "conv_state"),
    "a bias without weights": (step(**{**_NO_CONV, "conv_bias": numbers(D)}), "conv_bias"),
    "conv rows without weights": (step(**_NO_CONV, conv_indices=np.arange(N)), "conv_indices"),
    "a conv_state of another dtype": (step(conv_state=numbers(P, D, W, dtype=np.float16)), "conv_state"),
    "a conv_state of fewer channels": (step(conv_state=numbers(P, D - 1, W)), "conv_state"),
    "a short conv_state": (step(conv_state=numbers(P, D, W - 2)), "conv_state"),
    "rows of conv_state": (step(state_indices=None, initial_state=numbers(N, HV, K, V)), "conv_state"),
    "conv rows of floats": (step(conv_indices=numbers(N)), "conv_indices"),
    "two conv rows": (step(conv_indices=np.arange(2)), "conv_indices"),
    "z alone": (step(norm_weight=None), "z"),
    "another z": (step(z=numbers(N, 2, HV, V + 1)), "z"),
    "a norm of keys": (step(norm_weight=numbers(K)), "norm_weight"),
    "a norm of heads": (step(norm_weight=numbers(H, V)), "norm_weight"),
    "an activation": (step(norm_activation="relu"), "norm_activation"),
    "an activation of no name": (step(norm_activation=None) | {"norm_activation": None}, "norm_activation"),
    "an activation without z": (step(z=None, norm_activation="silu"), "norm_activation"),
    "an epsilon without a norm": (step(z=None, norm_weight=None, norm_eps=1e-6), "norm_eps"),
    "no epsilon": (step(norm_eps=0.0), "norm_eps"),
    "a negative epsilon": (step(norm_eps=-1e-5), "norm_eps"),
    "out of another dtype": (step(out=numbers(N, 2, HV, V, dtype=np.float16)), "out"),
    "windows of no candidates": (step(conv_windows=numbers(N, 2, W - 1, D)), "conv_windows"),
    "windows of a call that writes nothing": (
        candidates(inplace_state=None, write_pool=None, write_indices=None), "conv_windows"),
    "windows of other taps": (candidates(conv_windows=numbers(N, 2, W, D)), "conv_windows"),
    "windows of another dtype": (candidates(conv_windows=numbers(N, 2, W - 1, D, dtype=np.float16)), "conv_windows"),
    "windows of one token": (candidates(conv_windows=numbers(N, 1, W - 1, D)), "conv_windows"),
    "windows of two sequences": (candidates(conv_windows=numbers(2, 2, W - 1, D)), "conv_windows"),
    "candidates in a short row": (
        candidates(T=3, conv_windows=None, conv_state=numbers(P, D, W)), "conv_state"),
    "records in a short row": (
        step(T=3, conv_state=numbers(P, D, W), records=records(), record_indices=np.arange(N)), "conv_state"),
    "more tokens than records": (step(T=4, records=records(), record_indices=np.arange(N)), "x"),
}  # fmt: skip
BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a conv row beyond": (step(conv_indices=np.array([1, P, 0])), "conv_indices"),
    "a conv row twice": (step(conv_indices=np.array([1, 1, 0])), "conv_indices"),
    "a state row beyond conv_state": (step(conv_state=numbers(P - 3, D, W)), "state_indices"),
    "17 tokens of a pack": (pack(17, 1, 1, conv_state=numbers(P, D, W)), "cu_seqlens"),
    "a pack of candidates in a short row": (
        pack(3, 1, 1, conv_state=numbers(P, D, W), records=records(), record_indices=np.arange(3)), "conv_state"),
    "windows of shorter candidates": (
        pack(3, 1, 1, conv_windows=numbers(5, 2, W - 1, D), records=records(), record_indices=np.arange(3)),
        "conv_windows"),
    "a row of windows twice": (candidates(record_indices=np.array([0, 0, 1])), "record_indices"),
    "a row of windows beyond": (candidates(record_indices=np.array([0, 1, N])), "record_indices"),
}  # fmt: skip
COMMIT = {
    "initial_state": numbers(P, HV, K, V),
    "state_indices": np.array([4, 2]),
    "records": records(),
    "record_indices": np.array([1, 3]),
    "num_replayed": np.array([3, 0]),
}
BAD_COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "conv rows alone": ({"conv_indices": np.arange(2)}, "conv_indices"),
    "windows alone": ({"conv_windows": numbers(5, 3, W - 1, D)}, "conv_windows"),
    "a conv_state of two dimensions": ({"conv_state": numbers(P, D)}, "conv_state"),
    "three conv rows": ({"conv_state": numbers(P, D, W), "conv_indices": np.arange(3)}, "conv_indices"),
    "windows of other channels": (
        {"conv_state": numbers(P, D, W), "conv_windows": numbers(5, 3, W - 1, D + 1)}, "conv_windows"),
    "windows longer than rows": (
        {"conv_state": numbers(P, D, 2), "conv_windows": numbers(5, 3, 3, D)}, "conv_windows"),
}  # fmt: skip


def memory_of(call: dict[str, Any]) -> list[bytes]:
    arrays = [*call.values(), *call.get("records", ())]
    return [x.tobytes() for x in arrays if isinstance(x, np.ndarray)]


def check(function: Any, call: dict[str, Any], argument: str) -> None:
    before = memory_of(call)
    with pytest.raises(kdacore.ContractError) as caught:
        function(**call)
    assert (caught.value.argument, caught.value.op) == (argument, function.__name__)
    assert memory_of(call) == before


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    with kdacore.record_selections() as ran:
        check(decode, *BAD[name])
    assert ran == []


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str) -> None:
    check(decode, *BAD_VALUES[name])


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_bad_commits(name: str) -> None:
    changes, argument = BAD_COMMITS[name]
    check(kdacore.commit_records, {**COMMIT, **changes}, argument)


@pytest.mark.parametrize("build", [step, candidates])
def test_valid_ones_are_served(build: Any) -> None:
    o, _ = decode(**build())
    assert np.isfinite(o).all()


def test_gradients_are_refused() -> None:
    torch = pytest.importorskip("torch")
    call = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in step().items()}
    call["x"].requires_grad_()
    check_error = pytest.raises(kdacore.ContractError, match="no_grad")
    with check_error:
        decode(**call)
    with torch.no_grad():
        decode(**call)


@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
def test_backends_without_the_op_decline_it(backend: str) -> None:
    assert "op" in {r.code for r in kdacore.explain(decode, **step()).candidate(backend).reasons}
