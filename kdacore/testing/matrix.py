"""Conformance cases generated from what a backend declares: its ops, kinds and dtypes, times the variations.

A variation the backend declines is a case too: it must be declined with reasons, and is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.testing.capabilities import (
    DTYPES,
    default_device,
    has_device,
    kinds_of,
    plainest,
    plainest_trained,
    representable,
)
from kdacore.testing.cases import BATCH_INVARIANCE_CHECKS, DIFFERENTIATES, Case
from kdacore.testing.variations import Variation, variations_of
from kdacore.types import ArrayKind

Level = Literal["quick", "full"]
LEVELS: tuple[Level, ...] = ("quick", "full")


@dataclass(frozen=True)
class Plan:
    """Everything to run for one backend, and what could not be tried here at all."""

    backend: str
    device: str
    level: Level
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()


def plan(
    backend: str, *, device: str | None = None, level: Level = "quick", kinds: tuple[str, ...] = ()
) -> Plan:
    """The cases of a backend on a device.

    Args:
        backend: a registered name. ContractError when there is none.
        device: ``cpu``, ``cuda`` or ``tpu``; the backend's own first choice when None.
        level: ``quick``: every property once; ``full``: every variation for every array kind and dtype.
        kinds: only these array kinds; all it takes when empty.
    """
    declared = REGISTRY.get(backend).backend
    device = device or default_device(backend)
    notes: list[str] = []
    cases: list[Case] = []
    primary = True
    for kind in kinds_of(backend):
        if kinds and kind not in kinds:
            continue
        if not has_device(kind, device):
            notes.append(f"{kind} arrays not tried: no {device} device for them here")
            continue
        for op in declared.ops:
            cases += _op_cases(backend, op, kind, device, level, primary)
        primary = False
    for kind in declared.kinds:
        if kind not in kinds_of(backend) and (not kinds or kind in kinds):
            notes.append(f"{kind} arrays not tried: {kind} is not installed")
    _must_be_unique(cases)
    return Plan(backend, device, level, tuple(cases), tuple(notes))


def _must_be_unique(cases: list[Case]) -> None:
    twice = [name for name, count in Counter(c.id for c in cases).items() if count > 1]
    if twice:
        raise ValueError(f"variations with one name: {', '.join(twice[:5])}")


def _op_cases(backend: str, op: str, kind: ArrayKind, device: str, level: Level, primary: bool) -> list[Case]:
    """Every variation of one op that this level wants for this kind."""
    cases: list[Case] = []
    bases = {d: plainest(backend, op, kind, device, d) for d in _dtypes(kind, device)}
    first = next((d for d, base in bases.items() if base is not None), None)
    for dtype, base in bases.items():
        if base is None:
            cases.append(_refused(backend, op, kind, device, dtype))
            continue
        trained = plainest_trained(backend, op, kind, device, dtype) or base
        for v in _wanted(backend, op, level, primary, dtype == first):
            case = apply(trained if v.check in DIFFERENTIATES else base, v)
            if case is not None:
                cases.append(case)
    return cases


def _dtypes(kind: ArrayKind, device: str) -> list[str]:
    """The dtypes to try, the one the properties are tested in first: tight bounds on a CPU, bfloat16 elsewhere."""
    order = list(DTYPES) if device == "cpu" else ["bfloat16", "float32", "float16", "float64"]
    return [d for d in order if representable(kind, d)]


def _refused(backend: str, op: str, kind: ArrayKind, device: str, dtype: str) -> Case:
    """A dtype nothing is served in: the case that says why."""
    from kdacore.testing.capabilities import start

    return replace(start(backend, op, kind, device, dtype), note="any")


def _wanted(backend: str, op: str, level: Level, primary: bool, first: bool) -> list[Variation]:
    found = variations_of(op, OPS[op].family)
    impl = REGISTRY.get(backend).backend.ops[op]
    if impl.backward is None:  # one refusal says it all
        found = [v for v in found if v.check not in DIFFERENTIATES or (v.check, v.note) == ("gradients", "")]
    if not impl.batch_invariant:
        found = [v for v in found if v.check not in BATCH_INVARIANCE_CHECKS]
    if level == "full":
        return found
    there = {
        "everywhere": True,
        "kind": first,
        "dtype": primary,
        "once": primary and first,
        "full": False,
    }
    return [v for v in found if there[v.where]]


def apply(base: Case, v: Variation) -> Case | None:
    """The base with one change; None where the change means nothing (a memory layout of a JAX array, say)."""
    case = replace(base, check=v.check, note=v.note, **v.fields)
    sizes = dict(v.shape)
    if sizes.get("V") == "2K":
        sizes["V"] = 2 * sizes.get("K", case.shape.K)
    if "lengths" in sizes:
        sizes.update(B=1, T=sum(sizes["lengths"]) + sizes.get("padding", 0))
    case = replace(case, shape=replace(case.shape, **sizes)).having(**_options(case, v))
    return case if is_meaningful(case) else None


def _options(case: Case, v: Variation) -> dict[str, Any]:
    changes = dict(v.options)
    pool = case.pool_use
    if pool is not None:
        changes.update({n: x for n, x in pool.options.items() if x is None or n in OPS[case.op].options})
        if pool.read_only:
            changes["output_final_state"] = None
    if case.check in ("gradient_causality", "gradient_causality_append"):
        changes["output_final_state"] = None  # the loss is on a prefix of o alone
    return changes


def is_meaningful(case: Case) -> bool:
    """Can such a call be made at all, on this kind of array?"""
    backend = REGISTRY.get(case.backend).backend
    dtypes = {
        case.gate_dtype,
        case.beta_dtype,
        case.bias_dtype,
        case.state_dtype,
        case.weight_dtype,
        case.stage_dtype or "float32",
    }
    if not all(representable(case.kind, d) for d in dtypes):
        return False
    if case.stage_dtype and case.dtype == "float64":  # narrower, not wider
        return False
    pool = case.pool_use
    if case.kind == "jax":
        returns_states = case.family == "commit" or case.option("output_final_state", False)
        unasked = pool is not None and pool.inplace and not returns_states
        if case.layout != "contiguous" or case.out or unasked or case.check == "uninitialised":
            return False
        if pool is not None and pool.strided:
            return False
        return case.mode in ("eager", "jit") and case.check != "graph"
    if case.mode == "jit":
        return False
    if case.kind == "numpy":
        return case.mode == "eager" and case.check not in ("uninitialised", "graph")
    return case.check != "graph" or (case.device == "cuda" and backend.capturable)
