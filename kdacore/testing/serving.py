"""Does a backend serve a case? Its own verifiers are asked, about shapes and dtypes alone."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace

from kdacore import device as probes
from kdacore.calls import requests
from kdacore.dispatch import plan, selection
from kdacore.registry import REGISTRY
from kdacore.testing.cases import DIFFERENTIATES, Case
from kdacore.testing.derived_calls import parts_of
from kdacore.testing.faults import wants_gradients
from kdacore.types import ArrayKind, Device, Reason, Request


@functools.cache
def device_of(kind: ArrayKind, name: str) -> Device:
    """The :class:`Device` that arrays of this kind on this device have."""
    if kind == "torch":
        import torch

        return probes.torch_device(torch.device(name).type, 0)
    if kind == "jax":
        import jax

        return probes.jax_device(jax.devices(name)[0])
    return Device(name)


def request_of(case: Case) -> Request:
    """The request the case's call becomes. ContractError when the case itself breaks the contract."""
    where = device_of(case.kind, case.device)
    on = f"{where.type}:{where.index}".removesuffix(":0")
    traced, grad = _is_traced(case), needs_grad(case)
    return requests.request_of(replace(case, device=on, arch=where.arch, requires_grad=grad, traced=traced))


def needs_grad(case: Case) -> bool:
    """Does the case's call have to be differentiable? A traced one might be, as far as its op and options allow."""
    if case.kind == "jax" and case.mode == "jit":
        return case.family not in ("stage", "commit", "decode") and not case.pool
    return case.check in DIFFERENTIATES or wants_gradients(case)


def _is_traced(case: Case) -> bool:
    """``jax.jit`` traces and so does ``jax.vjp``; a backend that cannot be traced is differentiated directly."""
    joined = case.check in DIFFERENTIATES and REGISTRY.get(case.backend).backend.traceable
    return case.kind == "jax" and (case.mode == "jit" or joined)


def judge(case: Case) -> tuple[Reason, ...]:
    """The backend's own answer: its reasons against the first call of the case it declines, none when it serves all."""
    for part in parts_of(case):
        reasons = _reasons(part)
        if reasons:
            return reasons
    return ()


def _reasons(case: Case) -> tuple[Reason, ...]:
    registered, request = REGISTRY.get(case.backend), request_of(case)
    reasons = selection.judge(registered, request).reasons
    differentiated = case.check in DIFFERENTIATES or case.family == "gate"
    if differentiated or not plan.lacks_backward_only(reasons):
        return reasons
    # Dispatch runs a traced call on a backend without a backward as long as no gradient is taken.
    return selection.judge(registered, replace(request, needs_grad=False)).reasons


def frameworks() -> tuple[ArrayKind, ...]:
    """Array kinds that can be tested here."""
    found: list[ArrayKind] = ["numpy"]
    for name in ("torch", "jax"):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            found.append(name)
    return tuple(found)
