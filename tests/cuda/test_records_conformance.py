"""The conformance suite's cases of records of candidates, whose kernels the CPU emulates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import emulated_backend
import pytest
from emulated_backend import NAME, run_emulated
from jax_emulation import Device
from test_jax_conformance import run_all

from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge
from kdacore.types import ArrayKind

OPS = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule", "commit_records")


@pytest.fixture
def registered() -> Iterator[None]:
    with emulated_backend.registered(*OPS):
        yield


def cases(kind: ArrayKind) -> list[Case]:
    """Calls with records, of heads that there are kernels for; not those of compilers."""
    planned = [c for c in matrix.plan(NAME, device="cpu", kinds=(kind,)).cases if c.op in OPS]
    with_records = [
        c for c in planned if c.pool_use is not None and c.pool_use.records and c.mode in ("eager", "jit")
    ]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=64, V=64)) for c in with_records]
    return [c for c in wide if not judge(c)]


def test_torch(registered: None, emulated: list[str]) -> None:
    found = cases("torch")
    assert {c.op for c in found} == set(OPS)
    for op in OPS:
        kernel = "commit_records" if op == "commit_records" else "record_tokens"
        run_emulated([c for c in found if c.op == op], emulated, kernel)


def test_jax(from_jax: Device) -> None:
    found = cases("jax")
    assert {c.op for c in found} == set(OPS)
    assert {c.mode for c in found} == {"eager", "jit"}
    run_all(found, from_jax)
