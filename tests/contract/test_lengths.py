"""Requests of calls that differ in lengths alone are those that validation makes, and wrong shapes go to validation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kdacore.acceleration.requests import RequestsLike, has_families
from kdacore.calls.description import CallDescription, arguments
from kdacore.calls.pools import POOLS
from kdacore.calls.requests import request_of, request_with
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.ops.shapes import LENGTH_AXES, SHAPES
from kdacore.testing.random_cases import random_case
from kdacore.types import Request, family_of, lengths_of

SEEDS = range(150)


def calls_of(seed: int) -> list[CallDescription]:
    """A random call of a whole op, in some of the ways of using pools, and the same with other lengths."""
    rng = np.random.default_rng(seed)
    drawn = random_case("reference", seed, "cpu", only=("torch",))
    suited = [name for name, pool in POOLS.items() if pool.suits(drawn.family)]
    if drawn.family != "gate" and seed % 2:
        drawn = drawn.changed(pool=str(rng.choice(suited)), initial_state=False, requires_grad=False)
    found: list[CallDescription] = [drawn]
    for _ in range(3):
        if drawn.shape.lengths:
            lengths = tuple(int(n) for n in rng.integers(1, 15, rng.integers(1, 6)))
            padding = int(rng.integers(0, 4))
            sizes = {"lengths": lengths, "padding": padding, "T": sum(lengths) + padding}
        else:
            sizes = {"B": int(rng.integers(1, 4)), "T": int(rng.integers(1, 15))}
        found.append(drawn.changed(**sizes, pool_rows=0, write_pool_rows=0))
    return found


def valid(call: CallDescription) -> Request | None:
    try:
        return request_of(call)
    except ContractError:
        return None


def shapes_of(request: Request) -> tuple[tuple[int, ...], ...]:
    return tuple([spec.shape for _, spec in request.tensors])


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_of_other_lengths_are_those_of_validation(seed: int) -> None:
    calls = [(call, request) for call in calls_of(seed) if (request := valid(call)) is not None]
    for _, request in calls:
        like = RequestsLike(request)
        for _, other in calls:
            made = like(shapes_of(other))
            if made is None:  # another number of axes of an index array, say: validation decides
                assert family_of(request) != family_of(other)
            elif family_of(request) == family_of(other):
                assert made == other and type(made) is Request
                assert lengths_of(made) == lengths_of(other)


def test_most_draws_have_families() -> None:
    pairs = 0
    for seed in SEEDS:
        requests = [request for call in calls_of(seed) if (request := valid(call)) is not None]
        pairs += sum(family_of(a) == family_of(b) and a != b for a in requests for b in requests)
    assert pairs > 3 * len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_shapes_are_left_to_validation(seed: int) -> None:
    """Whatever shapes there are: a request that is made without validation is that of validation."""
    rng = np.random.default_rng(seed)
    call = calls_of(seed)[0]
    request = valid(call)
    if request is None:
        return
    like, given = RequestsLike(request), arguments(call)
    names = [name for name, _ in request.tensors]
    for _ in range(40):
        shapes = {name: list(spec.shape) for name, spec in request.tensors}
        for name in rng.choice(names, int(rng.integers(1, 4))):
            if shapes[name]:
                axis = int(rng.integers(len(shapes[name])))
                shapes[name][axis] = max(0, shapes[name][axis] + int(rng.integers(-2, 3)))
        made = like(tuple([tuple(shapes[name]) for name in names]))
        if made is not None:
            changed = {name: dataclasses.replace(given[name], shape=tuple(shapes[name])) for name in names}
            assert made == request_with(call.op, {**given, **changed}, needs_grad=call.requires_grad)


def test_each_axis_alone() -> None:
    """Every axis of every array, one longer and one shorter, in calls that use everything."""
    shape = {"B": 1, "T": 12, "H": 1, "HV": 2, "lengths": (5, 7), "K": 16, "V": 8}
    ops = {"chunk_kda": "chunk", "fused_recurrent_kda": "recurrent", "fused_decode_kda": "decode"}
    for op, family in ops.items():
        for name, pool in POOLS.items():
            if not pool.suits(family):
                continue
            plain = CallDescription(op=op, kind="torch", host_offsets=True, out=True)
            call = plain.changed(
                **shape, pool=name, **{k: v for k, v in pool.options.items() if v is not None}
            )
            request, given = request_of(call), arguments(call)
            like, names = RequestsLike(request), [n for n, _ in request.tensors]
            for i, changed in enumerate(names):
                for axis in range(len(request.spec(changed).shape)):
                    for step in (-1, 1):
                        shapes = [list(spec.shape) for _, spec in request.tensors]
                        shapes[i][axis] += step
                        made = like(tuple(map(tuple, shapes)))
                        if made is not None:
                            replaced = dataclasses.replace(given[changed], shape=tuple(shapes[i]))
                            assert made == request_with(op, {**given, changed: replaced})


@pytest.mark.parametrize("change", [{"B": 2}, {"B": 0}, {"T": 0}], ids=repr)
def test_sizes_that_all_arrays_share(change: dict[str, int]) -> None:
    """A pack has one row, with checkpoints at chosen tokens too, and no size is 0."""
    shape = {"B": 1, "T": 12, "H": 1, "HV": 2, "lengths": (5, 7), "K": 16, "V": 8}
    pools = POOLS["checkpoints"].options
    packs = [CallDescription(kind="torch").changed(**shape)]
    packs.append(packs[0].changed(pool="checkpoints", **{k: v for k, v in pools.items() if v is not None}))
    dense = packs[1].changed(lengths=(), checkpoint_count=3)
    for call in (*packs, dense):
        like = RequestsLike(request_of(call))
        sizes = {"B": 1, "T": 12, **change}
        shapes = []
        for name, spec in request_of(call).tensors:
            if SHAPES[name][:2] == ("B", "T"):
                shapes.append((sizes["B"], sizes["T"], *spec.shape[2:]))
            elif SHAPES[name][0] == "N" and not call.shape.lengths:
                shapes.append((sizes["B"], *spec.shape[1:]))
            else:
                shapes.append(spec.shape)
        assert like(tuple(shapes)) is None


def test_a_family_is_all_but_lengths() -> None:
    call = CallDescription(kind="torch").changed(T=12, lengths=(5, 7), pool="inplace", inplace_state=True)
    own = family_of(request_of(call))
    assert family_of(request_of(call.changed(T=9, lengths=(2, 3, 4), pool_rows=40))) == own
    others: list[dict[str, Any]] = [
        {"K": 32},
        {"HV": 2},
        {"dtype": "bfloat16"},
        {"index_dtype": "int32"},
        {"scale": 0.5},
        {"state_v_first": True},
        {"pool": "fresh"},
    ]
    for change in others:
        assert family_of(request_of(call.changed(**change))) != own, change


def test_stages_and_traced_calls_have_none() -> None:
    assert has_families(request_of(CallDescription()))
    assert not has_families(request_of(CallDescription(kind="jax", traced=True)))
    assert not has_families(request_of(CallDescription(op="kda_chunk_intra")))


def test_every_argument_has_its_lengths_in_front() -> None:
    for opdef in OPS.values():
        for name in opdef.arrays:
            assert name in LENGTH_AXES
    assert LENGTH_AXES["q"] == 2 and LENGTH_AXES["initial_state"] == 1 and LENGTH_AXES["A_log"] == 0
