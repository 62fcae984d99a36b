"""The conformance suite's cases of records of candidates, whose kernels the CPU emulates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import emulated_backend
import pytest
from emulated_backend import NAME, run_emulated

from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge

OPS = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule", "commit_records")


@pytest.fixture
def registered() -> Iterator[None]:
    with emulated_backend.registered(*OPS):
        yield


def cases() -> list[Case]:
    """Eager calls with records, of heads that there are kernels for."""
    planned = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    with_records = [c for c in planned if c.pool_use is not None and c.pool_use.records and c.mode == "eager"]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=64, V=64)) for c in with_records]
    return [c for c in wide if not judge(c)]


def test_every_case(registered: None, emulated: list[str]) -> None:
    found = cases()
    assert {c.op for c in found} == set(OPS)
    for op in OPS:
        run_emulated(
            [c for c in found if c.op == op], emulated, "commit_records" if op == OPS[2] else "recurrent"
        )
