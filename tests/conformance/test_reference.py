"""The reference backend passes the quick suite with each array kind."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from kdacore.ops import OPS as DEFINITIONS
from kdacore.registry import REGISTRY
from kdacore.testing.matrix import plan
from kdacore.testing.suite import run_case

OPS = tuple(REGISTRY.get("reference").backend.ops)


@functools.cache
def _plan():  # type: ignore[no-untyped-def]
    return plan("reference")


def _op_and_kind(op: str, kind: str) -> Any:
    """The chunked and recurrent ops with JAX arrays take minutes, as JAX compiles for every case."""
    slow = kind == "jax" and DEFINITIONS[op].family in ("chunk", "recurrent", "decode")
    return pytest.param(op, kind, marks=[pytest.mark.exhaustive] if slow else [])


@pytest.mark.first_cases(9)
@pytest.mark.jax_later
@pytest.mark.parametrize(
    ("op", "kind"), [_op_and_kind(op, kind) for kind in ("numpy", "torch", "jax") for op in OPS]
)
def test_quick_suite(op: str, kind: str) -> None:
    results = [run_case(c) for c in _plan().cases if c.op == op and c.kind == kind]
    failed = [f"{r.case}\n{r.message}" for r in results if r.status == "failed"]
    assert not failed, "\n\n".join(failed)
    status = Counter(r.status for r in results)
    assert status["served"] >= 3
    # Under jit the reference has no values to read; that is the only thing it declines.
    assert {code for r in results for code in r.codes} <= {"traced"}
