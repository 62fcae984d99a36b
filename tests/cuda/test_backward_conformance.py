"""The conformance suite's gradient cases, on a ``cuda`` backend whose kernels the CPU emulates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.signature import judge
from kdacore.testing.suite import run_case
from kdacore.types import Backend, Device, Request
from kdacore_cuda import plugin

NAME = "emulated"
HOPPER = Device("cuda", 0, "sm_90")
QUICK = (
    "chunk_kda-gradients-collinear",  # kg in one part: dv beyond its bound
    "chunk_kda-gradient_causality-base",  # running sums made as a later one less its own term
)
"""Cases that something failed once; the others are run with the exhaustive tests."""


def on_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a request from there. The same object for the same request: plans are found by identity."""
    there: dict[int, tuple[Request, Request]] = {}

    def call(request: Request, *rest: Any) -> Any:
        found = there.get(id(request))
        if found is None or found[0] is not request:
            there[id(request)] = found = (request, dataclasses.replace(request, device=HOPPER))
        return function(found[1], *rest)

    return call


def emulated_backend() -> Backend:
    """``chunk_kda`` of the cuda backend for CPU tensors."""
    real = plugin.make_backend()
    op = real.ops["chunk_kda"]
    assert op.backward is not None
    moved = dataclasses.replace(
        op,
        forward=on_hopper(op.forward),
        backward=on_hopper(op.backward),
        verifiers=tuple(on_hopper(v) for v in op.verifiers),
        verified_archs=frozenset({"*"}),
    )
    ops = {"chunk_kda": moved}
    return dataclasses.replace(real, name=NAME, ops=ops, device_types=("cpu",), requirements=(), rank=-1)


class Plugin:
    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        return [emulated_backend()]


@pytest.fixture
def registered() -> Iterator[None]:
    REGISTRY.register(Plugin(), NAME)
    yield
    REGISTRY.reset()


def served() -> list[Case]:
    cases = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    wanted = [c for c in cases if c.check in matrix.DIFFERENTIATES and c.mode == "eager"]
    return [c for c in wanted if not judge(c)]


def run(cases: list[Case], launched: list[str]) -> None:
    assert cases
    for case in cases:
        launched.clear()
        result = run_case(case)
        assert result.status == "served", f"{case.id}\n{result.message}"
        assert any(name.startswith("grads") for name in launched)


def test_cases_that_failed_once(emulated: list[str], registered: None) -> None:
    cases = [c for c in served() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run(cases, emulated)


@pytest.mark.exhaustive
def test_every_case(emulated: list[str], registered: None) -> None:
    cases = served()
    assert len(cases) > 25
    run(cases, emulated)
