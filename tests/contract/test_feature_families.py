"""The families of features that backends write ``OpImpl.serves`` with."""

from __future__ import annotations

import itertools

import pytest

from kdacore import ops

FAMILIES = {
    "sequence": ops.SEQUENCE_FEATURES,
    "pool": ops.POOL_FEATURES,
    "checkpoint": ops.CHECKPOINT_FEATURES,
    "recurrent": ops.RECURRENT_FEATURES,
}
OF_OP = {
    "chunk_kda": ("sequence", "pool", "checkpoint"),
    "fused_recurrent_kda": ("sequence", "pool", "recurrent"),
}


@pytest.mark.parametrize("op", OF_OP)
def test_the_families_of_an_op_are_features_of_it(op: str) -> None:
    families = [FAMILIES[name] for name in OF_OP[op]]
    assert all(family <= ops.OPS[op].features for family in families)
    assert not [pair for pair in itertools.combinations(families, 2) if pair[0] & pair[1]]


def test_gates_are_among_the_features_of_sequences() -> None:
    assert {f for f in ops.SEQUENCE_FEATURES if f.startswith("gate.")} == ops.GATE_FEATURES


def test_every_stage_has_a_family() -> None:
    assert set(ops.STAGE_FEATURES) == set(ops.STAGES)
    for stage, family in ops.STAGE_FEATURES.items():
        assert family <= ops.OPS[stage].features


def test_a_family_does_not_grow_with_the_ops() -> None:
    """An option that is added to an op must not be served by backends that do not know of it."""
    assert len(ops.SEQUENCE_FEATURES) == 10 and len(ops.POOL_FEATURES) == 6
    assert len(ops.CHECKPOINT_FEATURES) == 2 and len(ops.RECURRENT_FEATURES) == 2
