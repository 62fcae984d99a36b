"""Every option and every optional array of every op can be described, asked about and drawn."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from kdacore import feature_matrix
from kdacore.api import public_function
from kdacore.calls import description
from kdacore.calls.arrays import host_values, make_arrays, rows_of
from kdacore.calls.description import CallDescription, shape_dtypes, specs
from kdacore.calls.pools import POOLS
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.cli import call_arguments
from kdacore.contract.values import check_state_rows
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.ops.shapes import AXES, SHAPES
from kdacore.testing.random_cases import CALLS, random_case

pytestmark = pytest.mark.quick

NEVER_DRAWN = frozenset({"cp"})
"""Options that need a process group or a mesh: tests/parallel is about them."""
NOT_A_FEATURE = frozenset({"scale", "cp", "cu_seqlens_cpu"})
"""What the matrix leaves out: a number that every backend takes, and what the front end deals with itself."""


def test_every_array_has_its_shape_written_once() -> None:
    assert {name for op in OPS.values() for name in op.arrays} == set(SHAPES)
    assert {axis for shape in SHAPES.values() for axis in shape} <= set(AXES)


@pytest.mark.parametrize("op", OPS)
def test_every_option_and_array_is_a_switch(op: str) -> None:
    parser = argparse.ArgumentParser()
    call_arguments.add_arguments(parser, required=False)
    switches = vars(parser.parse_args([]))
    optional = [name for name in description.OPTIONAL_ARRAYS if name in OPS[op].arrays]
    wanted = {*OPS[op].options, *optional}
    # Given where --use-gate-in-kernel asks for the gate, beside --checkpoint-offsets, and with --records.
    implied = {"A_log", "dt_bias", "checkpoint_indices"}
    implied |= {a.name for a in OPS[op].array_arguments if a.feature == "records" or a.part_of}
    implied |= {"record_indices", "num_replayed"}
    assert wanted - implied - call_arguments.NOT_SWITCHES <= set(switches)


@pytest.mark.parametrize("family", ["chunk", "recurrent", "decode", "commit", "gate", "stage"])
def test_every_option_and_array_is_in_the_matrix(family: str) -> None:
    ops = [op for op in OPS if OPS[op].family == family]
    asked: set[str] = set()
    for op in ops:
        for plain in feature_matrix.plain_calls(op):
            for feature in (f for f in feature_matrix.FEATURES if f.applies(op)):
                call = plain.changed(**feature.change)
                asked |= set(dict(call.options)) | set(specs(call))
    wanted = {name for op in ops for name in (*OPS[op].options, *OPS[op].arrays)}
    assert wanted - asked <= NOT_A_FEATURE


def test_every_option_and_array_is_drawn() -> None:
    drawn: set[str] = set()
    for calls in CALLS:
        for seed in range(160):
            case = random_case("reference", seed, "cpu", "quick", calls)
            drawn |= set(dict(case.options)) | set(specs(case))
    wanted = {name for op in OPS.values() for name in (*op.options, *op.arrays)}
    assert wanted - drawn == NEVER_DRAWN


@pytest.mark.parametrize("op", OPS)
def test_arrays_are_as_described(op: str) -> None:
    call = CallDescription(op=op, shape=Shape(1, 11, 1, 2, 8, 12, (4, 0, 5), 2), seed=3)
    if OPS[op].family in ("commit", "decode", "gate"):
        call = replace(call, shape=Shape(2, 9, 1, 2, 8, 12))
    if op == "delta_rule_chunk_state":
        call = replace(call, initial_state=True)
    found = {name: (x.shape, x.dtype.name) for name, x in make_arrays(call).items()}
    assert found == {name: (spec.shape, spec.dtype) for name, spec in specs(call).items()}
    assert found == {name: (x.shape, x.dtype) for name, x in shape_dtypes(call).items()}
    request = request_of(call)
    assert (request.op, request.N) == (op, call.shape.N)
    assert public_function(op).__name__ == op


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_is_a_call_that_the_contract_allows(pool: str, seed: int) -> None:
    """Each index within its pool, each row written once and by nobody else read; what is not read is NaN."""
    use = POOLS[pool]
    op = "fused_recurrent_kda" if use.suits("recurrent") else "chunk_kda"
    lengths = (3, 2, 0, 4) if use.suits("recurrent") else (17, 70, 0, 33)
    shape = Shape(1, sum(lengths) + 2, 1, 1, 8, 8, lengths, 2)
    call = CallDescription(op=op, shape=shape, pool=pool, seed=seed).having(**use.options)
    values = host_values(call)
    check_state_rows(request_of(call), {**values, "cu_seqlens": np.cumsum([0, *lengths])}, np.array(lengths))
    rows = rows_of(call, values)
    assert rows.padding.any() == (use.negatives or (use.null and use.indices > 0))
    read = np.zeros(call.state_rows, bool)
    read[rows.read[rows.read >= 0]] = True
    if use.reads:
        np.testing.assert_array_equal(np.isfinite(values["initial_state"]).all((1, 2, 3)), read)
    assert {n for n in specs(call) if call.gives(n)} == set(values)
    assert (
        np.isnan(values["q"][:, sum(lengths) :]).all() and np.isfinite(values["q"][:, : sum(lengths)]).all()
    )
    checkpoints = values.get("checkpoint_offsets")
    assert checkpoints is None or len(checkpoints) == 2 * len(lengths) + 1


def test_an_option_that_the_op_lacks_is_refused() -> None:
    with pytest.raises(ContractError, match="checkpoint_every"):
        request_of(CallDescription(op="fused_recurrent_kda").having(checkpoint_every=64))
