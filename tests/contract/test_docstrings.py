"""What the public docstrings and the guide say of arrays is what calls accept: shapes, dtypes, and nothing beyond them.

Every array of every op is given each dtype in turn, in a call of float32 and in one of float64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kdacore import api
from kdacore.arrays.specs import ShapeDtype
from kdacore.calls.description import CallDescription, arguments
from kdacore.calls.requests import request_with
from kdacore.errors import ContractError
from kdacore.feature_matrix import FEATURES, plain_calls
from kdacore.ops import OPS

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "calling.md"
PUBLIC = tuple(name for name, op in OPS.items() if op.family != "stage")
FLOATS = ("float32", "bfloat16", "float16", "float64")
DTYPES = (*FLOATS, "int32", "int64", "bool")
WORLDS = ("float32", "float64")
"""dtypes of whole calls."""
FIRST = {"q", "k", "v", "x", "record_update", "record_key", "record_decay"}
"""Arrays that share a dtype, so that none of them can have another by itself."""


def docs_of(op: str) -> dict[str, str]:
    """The description of each array; those without one of their own are described with the next that has one."""
    found: dict[str, str] = {}
    names: list[str] = []
    for argument in OPS[op].array_arguments:
        names.append(argument.name)
        if argument.doc:
            found.update(dict.fromkeys(names, argument.doc))
            names = []
    assert not names
    return found


def claimed(doc: str, world: str, given: dict[str, Any]) -> set[str]:
    """The dtypes that a description allows in a call of float32 or float64."""
    for name in re.findall(r"\bdtype of (?:``)?(\w+)|\b(\w)'s dtype", doc):
        return {given[next(filter(None, name))].dtype}
    if "the dtypes of ``initial_state``, the same where both are given" in doc:
        own = {given["initial_state"].dtype} if "initial_state" in given else set()
        return own or claimed(docs_of("chunk_kda")["initial_state"], world, given)
    allowed: set[str] = set()
    if "any float dtype" in doc:
        allowed |= set(FLOATS)
    if "float32, bfloat16 or float16" in doc:
        allowed |= set(FLOATS[:3]) if world == "float32" else {"float64", *FLOATS[:3]}
    elif "float64 is taken too" in doc:
        allowed |= {"float32", "float64"}
    elif "float32 (float64 in calls of float64)" in doc or "all float32 or all float64" in doc:
        allowed.add(world)
    if "int32 or int64" in doc:
        allowed |= {"int32", "int64"}
    if re.search(r"\bbool\b", doc):
        allowed.add("bool")
    return allowed


@cache
def _calls(op: str, world: str) -> tuple[dict[str, Any], ...]:
    """Arguments of valid calls of an op that together give every array."""
    dtypes = dict.fromkeys(("dtype", "gate_dtype", "beta_dtype", "state_dtype"), world)
    plain = plain_calls(op)[0].changed(kind="numpy", device="cpu", arch="", **dtypes)
    calls: list[CallDescription] = [plain]
    for feature in FEATURES:
        if feature.applies(op) and "numpy" in feature.kinds:
            calls.append(plain.changed(**{**feature.change, **dtypes}))
    found = []
    for call in calls:
        try:
            given = arguments(call.changed(requires_grad=False))
            request_with(op, given)
        except ContractError:  # a combination of float64 with what has none
            continue
        found.append(given)
    return tuple(found)


def _given(op: str, world: str, name: str) -> dict[str, Any]:
    """The first of these calls that gives an array."""
    return next(given for given in _calls(op, world) if name in given)


def _with_dtype(given: dict[str, Any], name: str, dtype: str) -> dict[str, Any]:
    x = given[name]
    return {**given, name: ShapeDtype(x.shape, dtype, x.device, x.kind)}


def _accepted(op: str, world: str, name: str) -> Iterator[str]:
    for dtype in DTYPES:
        given = _with_dtype(_given(op, world, name), name, dtype)
        try:
            request_with(op, given)
        except ContractError:
            continue
        yield dtype


CASES = [(op, name) for op in PUBLIC for name in OPS[op].arrays if name != "cu_seqlens_cpu"]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op}-{name}" for op, name in CASES])
def test_dtypes_are_those_that_calls_accept(op: str, name: str) -> None:
    doc = docs_of(op)[name]
    for world in WORLDS:
        given = _given(op, world, name)
        allowed = {world} if name in FIRST else claimed(doc, world, given)
        assert set(_accepted(op, world, name)) == allowed, f"in a call of {world}: {doc}"


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op}-{name}" for op, name in CASES])
def test_shapes_are_those_of_calls(op: str, name: str) -> None:
    """Each letter is one size wherever it stands in a call, and one of the shapes that are given is the array's."""
    if name.startswith("record_") and name != "record_indices":
        return  # a tuple, whose shapes are named together
    given = _given(op, "float32", name)
    request = request_with(op, given)
    sizes: dict[str, int] = {
        letter: getattr(request, letter) for letter in ("B", "T", "H", "HV", "K", "V", "N")
    }
    sizes |= {"N+1": request.N + 1, "HV*K": request.HV * request.K}
    if name == "conv_windows":  # of as many tokens as a call may have, this one or another
        del sizes["T"]
    shapes = [s.split(", ") for s in re.findall(r"``\[([^\]`]+)\]``", docs_of(op)[name])]
    fitting = [s for s in shapes if _fits(s, given[name].shape, sizes)]
    assert fitting, f"{given[name].shape} is none of {shapes}"


def _fits(letters: list[str], shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    if len(letters) != len(shape):
        return False
    return all(sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True))


@pytest.mark.parametrize("op", PUBLIC)
def test_the_docstring_has_every_description_or_names_the_function_that_has(op: str) -> None:
    """The docstrings are written from the definitions: what is tested above stands in them."""
    text = " ".join((getattr(api, op).__doc__ or "").split())
    there = [name for name, doc in docs_of(op).items() if " ".join(doc.split()) in text]
    if len(there) < len(OPS[op].arrays):
        assert re.search(r":func:`\w+`", text)
    assert there or ":func:`" in text
    assert "``" in text and "Args:" in text


def test_the_table_of_the_guide() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    lines = page[page.index("| argument | dtype |") :].splitlines()[2:]
    rows = [line.split("|")[1:3] for line in lines[: lines.index("")]]
    listed = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    for name in ("g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
        for world in WORLDS:
            allowed = claimed(listed[name], world, _given("chunk_kda", world, name))
            assert set(_accepted("chunk_kda", world, name)) == allowed, (name, world)
