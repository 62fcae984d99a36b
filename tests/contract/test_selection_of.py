"""kdacore.selection_of: the selection that a call would have, cached, without making the call."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore.dispatch import selection, selection_queries
from kdacore.ops import OPS
from kdacore.ops.binding import binder
from kdacore.registry import REGISTRY


def call(kind: Any = torch.zeros, T: int = 9, **changed: Any) -> dict[str, Any]:
    x = {name: kind((1, T, 2, 16)) for name in ("q", "k", "v", "g")}
    return {**x, "beta": kind((1, T, 2)), **changed}


def numpy_zeros(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("kind", [numpy_zeros, torch.zeros])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_it_is_what_the_call_has(op: str, kind: Any) -> None:
    x = call(kind)
    found = [kdacore.selection_of(op, **x) for _ in range(4)]
    with kdacore.record_selections() as ran:
        getattr(kdacore, op)(**x)
    assert all(selected is found[0] for selected in found)
    assert (found[0].backend, found[0].why) == (ran[0].backend, ran[0].why)
    assert found[0].request == ran[0].request
    assert kdacore.selection_of(getattr(kdacore, op), *x.values()).backend == found[0].backend


def test_arguments_are_bound_as_by_the_public_function() -> None:
    for op, definition in OPS.items():
        marks = {name: f"<{name}>" for name in (*definition.arrays, *definition.options)}
        arrays, options, backend = binder(definition)(**definition.keywords(marks), backend="<backend>")
        assert arrays == tuple(marks[n] for n in definition.arrays) and backend == "<backend>"
        assert options == tuple(marks[n] for n in definition.options)
        required = [*definition.keywords({name: f"<{name}>" for name in definition.required}).values()]
        arrays, options, backend = binder(definition)(*required)
        assert options == tuple(definition.defaults.values()) and backend is None
        with pytest.raises(TypeError, match=rf"{op}\(\) missing 1 required"):
            binder(definition)(*required[1:])


def test_calls_that_differ_are_told_apart() -> None:
    x = call()
    for _ in range(3):
        plain = kdacore.selection_of("chunk_kda", **x)
    grad = {**x, "q": x["q"].clone().requires_grad_()}
    for _ in range(3):
        assert kdacore.selection_of("chunk_kda", **grad).request.needs_grad
        with torch.no_grad():
            assert not kdacore.selection_of("chunk_kda", **grad).request.needs_grad
        assert kdacore.selection_of("chunk_kda", **x, output_final_state=True).request.output_final_state
        assert kdacore.selection_of("chunk_kda", **x, scale=2.0).request.scale == 2.0
        assert kdacore.selection_of("chunk_kda", **call(T=10)).request.T == 10
        with kdacore.use_backend("reference"):
            assert kdacore.selection_of("chunk_kda", **x).why == "preferred by use_backend"
        forced = kdacore.selection_of("chunk_kda", **x, backend="reference")
        assert forced.why == "forced by backend="
        assert kdacore.selection_of("chunk_kda", **x) is plain


def test_errors_are_those_of_the_call() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        (call(g=torch.zeros(1, 9, 2, 3)), kdacore.ContractError),
        (call(q=None), kdacore.ContractError),
        (call(scale=[]), kdacore.ContractError),
        (call(backend="cuda"), kdacore.UnsupportedError),
        (call(backend="nobody"), kdacore.ContractError),
    ]
    for x, kind in wrong:
        with pytest.raises(kind) as of_the_call:
            kdacore.chunk_kda(**x)
        for _ in range(4):
            with pytest.raises(kind) as asked_about:
                kdacore.selection_of("chunk_kda", **x)
            assert str(asked_about.value) == str(of_the_call.value)
    with pytest.raises(kdacore.ContractError, match="'op'"):
        kdacore.selection_of("chunk_kdaa")


def test_transformations_are_refused_as_by_the_call() -> None:
    x = call()
    with pytest.raises(kdacore.UnsupportedError):
        torch.vmap(lambda q: kdacore.selection_of("chunk_kda", **{**x, "q": q}))(torch.zeros(2, 1, 9, 2, 16))


def test_refusals_do_not_keep_arrays_alive() -> None:
    x = call(g=torch.zeros(1, 9, 2, 3))
    kept = weakref.ref(x["q"])
    for _ in range(3):
        with pytest.raises(kdacore.ContractError):
            kdacore.selection_of("chunk_kda", **x)
    del x
    gc.collect()
    assert kept() is None


def test_options_that_are_no_plain_values_are_not_kept() -> None:
    scale = torch.ones(())
    kept = weakref.ref(scale)
    before = len(selection_queries._answers)
    for _ in range(3):
        with pytest.raises(kdacore.ContractError, match="'scale'"):
            kdacore.selection_of("chunk_kda", **call(scale=scale))
        with pytest.raises(kdacore.ContractError, match="'scale'"):
            kdacore.selection_of("chunk_kda", **call(scale=float("nan")))
    assert len(selection_queries._answers) == before
    del scale
    gc.collect()
    assert kept() is None


def test_answers_are_forgotten_when_the_backends_change() -> None:
    before = kdacore.selection_of("chunk_kda", **call())
    REGISTRY.reset()
    assert not selection_queries._answers and not selection_queries._recent
    assert kdacore.selection_of("chunk_kda", **call()) is not before


def test_asking_does_not_warn_and_leaves_the_warning_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine's CPU were an accelerator."""
    monkeypatch.setattr(selection, "is_slow", lambda selected: True)
    selection.clear()
    x = call(T=21)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kdacore.selection_of("chunk_kda", **x)
    assert not selection._cache
    kdacore.chunk_kda(**x)
    assert selection._cache


def test_a_definition_of_its_own_is_bound_anew() -> None:
    import dataclasses

    from kdacore.ops import Option

    known = OPS["chunk_kda"]
    extended = dataclasses.replace(
        known, option_arguments=(*known.option_arguments, Option("audit", "flag", False))
    )
    assert binder(extended)(*range(5), audit=True)[1][-1] is True
    with pytest.raises(TypeError, match="audit"):
        binder(known)(*range(5), audit=True)


def test_backends_to_prefer_are_given_one_by_one() -> None:
    names: Any = ["cuda", "reference"]
    with pytest.raises(kdacore.ContractError, match="one argument each"), kdacore.use_backend(names):
        pass
