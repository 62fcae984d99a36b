"""Functions that a backend offers for a slice: held to the rules of ``forward``, or passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import PluginError, ShapeDtype
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.parallel.slices import is_composed, slice_functions
from kdacore.registry import REGISTRY
from kdacore.types import (
    Backend,
    ChunkInputs,
    InputGrads,
    OpImpl,
    OutputGrads,
    Outputs,
    Request,
    SliceForward,
    SliceFunctions,
)

NAME = "offers-slices"
B, T, H, D = 1, 6, 2, 4
STATE = (B, H, D, D)


def good() -> dict[str, Any]:
    """Functions whose results are formed as they should be."""
    return {
        "begin": lambda r, x, leaving: SliceForward(np.zeros(STATE, np.float32), np.zeros(STATE, np.float32)),
        "finish": lambda r, x, pending, starts: Outputs(0 * x.v),
        "backward_begin": lambda r, x, saved, grads, starts, entering: (0 * starts, None),
        "backward_finish": lambda r, x, saved, pending, grads, starts, ends: InputGrads(*[0 * y for y in x[:5]]),
    }  # fmt: skip


@pytest.fixture
def functions() -> Iterator[Callable[..., SliceFunctions]]:
    """``functions(offer)``: what dispatch would call for a slice, of a backend that offers this."""

    def register(offer: Callable[[Request], Any], forward: Any = None) -> SliceFunctions:
        op = OpImpl(
            forward or (lambda r, x: Outputs(0 * x.v, np.zeros(r.state_shape, np.float32))),
            lambda r, x, saved, grads: InputGrads(*[0 * y for y in x[:5]]),
            serves=FEATURES,
            verified_archs=frozenset({"*"}),
            slices=offer,
        )
        backend = Backend(NAME, "1", ("numpy",), {"chunk_kda": op}, auto_kinds=())
        plugin = type("P", (), {"kdacore_backends": staticmethod(hookimpl(lambda: [backend]))})()
        REGISTRY.register(plugin, NAME)
        return slice_functions(NAME, request())

    yield register
    if NAME in REGISTRY.backends():
        REGISTRY.unregister(NAME)


def request() -> Request:
    x = {n: ShapeDtype((B, T, H, D)) for n in ("q", "k", "v", "g")}
    state = ShapeDtype(STATE)
    beta = ShapeDtype((B, T, H))
    return kdacore.explain("chunk_kda", **x, beta=beta, initial_state=state, backend="reference").request


def inputs() -> ChunkInputs:
    x = [np.zeros((B, T, H, D), np.float32) for _ in range(4)]
    return ChunkInputs(*x, np.zeros((B, T, H), np.float32))


def arguments(name: str) -> tuple[Any, ...]:
    starts = np.zeros(STATE, np.float32)
    grads = OutputGrads(np.zeros((B, T, H, D), np.float32))
    more: dict[str, tuple[Any, ...]] = {
        "begin": (None,),
        "finish": (None, starts),
        "backward_begin": ((), grads, starts, None),
        "backward_finish": ((), None, grads, starts, starts),
    }
    return request(), inputs(), *more[name]


def raises(*given: Any) -> Any:
    raise SystemExit("enough")


def test_good_functions(functions: Callable[..., SliceFunctions]) -> None:
    found = functions(lambda r: SliceFunctions(**good(), seconds=1e-3))
    assert not is_composed(NAME, request()) and found.seconds == 1e-3
    for name in good():
        for _ in range(2):
            getattr(found, name)(*arguments(name))


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        (lambda r: 7, "is 7, no kdacore.types.SliceFunctions or None"),
        (lambda r: tuple(good().values()), "no kdacore.types.SliceFunctions or None"),
        (lambda r: SliceFunctions(**{**good(), "finish": None}), "has finish = None, no function"),
        (lambda r: SliceFunctions(**good(), seconds=float("nan")), "has seconds = nan"),
        (lambda r: SliceFunctions(**good(), seconds=True), "has seconds = True"),
        (lambda r: 1 / 0, "ZeroDivisionError"),
        (raises, "SystemExit: enough"),
        (lambda r: object.__setattr__(r, "T", 1), "AttributeError"),
    ],
)
def test_offers_that_are_passed_over(functions: Callable[..., SliceFunctions], offer: Any, said: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"backend {NAME}: slices of chunk_kda") as caught:
        found = functions(offer)
    assert said in str(caught[0].message)
    assert is_composed(NAME, request())
    assert found.begin(*arguments("begin")).M.shape == STATE


WRONG: list[tuple[str, Any, str]] = [
    ("begin", lambda *a: None, "returned NoneType; wanted kdacore.types.SliceForward"),
    ("begin", lambda r, x, p: SliceForward(x.q, x.v), "M: got shape [1, 6, 2, 4]; wanted [1, 2, 4, 4]"),
    ("begin", lambda *a: SliceForward(np.zeros(STATE), np.zeros(STATE)), "M: got dtype float64"),
    ("begin", lambda *a: SliceForward(s := np.zeros(STATE, np.float32), s), "C: got memory of the M"),
    ("begin", lambda *a: SliceForward(None, None), "M: the call asks for it, and it is None"),
    ("begin", raises, "raised SystemExit('enough')"),
    ("finish", lambda r, x, *a: x.v, "returned ndarray; wanted kdacore.types.Outputs"),
    ("finish", raises, "raised SystemExit('enough')"),
    ("backward_begin", lambda *a: np.zeros(STATE, np.float32), "returned ndarray; wanted a tuple"),
    ("backward_begin", lambda *a: (1, 2, 3), "returned a tuple of 3; wanted an array and something pending"),
    ("backward_begin", lambda r, x, *a: (x.v, None), "the gradient: got shape"),
    ("backward_begin", raises, "raised SystemExit('enough')"),
    ("backward_finish", lambda *a: (), "returned tuple; wanted kdacore.types.InputGrads"),
    ("backward_finish", raises, "raised SystemExit('enough')"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "said"), WRONG)
def test_functions_that_return_junk(
    functions: Callable[..., SliceFunctions], name: str, wrong: Any, said: str
) -> None:
    found = functions(lambda r: SliceFunctions(**{**good(), name: wrong}))
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            getattr(found, name)(*arguments(name))
        assert f"backend '{NAME}': slices.{name} of chunk_kda" in str(caught.value)
        assert said in str(caught.value)


def test_a_composed_slice_is_of_results_that_fit(functions: Callable[..., SliceFunctions]) -> None:
    found = functions(lambda r: None, lambda r, x: Outputs(0 * x.v, np.zeros((1, 1), np.float32)))
    with pytest.raises(PluginError, match="forward of chunk_kda: final_state: got shape"):
        found.begin(*arguments("begin"))
