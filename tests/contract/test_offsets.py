"""Offsets in host memory are checked at every call, whatever the backend: compared, never subtracted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import config, stages
from kdacore.calls.values import to_kind
from kdacore.contract.values import check_offsets
from kdacore.types import Device, Request

T, H, K = 16, 2, 8
LOWEST, HIGHEST = -(2**63), 2**63 - 1
HOSTILE = (
    [0, HIGHEST, -5, T],
    [0, 10, LOWEST],
    [0, HIGHEST, LOWEST, T],
    [0, LOWEST, HIGHEST],
    [0, -1, T],
    [0, 2**32, T],
    [0, T, 2**32],
    [LOWEST, 0, T],
    [HIGHEST, LOWEST],
    [0, T + 1],
    [2, T],
    [0, 9, 4, T],
)
HOSTILE_32 = (
    [0, 2**31 - 1, -5, T],
    [0, 2**31 - 1, -(2**31), T],
    [0, 10, -(2**31)],
    [-(2**31), 0, T],
    [0, 2**31 - 1],
)


def _tokens(kind: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    call = {n: rng.standard_normal((1, T, H, K), dtype=np.float32) for n in ("q", "k", "v")}
    call["g"] = -rng.random((1, T, H, K), dtype=np.float32)
    call["beta"] = rng.random((1, T, H), dtype=np.float32)
    return {n: to_kind(x, kind, "float32") for n, x in call.items()}


def _refused(
    function: Callable[..., Any], argument: str, call: dict[str, Any], *, by_backend: bool = False
) -> None:
    """``by_backend``: indices and counts are read by the backends that read values on the host."""
    with kdacore.record_selections() as ran, pytest.raises(kdacore.ContractError) as caught:
        function(**call)
    assert (caught.value.argument, bool(ran)) == (argument, by_backend)


@pytest.mark.parametrize("validate", ["shapes", "values"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_hostile_offsets(op: str, kind: str, validate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_VALIDATE", validate)
    config.refresh()
    call = _tokens(kind)
    function = getattr(kdacore, op)
    for values, dtype in [(x, np.int64) for x in HOSTILE] + [(x, np.int32) for x in HOSTILE_32]:
        offsets = np.asarray(values, dtype)
        _refused(function, "cu_seqlens", {**call, "cu_seqlens": to_kind(offsets, kind, offsets.dtype.name)})


@pytest.mark.parametrize("values", HOSTILE_32)
def test_hostile_offsets_of_a_compiled_program(values: list[int]) -> None:
    """XLA clips what it gathers, so nothing would fail: rows of the wrong sequence would be read."""
    offsets = to_kind(np.asarray(values, np.int32), "jax", "int32")
    _refused(kdacore.chunk_kda, "cu_seqlens", {**_tokens("jax"), "cu_seqlens": offsets, "backend": "xla"})


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_hostile_offsets_known_while_a_program_is_traced(op: str) -> None:
    """Constants of the program and host copies are in host memory: the trace fails, nothing is compiled."""
    jax = pytest.importorskip("jax")
    call, function = _tokens("jax"), getattr(kdacore, op)
    good, bad = (jax.numpy.asarray(x, "int32") for x in ([0, 3, 5, T], [0, 2**30, -5, T]))
    other = np.asarray([0, 3, 6, T])

    def constant(q: Any) -> Any:
        return function(**{**call, "q": q}, cu_seqlens=bad)[0].sum()

    for transformed, q in (
        (jax.jit(constant), call["q"]),
        (jax.grad(constant), call["q"]),
        (jax.vmap(constant), call["q"][None]),
    ):
        _refused(lambda q, f=transformed: f(q), "cu_seqlens", {"q": q})
    for host in (np.asarray([0, 2**40, -5, T]), np.asarray([0, 3, 5, T + 1])):
        traced = jax.jit(lambda x, host=host: function(**call, cu_seqlens=x, cu_seqlens_cpu=host)[0])
        _refused(traced, "cu_seqlens_cpu", {"x": good})
    disagree = jax.jit(lambda q: function(**{**call, "q": q}, cu_seqlens=good, cu_seqlens_cpu=other)[0])
    _refused(disagree, "cu_seqlens_cpu", {"q": call["q"]})


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_hostile_offsets_that_a_program_is_given(op: str) -> None:
    """What is computed is undefined, but it ends: no loop counts tokens that there are not."""
    jax = pytest.importorskip("jax")
    call, function = _tokens("jax"), getattr(kdacore, op)
    program = jax.jit(lambda offsets: function(**call, cu_seqlens=offsets)[0])
    good = jax.numpy.asarray([0, 3, 5, T], "int32")
    program(good).block_until_ready()
    for values in ([0, 2**31 - 1, -5, T], [0, 2**31 - 1, -(2**31), T], [2**31 - 1, 0, -(2**31), 2**31 - 1]):
        start = time.monotonic()
        program(jax.numpy.asarray(values, "int32")).block_until_ready()
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_offsets_that_are_no_offsets_at_all(op: str) -> None:
    """Of other types, dtypes and shapes, in either argument; views of any stride are offsets."""
    call, good = _tokens("numpy"), np.asarray([0, 6, T])
    function = getattr(kdacore, op)
    strangers: tuple[Any, ...] = (
        [0, 6, T], (0, 6, T), range(3), "016", T, {0: T}, good.astype("uint8"), good.astype("uint64"),
        good.astype("float32"), good.astype(bool), good.astype(object), good.astype(">i8"), good[None],
        good[:, None], good[:1], good[:0], np.asarray(T),
    )  # fmt: skip
    for stranger in strangers:
        _refused(function, "cu_seqlens", {**call, "cu_seqlens": stranger})
        _refused(function, "cu_seqlens_cpu", {**call, "cu_seqlens": good, "cu_seqlens_cpu": stranger})
    wanted = function(**call, cu_seqlens=good)[0]
    for view in (good[::-1].copy()[::-1], np.repeat(good, 2)[::2]):
        assert (function(**call, cu_seqlens=view, cu_seqlens_cpu=view)[0] == wanted).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("value", [HIGHEST, 2**32, 2**32 + 1, 4])
def test_row_numbers_and_positions_that_wrap(value: int, backend: str, kind: Any) -> None:
    """The lowest int64 is an index below zero, so no slot, but no position."""
    call = {**_tokens(kind), "cu_seqlens": to_kind(np.asarray([0, 5, T]), kind, "int64")}

    def refused(function: Any, name: str, more: dict[str, Any]) -> None:
        _refused(function, name, {**call, **more}, by_backend=True)

    rows = {"state_indices": [1, 2], "write_indices": [1, 2]}
    kept = {"checkpoint_offsets": [0, 5], "checkpoint_indices": [0, 3]}
    options = {"inplace_state": True, "backend": backend}
    for name in (*rows, *kept):
        given = {**rows, **kept, name: [value, 0 if name == "checkpoint_indices" else 1]}
        pool = to_kind(np.zeros((4, H, K, K), np.float32), kind, "float32")
        arrays = {n: to_kind(np.asarray(x), kind, "int64") for n, x in given.items()}
        refused(kdacore.chunk_kda, name, {"initial_state": pool, **arrays, **options})
        assert not np.asarray(pool).any()
    position = {n: to_kind(np.asarray(x), kind, "int64") for n, x in {**rows, **kept}.items()}
    position["checkpoint_offsets"] = to_kind(np.asarray([LOWEST, 5]), kind, "int64")
    pool = to_kind(np.zeros((4, H, K, K), np.float32), kind, "float32")
    refused(kdacore.chunk_kda, "checkpoint_offsets", {"initial_state": pool, **position, **options})
    table = to_kind(np.arange(2 * T).reshape(2, T), kind, "int64")
    pool = to_kind(np.zeros((2 * T, H, K, K), np.float32), kind, "float32")
    for accepted in (value + T, LOWEST, -1):
        counts = to_kind(np.asarray([min(accepted, HIGHEST), 1]), kind, "int64")
        more = {"initial_state": pool, "state_indices": table, "num_accepted_tokens": counts}
        refused(kdacore.fused_recurrent_kda, "num_accepted_tokens", {**more, "backend": backend})


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("values", [[0, HIGHEST, -5, T], [0, 10, LOWEST]])
def test_hostile_offsets_of_stages(values: list[int], kind: str) -> None:
    call = _tokens(kind)
    g, beta, v = call["g"], call["beta"], call["v"]
    A = to_kind(np.zeros((1, T, H, 64), np.float32), kind, "float32")
    h = to_kind(np.zeros((1, T // 64 + len(values) - 1, H, K, K), np.float32), kind, "float32")
    offsets = to_kind(np.asarray(values), kind, "int64")
    for function, arrays in (
        (stages.kda_chunk_gate, {"g": g}),
        (stages.kda_chunk_intra, {"q": g, "k": g, "gc": g, "beta": beta}),
        (stages.kda_recompute_w_u, {"k": g, "v": v, "beta": beta, "gc": g, "Akk": A}),
        (stages.delta_rule_chunk_state, {"kg": g, "w": g, "u": v, "gc": g}),
        (stages.kda_chunk_output, {"q": g, "v_new": v, "gc": g, "Aqk": A, "h": h}),
    ):
        _refused(function, "cu_seqlens", {**arrays, "cu_seqlens": offsets})


def test_calls_seen_before_are_checked_too() -> None:
    """Shapes are all that recognises a call: other offsets come with every batch."""
    for kind in ("numpy", "torch"):
        call = _tokens(kind)
        for _ in range(4):
            kdacore.chunk_kda(**call, cu_seqlens=to_kind(np.asarray([0, 5, T]), kind, "int64"))
        wrong = to_kind(np.asarray([0, LOWEST, T]), kind, "int64")
        _refused(kdacore.chunk_kda, "cu_seqlens", {**call, "cu_seqlens": wrong})


@pytest.mark.parametrize("device, other", [("numpy", "numpy"), ("torch", "torch"), ("torch", "numpy")])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_host_offsets_that_disagree(op: str, device: Any, other: Any) -> None:
    call = {**_tokens(device), "cu_seqlens": to_kind(np.asarray([0, 6, T]), device, "int64")}
    function = getattr(kdacore, op)
    for wrong in ([0, 9, T], [0, 6, T - 1], [0, 0, T], [0, 6, LOWEST]):
        host = to_kind(np.asarray(wrong), other, "int64")
        for _ in range(3):  # the first call, and the ones that are recognised
            _refused(function, "cu_seqlens_cpu", {**call, "cu_seqlens_cpu": host})
    function(**call, cu_seqlens_cpu=to_kind(np.asarray([0, 6, T]), other, "int64"))
    function(**call, cu_seqlens_cpu=np.asarray([0, 6, T], np.int32))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_host_offsets_that_disagree_in_jax(backend: str) -> None:
    call = {**_tokens("jax"), "cu_seqlens": to_kind(np.asarray([0, 6, T], np.int32), "jax", "int32")}
    wrong = np.asarray([0, 9, T], np.int32)
    for host in (wrong, to_kind(wrong, "jax", "int32")):
        _refused(kdacore.chunk_kda, "cu_seqlens_cpu", {**call, "cu_seqlens_cpu": host, "backend": backend})


def test_host_offsets_that_disagree_in_a_stage() -> None:
    g = _tokens("numpy")["g"]
    call = {"g": g, "cu_seqlens": np.asarray([0, 6, T]), "cu_seqlens_cpu": np.asarray([0, 9, T])}
    _refused(stages.kda_chunk_gate, "cu_seqlens_cpu", call)


def test_random_offsets() -> None:
    """What the check says is what arithmetic without a limit says."""
    rng = np.random.default_rng(1)
    request = Request("chunk_kda", "numpy", Device("cpu"), 1, T, 1, 1, K, K, 3, "float32", "float32")
    values = np.asarray([LOWEST, LOWEST + 1, -(2**62), -1, 0, 1, 7, T, T + 1, 2**62, HIGHEST])
    for _ in range(2000):
        offsets = rng.choice(values, 4)
        if rng.random() < 0.5:
            offsets[0] = 0
        exact = [int(x) for x in offsets]
        good = exact[0] == 0 and exact == sorted(exact) and exact[-1] <= T
        try:
            check_offsets(request, "cu_seqlens", offsets)
            passed = True
        except kdacore.ContractError:
            passed = False
        assert passed is good, exact
