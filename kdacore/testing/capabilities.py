"""What a backend serves, found out by asking its verifiers: the plainest call of each op in each dtype."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace

from kdacore.calls.description import Options, options
from kdacore.calls.values import Shape
from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.testing.cases import MODEL, UNBOUNDED_MODEL, Case
from kdacore.testing.serving import device_of, frameworks, judge
from kdacore.types import ArrayKind

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = ("float32", "bfloat16", "float16", "float64")
_TOKENS = {"chunk": 70, "recurrent": 5, "decode": 5, "commit": 1, "gate": 70, "stage": 70}
_FEWER = {"chunk": 64, "recurrent": 1, "decode": 1, "commit": 1, "gate": 64, "stage": 64}
_STATE = {"output_final_state": True}
_PRESETS: tuple[Options, ...] = (
    options(**_STATE),
    options(**_STATE, use_qk_l2norm_in_kernel=True),
    options(**_STATE, **MODEL),
    options(**_STATE, **UNBOUNDED_MODEL),
    options(**_STATE, **{**MODEL, "safe_gate": False}),
    options(**_STATE, safe_gate=True, lower_bound=-5.0),
    options(**_STATE, use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=-5.0),
)
"""Option sets a backend may insist on, plainest first."""


def plainest(
    backend: str, op: str, kind: ArrayKind, device: str, dtype: str, check: str = "accuracy"
) -> Case | None:
    """The plainest call of an op that a backend serves in a dtype; None when none of those tried is served.

    ``check``: what it has to be served for.
    """
    for case in _attempts(start(backend, op, kind, device, dtype)):
        if not judge(replace(case, check=check)):
            return case
    return None


def plainest_trained(backend: str, op: str, kind: ArrayKind, device: str, dtype: str) -> Case | None:
    """The plainest call served with gradients, which may not be the plainest one; None when there is none."""
    trains = OPS[op].family != "stage" and REGISTRY.get(backend).backend.ops[op].backward is not None
    return plainest(backend, op, kind, device, dtype, "gradients") if trains else None


def _attempts(first: Case) -> Iterator[Case]:
    """Calls a backend may serve, plainest first: then with a state given, of fewer tokens, with the other layout."""
    whole = first.family in ("chunk", "recurrent")
    tokens = (first.shape.T, _FEWER[first.family])
    layouts, states = ((None, True), (False, True)) if whole else ((None,), (False,))
    tried = itertools.product(layouts, tokens, states, _presets(first), HEAD_DIMS)
    for v_first, T, state, preset, K in tried:
        case = replace(first, options=preset, shape=replace(first.shape, T=T, K=K, V=K), initial_state=state)
        yield case.having(state_v_first=v_first) if v_first else case


def start(backend: str, op: str, kind: ArrayKind, device: str, dtype: str) -> Case:
    """The plainest call there is, whether served or not."""
    case = Case(
        check="accuracy",
        backend=backend,
        op=op,
        kind=kind,
        device=device,
        dtype=dtype,
        seed=sum(map(ord, op)),
    )
    case = replace(case, shape=Shape(1, _TOKENS[case.family], 2, 2, 16, 16), options=_presets(case)[0])
    if kind == "jax":
        case = replace(case, index_dtype="int32")
    if case.family == "stage":
        case = replace(case, A_log=False, dt_bias="")
    if case.family == "commit":
        case = replace(case, pool="records", options=())
    if dtype == "float64":
        names = ("gate_dtype", "beta_dtype", "bias_dtype", "state_dtype", "weight_dtype")
        wide = dict.fromkeys(names, dtype)
        case = replace(case, **wide)  # type: ignore[arg-type]
    return case


def _presets(case: Case) -> tuple[Options, ...]:
    if case.family == "gate":
        return ((), options(lower_bound=-5.0))
    return ((),) if case.family in ("stage", "commit") else _PRESETS


@functools.cache
def representable(kind: ArrayKind, dtype: str) -> bool:
    """Have arrays of this kind such a dtype here?"""
    if dtype == "bfloat16":
        return kind != "numpy" or importlib.util.find_spec("ml_dtypes") is not None
    if dtype == "float64" and kind == "jax":
        import jax

        return bool(jax.config.jax_enable_x64)
    return True


def kinds_of(backend: str) -> tuple[ArrayKind, ...]:
    """Array kinds a backend takes that can be tested here: those auto chooses it for first, the richest joins first."""
    declared = REGISTRY.get(backend).backend
    own = declared.kinds if declared.auto_kinds is None else declared.auto_kinds
    order: tuple[ArrayKind, ...] = ("torch", "jax", "numpy")
    there = [k for k in order if k in declared.kinds and k in frameworks()]
    return tuple(sorted(there, key=lambda k: k not in own))


def default_device(backend: str) -> str:
    """The device type the suite runs on unless told: the first that the backend names and this machine has; the CPU
    for a backend that runs anywhere."""
    types = REGISTRY.get(backend).backend.device_types
    if "*" in types:
        return "cpu"
    return next((d for d in types if any(has_device(kind, d) for kind in kinds_of(backend))), types[0])


def has_device(kind: ArrayKind, device: str) -> bool:
    """Can this kind of array live on such a device on this machine?"""
    if kind == "numpy":
        return device == "cpu"
    if kind == "torch":
        import torch

        return device == "cpu" or (device == "cuda" and torch.cuda.is_available())
    try:
        device_of(kind, device)
    except RuntimeError:  # what JAX raises for a platform it does not have
        return False
    return True
