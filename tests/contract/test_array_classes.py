"""Classes of arrays besides the plain one of each library: NumPy's subclasses, and JAX arrays that are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import stages
from kdacore.api import public_function

T, H, K = 8, 2, 8


class Subclass(np.ndarray):
    """Adds nothing."""


class Refuses(np.ndarray):
    """Computes nothing."""

    def __array_ufunc__(self, *args: Any, **options: Any) -> Any:
        return NotImplemented

    def __array_function__(self, *args: Any, **options: Any) -> Any:
        return NotImplemented


def _call() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    call = {n: rng.standard_normal((1, T, H, K), dtype=np.float32) for n in ("q", "k", "v")}
    call["g"] = rng.standard_normal((1, T, H, K), dtype=np.float32)
    call["beta"] = rng.random((1, T, H), dtype=np.float32)
    return {**call, "A_log": np.zeros(H, np.float32), "dt_bias": np.ones((H, K), np.float32)}


@pytest.mark.parametrize("kind", [Subclass, Refuses, np.memmap, np.recarray])
def test_subclasses_are_read_as_arrays(kind: Any) -> None:
    call = _call()
    more = {"cu_seqlens": np.asarray([0, 3, T]), "initial_state": np.ones((2, H, K, K), np.float32)}
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        wanted = function(**call, **more, use_gate_in_kernel=True)[0]
        for name, x in {**call, **more}.items():
            for _ in range(2):
                given = {**call, **more, name: x.view(kind)}
                o = function(**given, use_gate_in_kernel=True)[0]
                assert type(o) is np.ndarray
                assert (o == wanted).all()


@pytest.mark.parametrize("kind", [Subclass, np.memmap])
def test_subclasses_that_are_written_stay_the_callers(kind: Any) -> None:
    call = _call()
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        pool, out = (
            np.zeros((3, H, K, K), np.float32).view(kind),
            np.zeros((1, T, H, K), np.float32).view(kind),
        )
        o, state = function(
            **call, use_gate_in_kernel=True, initial_state=pool, state_indices=np.asarray([1]).view(kind),
            out=out, inplace_state=True, output_final_state=True,
        )[:2]  # fmt: skip
        assert o is out and state is pool
        assert np.asarray(out).any() and np.asarray(pool[1]).any() and not np.asarray(pool[[0, 2]]).any()


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices() -> None:
    """Whose product is the matrix product, and whose rows are matrices."""
    call, rows = _call(), np.asarray([[1, 2, 3, 4, 5, 6, 7, 0]])
    matrix = {**call, "dt_bias": np.matrix(call["dt_bias"])}
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        o = function(**matrix, use_gate_in_kernel=True)[0]
        assert (o == function(**call, use_gate_in_kernel=True)[0]).all()
    for of in (lambda **c: kdacore.kda_gate(**c), lambda **c: stages.kda_chunk_gate(**c)):
        given = {n: call[n] for n in ("g", "A_log", "dt_bias")}
        found = of(**{**given, "dt_bias": np.matrix(call["dt_bias"])})
        assert type(found) is np.ndarray and (found == of(**given)).all()

    def decode(table: Any) -> tuple[Any, Any]:
        pool = np.ones((T, H, K, K), np.float32)
        o = kdacore.fused_recurrent_kda(
            **call, use_gate_in_kernel=True, initial_state=pool, state_indices=table,
            num_accepted_tokens=np.asarray([1]), inplace_state=True,
        )[0]  # fmt: skip
        return o, pool

    for found, wanted in zip(decode(np.matrix(rows)), decode(rows), strict=True):
        assert (found == wanted).all()
    with pytest.raises(kdacore.ContractError, match="'cu_seqlens'"):
        kdacore.chunk_kda(**call, use_gate_in_kernel=True, cu_seqlens=np.matrix([0, T]))


@pytest.mark.parametrize("function", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_masked_arrays(function: Callable[..., Any]) -> None:
    call = _call()
    for name in call:
        with pytest.raises(kdacore.ContractError, match=f"'{name}'.*masked"):
            function(**{**call, name: np.ma.masked_array(call[name])}, use_gate_in_kernel=True)


def test_jax_arrays_that_are_gone() -> None:
    jax = pytest.importorskip("jax")
    call = {n: jax.numpy.asarray(x) for n, x in _call().items()}
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    for name in call:
        for remove in (donate, lambda x: x.delete()):
            given = {**call, name: jax.numpy.array(call[name], copy=True)}
            remove(given[name])

            def chunk(given: dict[str, Any] = given, **more: Any) -> Any:
                return kdacore.chunk_kda(**given, use_gate_in_kernel=True, **more)

            def whole(x: Any, given: dict[str, Any] = given, name: str = name) -> Any:
                other = "k" if name == "q" else "q"
                return kdacore.chunk_kda(**{**given, other: x}, use_gate_in_kernel=True)[0].sum()

            def explain(given: dict[str, Any] = given) -> Any:
                return kdacore.explain("chunk_kda", **given, use_gate_in_kernel=True)

            for ask in (
                chunk,
                lambda f=chunk: f(backend="xla"),
                explain,
                lambda f=whole: jax.jit(f)(call["q"]),
                lambda f=whole: jax.grad(f)(call["q"]),
            ):
                with pytest.raises(kdacore.ContractError, match=f"'{name}'.*deleted or donated"):
                    ask()


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "op, names",
    [
        (
            "fused_recurrent_kda",
            ("q", "A_log", "initial_state", "state_indices", "cu_seqlens", "cu_seqlens_cpu"),
        ),
        ("kda_gate", ("g", "A_log", "dt_bias")),
        ("kda_chunk_gate", ("g", "A_log", "cu_seqlens")),
        ("kda_chunk_intra", ("q", "gc", "beta")),
    ],
)
def test_jax_arrays_that_are_gone_of_every_kind_of_op(op: str, names: tuple[str, ...]) -> None:
    """Also of objects that stand for an array."""
    jax = pytest.importorskip("jax")
    from kdacore.calls.arrays import make_arrays
    from kdacore.calls.description import CallDescription, options
    from kdacore.calls.values import Shape

    class Holder:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __jax_array__(self) -> Any:
            return self.array

    whole = op == "fused_recurrent_kda"
    pack = Shape(B=1, T=8, H=2, HV=2, K=8, V=8, lengths=() if op == "kda_gate" else (3, 5))
    call = CallDescription(
        op=op, kind="jax", shape=pack, pool="indexed" if whole else "", host_offsets=whole,
        options=options(use_gate_in_kernel=True) if whole else options(),
    )  # fmt: skip
    arrays, function = make_arrays(call), public_function(op)
    for name in names:
        for hold in (lambda x: x, Holder):
            gone = jax.numpy.array(arrays[name], copy=True)
            given = {**arrays, name: hold(gone)}
            function(**given, **dict(call.options), backend="reference")
            gone.delete()
            with pytest.raises(kdacore.ContractError, match=f"'{name}'.*deleted or donated"):
                function(**given, **dict(call.options))
