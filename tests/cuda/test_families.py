"""What the backend keeps by family does not depend on lengths: a call of a known family has the launches of a first
call."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kdacore import types
from kdacore.acceleration.requests import RequestsLike
from kdacore.calls.description import CallDescription
from kdacore.calls.pools import POOLS
from kdacore.calls.requests import request_of
from kdacore.errors import ContractError
from kdacore.testing.random_cases import random_case
from kdacore.types import Device, InputGrads, Request, family_of
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms import chunk_launches
from kdacore_cuda.forms.backward import gradients
from kdacore_cuda.forms.backward import launches as backward
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.gated_delta import backward_launches as gated_delta_backward
from kdacore_cuda.forms.gated_delta import launches as gated_delta
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.recurrent import launches as recurrent
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import FamilyCache, PlanCache

pytestmark = pytest.mark.quick

HOPPER = Device("cuda", 0, "sm_90")
RECURRENT_GDN = "fused_recurrent_gated_delta_rule"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "memory_rate", lambda index: 3.35e12)
    monkeypatch.setattr(torch_launch, "clusters_at_once", lambda launcher, arch, index: 0)


CACHES = [x for x in gc.get_objects() if type(x) in (FamilyCache, PlanCache)]


def forget() -> None:
    """As in a process that has made no call."""
    types._families.clear()
    types._family_of.clear()
    for cache in CACHES:
        (cache._made if isinstance(cache, FamilyCache) else cache._plans).clear()


def drawn(seed: int) -> Request | None:
    """A random call on Hopper."""
    rng = np.random.default_rng(seed)
    call: CallDescription = random_case("reference", seed, "cpu", only=("torch",))
    op = str(rng.choice(["chunk_kda"] * 4 + ["chunk_gated_delta_rule", "fused_recurrent_kda", RECURRENT_GDN]))
    dtypes = {n: str(rng.choice(["bfloat16", "float32", "float16"])) for n in ("gate_dtype", "beta_dtype")}
    H, K = (
        int(rng.choice([1, 2, 4, 8, 16, 32])),
        128 if op.startswith("chunk") else int(rng.choice([64, 128])),
    )
    sizes: dict[str, Any] = {"H": H, "HV": H * int(rng.choice([1, 1, 2])), "K": K, "V": K}
    call = call.changed(op=op, dtype="bfloat16", **dtypes, state_dtype="float32", **sizes)
    suited = [name for name, pool in POOLS.items() if pool.suits(call.family)]
    if op.startswith("chunk_") and rng.random() < 0.5:
        saves = {
            "disable_recompute": bool(rng.random() < 0.5),
            "checkpoint_every": None,
            "inplace_state": False,
        }
        call = call.changed(requires_grad=True, **saves)
    elif rng.random() < 0.6:
        name = str(rng.choice(suited))
        asked = {k: v for k, v in POOLS[name].options.items() if v is not None}
        call = call.changed(pool=name, initial_state=False, requires_grad=False, **asked)
    try:
        return types.dataclasses.replace(request_of(call), device=HOPPER)
    except (ContractError, KeyError):  # a draw of another op's options
        return None


def others(request: Request, rng: Any) -> Iterator[Request]:
    """Calls of other lengths, small and large."""
    like, r = RequestsLike(request), request
    for _ in range(12):
        T = int(rng.choice([1, 64, rng.integers(1, 300), rng.integers(1, 40_000)]))
        N = int(rng.choice([1, 2, rng.integers(1, 70)]))
        B = 1 if r.packed or r.checkpoint_count else N
        N = N if r.packed else B
        sizes = {
            "B": B,
            "T": T,
            "N": N,
            "N + 1": N + 1,
            "rows": N + 9 if r.pool_size else N,
            "write_rows": N + 5,
        }
        shapes = []
        for name, spec in r.tensors:
            first, *rest = types_of(name)
            behind = spec.shape[1 + len(rest) :]
            if name in ("state_indices", "write_indices") and len(spec.shape) == 2:
                behind = (T + 2,)
            shapes.append((*[sizes[axis] for axis in (first, *rest)], *behind) if first else spec.shape)
        made = like(tuple(shapes))
        if made is not None:
            yield made


def types_of(name: str) -> tuple[str, ...]:
    """The axes of an array that are lengths; an empty text where there are none."""
    if name in ("q", "k", "v", "g", "beta", "out"):
        return "B", "T"
    first = {
        "initial_state": "rows",
        "write_pool": "write_rows",
        "cu_seqlens": "N + 1",
        "cu_seqlens_cpu": "N + 1",
    }
    by_sequence = ("state_indices", "write_indices", "has_initial_state", "num_accepted_tokens")
    return (first.get(name, "N" if name in by_sequence else ""),)


def launches_of(r: Request) -> list[Launches]:
    if not r.op.startswith("chunk_"):
        return [recurrent.launches_of(r, mode) for mode in (None, RecurrentMode.GENERAL)]
    found = [gated_delta.launches_of(r) if r.scalar_gate else chunk_launches.launches_of(r)]
    if r.needs_grad:
        for wanted in (InputGrads(*[True] * 8), InputGrads(*[i % 2 == 0 for i in range(8)])):
            for to_caller in (False, True):
                found += backward_of(r, wanted, to_caller)
    return found


def backward_of(r: Request, wanted: InputGrads, to_caller: bool) -> Iterator[Launches]:
    """With nothing saved, and with what the forward saves."""
    if r.scalar_gate:
        for saved in {"", chosen(r).saves}:
            yield gated_delta_backward.launches_of(r, wanted, saved, to_caller)
    else:
        for saved in {"", gradients.saved_kind(r)}:
            yield from backward.launches_of(r, wanted, saved, to_caller)


SEEDS = range(160)


@pytest.mark.parametrize("seed", SEEDS)
def test_launches_of_a_known_family(seed: int) -> None:
    request = drawn(seed)
    if request is None:
        return
    forget()
    calls = list(others(request, np.random.default_rng(seed)))
    assert len({family_of(r) for r in (request, *calls)}) == 1
    together = [launches_of(r) for r in calls]
    for r, made in zip(calls, together, strict=True):
        forget()
        alone = launches_of(types.dataclasses.replace(r))
        for one, other in zip(made, alone, strict=True):
            assert one == other


def test_every_form_was_drawn() -> None:
    forms = set()
    for seed in SEEDS:
        request = drawn(seed)
        for r in () if request is None else others(request, np.random.default_rng(seed)):
            forms.add((chosen(r).form, r.needs_grad))
    expected = {(form, grad) for form in ("fused", "segments", "dataflow") for grad in (False, True)}
    expected |= {("gated_delta", grad) for grad in (False, True)}
    assert forms >= expected | {("saving_forward", True), ("recurrent", False)}


def test_a_family_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdacore_cuda.runtime import plan_cache

    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    made: list[Request] = []
    cache = FamilyCache(lambda r: made.append(r) or len(made))
    request = next(r for r in map(drawn, SEEDS) if r is not None)
    by_scale = [types.dataclasses.replace(request, scale=float(i)) for i in range(1, 9)]
    assert [cache(r) for r in by_scale] == list(range(1, 9)) and len(cache._made) <= 3
    longer = types.dataclasses.replace(by_scale[-1], T=request.T + 1)
    assert cache(longer) == 8 and len(made) == 8
