"""Options that are no plain numbers: huge ones, and objects whose own code raises or lies."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import stages
from kdacore.calls.values import to_kind
from kdacore.errors import shown

T, H, K = 16, 2, 8
HUGE = 10**5000


def _call(kind: Any = "numpy") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    call = {n: rng.standard_normal((1, T, H, K), dtype=np.float32) for n in ("q", "k", "v")}
    call["g"] = -rng.random((1, T, H, K), dtype=np.float32)
    call["beta"] = rng.random((1, T, H), dtype=np.float32)
    return {n: to_kind(x, kind, "float32") for n, x in call.items()}


class _NoRepr:
    def __repr__(self) -> str:
        raise KeyError("repr")


class _JunkRepr:
    def __repr__(self) -> Any:
        return 5


class _StrOfItsOwn(str):
    def __str__(self) -> str:
        raise KeyError("str")

    __repr__ = __str__


class _NoEq:
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise KeyError("eq")


class _JunkEq:
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return np.asarray([True, False])


class _NoHash:
    def __hash__(self) -> int:
        raise KeyError("hash")


class _AnyClass:
    """Says that it is a number, as mocks do."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return float


class _NoFloat(numbers.Real):
    """A number by its class alone: no conversion of it works."""

    def _raise(self, *args: Any) -> Any:
        raise KeyError("conversion")

    __abs__ = __add__ = __ceil__ = __eq__ = __float__ = __floor__ = __floordiv__ = __le__ = __lt__ = _raise
    __mod__ = __mul__ = __neg__ = __pos__ = __pow__ = __radd__ = __rfloordiv__ = __rmod__ = __rmul__ = _raise
    __round__ = __rpow__ = __rtruediv__ = __truediv__ = __trunc__ = _raise
    __hash__ = object.__hash__


STRANGERS: tuple[Callable[[], Any], ...] = (
    _NoRepr,
    _JunkRepr,
    lambda: _StrOfItsOwn("reference"),
    _NoEq,
    _JunkEq,
    _NoHash,
    _AnyClass,
    _NoFloat,
    lambda: np.asarray([1, 2]),
    lambda: [HUGE],
    lambda: {"a": _NoRepr()},
)
OPTIONS = ("scale", "lower_bound", "safe_gate", "checkpoint_every", "null_index", "inplace_state", "cp")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("option", OPTIONS)
def test_objects_whose_own_code_raises(option: str, kind: str) -> None:
    call = _call(kind)
    for _ in range(2):
        kdacore.chunk_kda(**call)  # so that there are calls to compare with
    for make in STRANGERS:
        for ask in (kdacore.chunk_kda, lambda **c: kdacore.explain("chunk_kda", **c)):
            with pytest.raises(kdacore.ContractError) as caught:
                ask(**{**call, option: make()})
            assert caught.value.argument == option
            assert caught.value.got


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_backend_that_is_no_name(kind: str) -> None:
    call = _call(kind)
    for _ in range(3):
        kdacore.chunk_kda(**call, backend="reference")
    for make in STRANGERS:
        stranger = make()
        if isinstance(stranger, str):  # its characters are a name, whatever it says of itself
            kdacore.chunk_kda(**call, backend=stranger)
            continue
        with pytest.raises(kdacore.ContractError) as caught:
            kdacore.chunk_kda(**call, backend=stranger)
        assert caught.value.argument == "backend"


class _LyingInt(int):
    """Equal to all others, with one hash."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 7


class _LyingFloat(float):
    __eq__ = _LyingInt.__eq__
    __ne__ = _LyingInt.__ne__
    __hash__ = _LyingInt.__hash__


def test_numbers_that_are_equal_to_all_others() -> None:
    """Their value counts, not what they say when a call is compared with those made before."""
    call = _call()
    for kind in ("numpy", "torch"):
        arrays = {n: to_kind(x, kind, "float32") for n, x in call.items()}
        for scale in (1.0, 2.0, 0.5, 1.0):
            for _ in range(2):
                o = kdacore.chunk_kda(**arrays, scale=_LyingFloat(scale))[0]
                want = kdacore.chunk_kda(**arrays, scale=scale)[0]
                assert (np.asarray(o) == np.asarray(want)).all()
        for every in (64, 128):
            with kdacore.record_selections() as ran:
                kdacore.chunk_kda(**arrays, checkpoint_every=_LyingInt(every))
            assert ran[0].request.checkpoint_every == every
    with pytest.raises(kdacore.ContractError, match="chunk_size"):
        stages.kda_chunk_gate(call["g"], chunk_size=_LyingInt(48))
    # It is equal to the default too: that must not make a call without checkpoints of it.
    assert (
        "checkpoints" in kdacore.explain("chunk_kda", **call, checkpoint_every=_LyingInt(64)).request.features
    )


def test_numbers_of_numpy_and_subclasses_are_cached() -> None:
    call, pool = _call("torch"), to_kind(np.zeros((4, H, K, K), np.float32), "torch", "float32")
    from kdacore.dispatch import plan

    def call_it(null: Any, scale: Any) -> None:
        index = to_kind(np.asarray([2]), "torch", "int64")
        kdacore.fused_recurrent_kda(
            **call, initial_state=pool, state_indices=index, null_index=null, scale=scale
        )

    call_it(3, 0.5)
    before = len(plan._plans)
    call_it(np.int64(3), np.float32(0.5))
    call_it(_LyingInt(3), _LyingFloat(0.5))
    assert len(plan._plans) == before


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**63, -(2**63), 10**400, 64 * HUGE], ids=range(6))
def test_integers_beyond_any_size(value: int) -> None:
    call = _call()
    g, state = call["g"], np.zeros((2, H, K, K), np.float32)
    rows = {"initial_state": state, "state_indices": np.asarray([1])}
    for option, function, arguments in (
        ("chunk_size", stages.kda_chunk_gate, {"g": g}),
        ("chunk_size", stages.delta_rule_chunk_state, {"kg": g, "w": g, "u": g, "gc": g}),
        ("checkpoint_every", kdacore.chunk_kda, call),
        ("null_index", kdacore.fused_recurrent_kda, {**call, **rows}),
        ("null_index", kdacore.chunk_kda, {**call, **rows}),
    ):
        with pytest.raises(kdacore.ContractError) as caught:
            function(**arguments, **{option: value})
        assert caught.value.argument == option
    for function in (kdacore.chunk_kda, kdacore.fused_recurrent_kda):
        if abs(value) < 10**30:  # a scale may be as large
            continue
        with pytest.raises(kdacore.ContractError, match="scale"):
            function(**call, scale=value)
    with pytest.raises(kdacore.ContractError, match="shape"):
        kdacore.ShapeDtype((1, value if value > 0 else -value, 2, 8))


def test_the_largest_sizes_can_be_asked_about() -> None:
    """Products of sizes have no limit; nothing of that size is allocated."""
    wide = kdacore.ShapeDtype((2**40, 2**62, 2**40, 64), "bfloat16", "cuda", "torch", "sm_90")
    thin = kdacore.ShapeDtype((2**40, 2**62, 2**40), "bfloat16", "cuda", "torch", "sm_90")
    for op in ("chunk_kda", "fused_recurrent_kda"):
        found = kdacore.explain(op, wide, wide, wide, wide, thin)
        assert {c.backend: c.supported for c in found.candidates}["triton"] is False


def test_shown() -> None:
    assert shown(HUGE) == "an integer of 16610 bits"
    assert "_NoRepr" in shown(_NoRepr()) and "_JunkRepr" in shown(_JunkRepr())
    assert len(shown("a" * 10_000)) < 500
    error = kdacore.ContractError("op", "argument", HUGE, "less")
    assert "16610 bits" in str(error) and error.got == "an integer of 16610 bits"
