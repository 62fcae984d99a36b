"""Options and features: a backend is given a call only if it lists every feature that the call uses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import ops, stages
from kdacore.arrays.numpy import NUMPY
from kdacore.dispatch import call as dispatch
from kdacore.ops import OPS, OpDef, Option, foreign_keywords
from kdacore.parallel import call as parallel_call
from kdacore.registry import REGISTRY
from kdacore.types import Backend

BACKENDS = ("reference", "triton", "cuda", "xla", "pallas")


def public(op: str) -> Any:
    return getattr(kdacore, op, None) or getattr(stages, op)


def call() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 9, 2, 16), dtype=np.float32) for _ in range(3))
    g, beta = -rng.random((1, 9, 2, 16), dtype=np.float32), rng.random((1, 9, 2), dtype=np.float32)
    return (q, k, v, g, beta, *[None] * (len(OPS["chunk_kda"].arrays) - 5))


@pytest.fixture
def chunk_with_a_new_option(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpDef]:
    """``chunk_kda`` with an option that did not exist when the backends were written."""
    known = OPS["chunk_kda"]
    new = Option("window", "count", None, feature="window")
    definition = dataclasses.replace(known, option_arguments=(*known.option_arguments, new))
    monkeypatch.setitem(ops.OPS, "chunk_kda", definition)
    # Calls made so far are recognised by the options that there were.
    monkeypatch.setattr(NUMPY, "seen_calls", None)
    yield definition


@pytest.fixture
def example_plugin(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Iterator[Backend]:
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "examples" / "plugin"))
    from kdacore_example import plugin

    REGISTRY.register(plugin, "example plugin")
    yield plugin.make_backend()
    REGISTRY.unregister("example plugin")


def options(definition: OpDef, **changed: Any) -> tuple[Any, ...]:
    return tuple({**definition.defaults, **changed}.values())


def test_every_backend_declines_an_option_it_does_not_know(
    chunk_with_a_new_option: OpDef, example_plugin: Backend
) -> None:
    definition = chunk_with_a_new_option
    inputs = definition.inputs(*call())
    found = dispatch.explain(definition, inputs, options(definition, window=64))
    assert not found.backend and found.request.option("window") == 64
    reasons = {c.backend: {r.code: r for r in c.reasons} for c in found.candidates}
    assert set(reasons) == {*BACKENDS, "example"}
    for name, why in reasons.items():
        assert "window" in why["option"].message, name
    with pytest.raises(kdacore.UnsupportedError, match="does not serve window"):
        dispatch.call(definition, call(), options(definition, window=64))


def test_an_option_left_at_its_default_changes_nothing(chunk_with_a_new_option: OpDef) -> None:
    definition = chunk_with_a_new_option
    o = dispatch.call(definition, call(), options(definition)).o
    np.testing.assert_array_equal(o, kdacore.chunk_kda(*call()[:5])[0])
    found = dispatch.explain(definition, definition.inputs(*call()), options(definition))
    assert found.backend == "reference" and found.request.options == ()


def test_a_new_option_is_checked_by_its_definition(chunk_with_a_new_option: OpDef) -> None:
    definition = chunk_with_a_new_option
    with pytest.raises(kdacore.ContractError, match="'window': got str 'wide'; wanted an integer"):
        dispatch.call(definition, call(), options(definition, window="wide"))


@pytest.mark.parametrize("op", OPS)
def test_public_signatures_are_those_of_the_definitions(op: str) -> None:
    definition, parameters = OPS[op], inspect.signature(public(op)).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arrays = {a.part_of or a.name: a.required for a in definition.array_arguments}
    assert set(named) == {*arrays, *definition.options, "backend"}
    for name, parameter in named.items():
        required = arrays.get(name, False)
        kind = parameter.POSITIONAL_OR_KEYWORD if required else parameter.KEYWORD_ONLY
        assert parameter.kind is kind, name
        assert parameter.default == (parameter.empty if required else definition.defaults.get(name)), name
    wanted = [name for name, required in arrays.items() if required]
    assert list(parameters)[: len(wanted)] == wanted


WHOLE_OPS = [op for op, definition in OPS.items() if definition.family in ("chunk", "recurrent")]


@pytest.mark.parametrize("op", [*WHOLE_OPS, "kda_gate"])
def test_unknown_keywords_are_type_errors(op: str) -> None:
    arguments = [None] * len(OPS[op].required)
    asks: tuple[Any, ...] = (
        public(op),
        lambda *args, **kwargs: kdacore.explain(op, *args, **kwargs),
        lambda *args, **kwargs: kdacore.selection_of(op, *args, **kwargs),
    )
    for ask in asks:
        with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument 'audits'"):
            ask(*arguments, audits=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ssm_state_indices", "state_indices"),
        ("inplace_final_state", "inplace_state"),
        ("transpose_state_layout", "state_v_first"),
        ("initial_state_source", "initial_state"),
        ("pad_slot_id", "null_index"),
    ],
)
@pytest.mark.parametrize("op", WHOLE_OPS)
def test_keywords_of_other_libraries_are_type_errors_that_name_ours(op: str, theirs: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"'{theirs}': kdacore's name is '{ours}'"):
        public(op)(*[None] * 5, **{theirs: None})


def test_names_are_given_only_where_the_op_has_them() -> None:
    with pytest.raises(TypeError, match="'cp_context': kdacore's name is 'cp'"):
        kdacore.chunk_kda(*[None] * 5, cp_context=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="argument 'cp_context'$"):
        kdacore.fused_recurrent_kda(*[None] * 5, cp_context=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'head_first': arrays are"):
        kdacore.chunk_kda(*[None] * 5, head_first=False)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'use_graph'.*; .*'max_num_seqs'"):
        kdacore.chunk_kda(*[None] * 5, use_graph=True, max_num_seqs=1)  # type: ignore[call-overload]


def test_the_names_given_exist() -> None:
    names = {name for definition in OPS.values() for name in (*definition.arrays, *definition.options)}
    assert set(foreign_keywords._OURS.values()) <= names
    # These are names of other ops alone.
    assert not (set(foreign_keywords._OURS) | set(foreign_keywords._WITHOUT_COUNTERPART)) & names - {
        "chunk_size",
        "cp",
    }


@pytest.mark.parametrize("op", OPS)
def test_arguments_travel_in_the_order_of_the_definitions(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = OPS[op]
    marks = {name: f"<{name}>" for name in (*definition.arrays, *definition.options)}
    seen: list[Any] = []

    def record(opdef: OpDef, arrays: Any, values: Any, backend: Any) -> tuple[None, None, None]:
        seen.extend((opdef, arrays, values, backend))
        return None, None, None

    monkeypatch.setattr(dispatch, "call", record)
    monkeypatch.setattr(parallel_call, "call", record)
    public(op)(**definition.keywords(marks), backend="<backend>")
    assert seen[0] is definition and seen[3] == "<backend>"
    assert tuple(seen[1]) == tuple(marks[n] for n in definition.arrays)
    assert tuple(seen[2]) == tuple(marks[n] for n in definition.options)


@pytest.mark.parametrize("op", OPS)
def test_the_named_tuple_has_the_arrays_of_the_definition(op: str) -> None:
    definition = OPS[op]
    assert definition.inputs._fields == definition.arrays  # type: ignore[attr-defined]
    optional = set(definition.inputs._field_defaults)  # type: ignore[attr-defined]
    assert optional == set(definition.arrays) - set(definition.required)


def test_our_backends_list_features_that_exist() -> None:
    for registered in REGISTRY.backends().values():
        for op, impl in registered.backend.ops.items():
            assert impl.serves <= OPS[op].features, (registered.backend.name, op)


def test_the_reference_serves_every_feature() -> None:
    for op, impl in REGISTRY.get("reference").backend.ops.items():
        assert impl.serves == OPS[op].features - _NOT_IN_USE.get(op, set()), op


_NOT_IN_USE: dict[str, set[str]] = {
    # These have as many value heads as heads of q and k, by their shapes.
    "kda_gate": {"grouped_value_heads"},
    "kda_chunk_gate": {"grouped_value_heads"},
    "delta_rule_chunk_state": {"grouped_value_heads"},
}
