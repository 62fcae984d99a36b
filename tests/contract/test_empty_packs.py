"""Packs in which some or all sequences are empty: every op, whole and in stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdacore.api import public_function
from kdacore.calls.arrays import make_arrays
from kdacore.calls.description import CallDescription, options
from kdacore.calls.values import Shape
from kdacore.ops import OPS

KINDS = ("numpy", "torch", pytest.param("jax", marks=pytest.mark.exhaustive))
LENGTHS = ((0,), (0, 0, 0), (3, 0, 0), (0, 5))


def _flat(results: Any) -> list[np.ndarray]:
    whole = results if isinstance(results, tuple) else (results,)
    return [np.asarray(x) for x in whole if x is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [op for op, opdef in OPS.items() if opdef.family == "stage"])
def test_stages(op: str, kind: Any) -> None:
    for lengths in LENGTHS:
        for chunk in (16, 64):
            shape = Shape(B=1, T=6, H=1, HV=2, K=8, V=8, lengths=lengths)
            shape = (
                shape
                if op != "delta_rule_chunk_state"
                else Shape(B=1, T=6, H=2, HV=2, K=8, V=8, lengths=lengths)
            )
            call = CallDescription(
                op=op, kind=kind, shape=shape, initial_state=op == "delta_rule_chunk_state",
                options=options(chunk_size=chunk),
            )  # fmt: skip
            arrays = make_arrays(call)
            found = _flat(public_function(op)(**arrays, chunk_size=chunk, backend="reference"))
            tokens = found[1:2] if op == "delta_rule_chunk_state" else found
            assert all(np.isfinite(x).all() for x in found)
            assert all(not x[:, sum(lengths) :].any() for x in tokens)
            if sum(lengths):
                assert all(x[:, : sum(lengths)].any() for x in tokens)
            if op == "delta_rule_chunk_state":
                for n, length in enumerate(lengths):
                    same = found[2][n] == np.asarray(arrays["initial_state"])[n]
                    assert same.all() or length


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule"])
def test_whole_ops(op: str, kind: Any) -> None:
    for lengths in LENGTHS:
        shape = Shape(B=1, T=6, H=1, HV=2, K=8, V=8, lengths=lengths)
        call = CallDescription(op=op, kind=kind, shape=shape, initial_state=True)
        arrays = make_arrays(call)
        o, state = _flat(public_function(op)(**arrays, output_final_state=True, backend="reference"))
        assert not o[:, sum(lengths) :].any()
        for n, length in enumerate(lengths):
            assert (state[n] == np.asarray(arrays["initial_state"])[n]).all() or length
