"""A ``cuda`` backend for CPU tensors whose kernels the CPU emulates, for the conformance suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kdacore_cuda
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge
from kdacore.testing.suite import run_case
from kdacore.types import ArrayKind, Backend, Device, OpImpl, Request, SliceFunctions

NAME = "emulated"
HOPPER = Device("cuda", 0, "sm_90")


def on_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a request from there. The same object for the same request: plans are found by identity."""
    there: dict[int, tuple[Request, Request]] = {}

    def call(request: Request, *rest: Any) -> Any:
        found = there.get(id(request))
        if found is None or found[0] is not request:
            there[id(request)] = found = (request, dataclasses.replace(request, device=HOPPER))
        return function(found[1], *rest)

    return call


def slices_on_hopper(
    slices: Callable[[Request], SliceFunctions | None],
) -> Callable[..., SliceFunctions | None]:
    """The functions for slices of a request from there."""

    def functions(request: Request) -> SliceFunctions | None:
        found = on_hopper(slices)(request)
        return None if found is None else SliceFunctions(*(on_hopper(f) if callable(f) else f for f in found))

    return functions


def _moved(op: OpImpl) -> OpImpl:
    functions = {
        name: getattr(op, name) for name in ("forward", "backward", "fast_path", "fast_gradients", "form")
    }
    return dataclasses.replace(
        op,
        **{name: on_hopper(f) for name, f in functions.items() if f is not None},
        slices=None if op.slices is None else slices_on_hopper(op.slices),
        verifiers=tuple(on_hopper(v) for v in op.verifiers),
        verified_archs=frozenset({"*"}),
    )


def emulated_backend(*ops: str, kind: ArrayKind = "torch") -> Backend:
    """These ops of the cuda backend for CPU arrays of one kind."""
    real = kdacore_cuda.make_backend()
    moved = {name: _moved(real.ops[name]) for name in ops}
    return dataclasses.replace(
        real, name=NAME, kinds=(kind,), ops=moved, device_types=("cpu",), requirements=(), rank=-1
    )


class Plugin:
    def __init__(self, *ops: str, kind: ArrayKind = "torch") -> None:
        self.ops, self.kind = ops or ("chunk_kda",), kind

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        return [emulated_backend(*self.ops, kind=self.kind)]


@contextmanager
def registered(*ops: str) -> Iterator[None]:
    """The backend with these ops of torch arrays (``chunk_kda``) can be chosen inside."""
    REGISTRY.register(Plugin(*ops), NAME)
    try:
        yield
    finally:
        REGISTRY.reset()


def wide_inference_cases(op: str = "chunk_kda") -> list[Case]:
    """The suite's eager cases of an op without gradients, with K = V = 128, that the registered backend serves."""
    cases = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    plain = [c for c in cases if c.op == op and c.check not in matrix.DIFFERENTIATES and c.mode == "eager"]
    served = [c for c in plain if not judge(c)]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=128, V=128)) for c in served]
    return [c for c in wide if not judge(c)]


def dense_inference_cases() -> list[Case]:
    """Those of them without packs and pools."""
    return [c for c in wide_inference_cases() if not (c.shape.lengths or c.pool)]


def run_emulated(cases: list[Case], launched: list[str], kernel: str) -> None:
    """All are served within their bounds, each by launches among which is one of ``kernel``."""
    assert cases
    for case in cases:
        launched.clear()
        result = run_case(case)
        assert result.status == "served", f"{case.id}\n{result.message}"
        assert any(name.startswith(kernel) for name in launched), case.id
