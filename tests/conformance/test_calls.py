"""Every option and every optional array of every op can be described, asked about and drawn."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from kdacore import features
from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, shape_dtypes, specs
from kdacore.calls.pools import POOLS
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.cli import call_arguments
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.ops.shapes import AXES, SHAPES
from kdacore.testing.random_cases import CALLS, random_case

NEVER_DRAWN = frozenset({"cp"})
"""Options that need a process group or a mesh: tests/parallel is about them."""
ALWAYS_DERIVED = frozenset({"out"})
"""Arrays that a variation of the suite gives, and no random call."""
NOT_A_FEATURE = frozenset({"scale", "cp", "cu_seqlens_cpu"})
"""What the matrix leaves out: a number that every backend takes, and what the front end deals with itself."""
ARRAYS = ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu", "state_indices",
          "num_accepted_tokens", "out")  # fmt: skip


def test_every_array_has_its_shape_written_once() -> None:
    assert {name for op in OPS.values() for name in op.arrays} == set(SHAPES)
    assert {axis for shape in SHAPES.values() for axis in shape} <= set(AXES)


@pytest.mark.parametrize("op", OPS)
def test_every_option_and_array_is_a_switch(op: str) -> None:
    parser = argparse.ArgumentParser()
    call_arguments.add_arguments(parser, required=False)
    switches = vars(parser.parse_args([]))
    wanted = {*OPS[op].options, *(name for name in ARRAYS if name in OPS[op].arrays)}
    implied = {"A_log", "dt_bias"}  # given where --use-gate-in-kernel asks for the gate
    assert wanted - implied - call_arguments.NOT_SWITCHES <= set(switches)


@pytest.mark.parametrize("family", ["chunk", "recurrent", "gate", "stage"])
def test_every_option_and_array_is_in_the_matrix(family: str) -> None:
    ops = [op for op in OPS if OPS[op].family == family]
    asked: set[str] = set()
    for op in ops:
        for plain in features.plain_calls(op):
            for feature in (f for f in features.FEATURES if f.applies(op)):
                call = plain.changed(**feature.change)
                asked |= set(dict(call.options)) | set(specs(call))
    wanted = {name for op in ops for name in (*OPS[op].options, *OPS[op].arrays)}
    assert wanted - asked <= NOT_A_FEATURE


def test_every_option_and_array_is_drawn() -> None:
    drawn: set[str] = set()
    for calls in CALLS:
        for seed in range(120):
            case = random_case("reference", seed, "cpu", "quick", calls)
            drawn |= set(dict(case.options)) | set(specs(case))
    wanted = {name for op in OPS.values() for name in (*op.options, *op.arrays)}
    assert wanted - drawn == NEVER_DRAWN | ALWAYS_DERIVED


@pytest.mark.parametrize("op", OPS)
def test_arrays_are_as_described(op: str) -> None:
    call = CallDescription(op=op, shape=Shape(1, 9, 1, 2, 8, 12, (4, 0, 5)), seed=3)
    if OPS[op].family == "gate":
        call = replace(call, shape=Shape(2, 9, 1, 2, 8, 12))
    if op == "delta_rule_chunk_state":
        call = replace(call, initial_state=True)
    found = {name: (x.shape, x.dtype.name) for name, x in make_arrays(call).items()}
    assert found == {name: (spec.shape, spec.dtype) for name, spec in specs(call).items()}
    assert found == {name: (x.shape, x.dtype) for name, x in shape_dtypes(call).items()}
    request = request_of(call)
    assert (request.op, request.N) == (op, call.shape.N)
    assert public_function(op).__name__ == op


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_has_the_rows_that_its_indices_name(pool: str) -> None:
    call = CallDescription(op="fused_recurrent_kda", shape=Shape(3, 2, 1, 1, 8, 8), pool=pool)
    x = make_arrays(call)
    assert x["initial_state"].shape[0] == call.state_rows
    assert "state_indices" not in x or np.max(x["state_indices"]) < call.state_rows


def test_an_option_that_the_op_lacks_is_refused() -> None:
    with pytest.raises(ContractError, match="checkpoint_every"):
        request_of(CallDescription(op="fused_recurrent_kda").having(checkpoint_every=64))
