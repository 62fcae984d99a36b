"""Random calls, each drawn from one seed: combinations no table of cases thinks of."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TextIO, get_args

import numpy as np

from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.testing import random_edges, random_stages
from kdacore.testing.capabilities import (
    default_device,
    has_device,
    kinds_of,
    plainest,
    plainest_trained,
    representable,
)
from kdacore.testing.cases import Case
from kdacore.testing.matrix import Level
from kdacore.testing.random_limits import NO_LIMITS, Limits
from kdacore.testing.random_parts import draw_memory, index_dtype, pick, usable_dtypes
from kdacore.testing.random_pools import draw_pool
from kdacore.testing.serving import judge
from kdacore.testing.suite import Result, run_case
from kdacore.types import ArrayKind

Calls = Literal["whole", "stages"]
"""Which ops: the whole ones, or those of the chunk pipeline. A seed stands for one call of each, drawn on its own."""
CALLS: tuple[Calls, ...] = get_args(Calls)
QUICK_TOKENS, FULL_TOKENS = 150, 700
_OWN_KIND = 0.7
"""Share of the seeds that use the array kind a backend is made for."""
_MOSTLY_SERVED = 0.8
"""Share of the seeds that, when the backend declines the draw, draw again, nearer to its plainest call."""
_SHARES = (1.0, 0.6, 0.3, 0.1)
_HARD = 2.0
"""A random call may be any of the contract's hard cases, so it gets their bounds."""
_STAGE_STREAM, _SIZES_STREAM, _EDGES_STREAM = 1, 2, 3
NAMES = {"whole": "whole ops", "stages": "stages"}


def ops_of(backend: str, calls: Calls) -> list[str]:
    """The backend's ops that such calls are drawn from."""
    return [
        op for op in REGISTRY.get(backend).backend.ops if (OPS[op].family == "stage") == (calls == "stages")
    ]


def calls_of(backend: str) -> tuple[Calls, ...]:
    """What can be drawn for a backend, which may have whole ops alone, or stages alone."""
    return tuple(calls for calls in CALLS if ops_of(backend, calls))


class NothingServedError(ValueError):
    """There is no call of a backend to draw."""


def random_case(
    backend: str,
    seed: int,
    device: str,
    level: Level = "quick",
    calls: Calls = "whole",
    only: tuple[ArrayKind, ...] = (),
    limits: Limits = NO_LIMITS,
) -> Case:
    """The call this seed stands for, of ``only`` these array kinds. It may be one the backend declines.

    With ``limits`` a seed stands for another call than without them.

    Raises:
        NothingServedError: none of these calls on this device, whatever the seed.
    """
    stages = calls == "stages"
    first = seed - seed % limits.together
    rng = np.random.default_rng((first, _STAGE_STREAM) if stages else first)
    found = _base(backend, rng, device, calls, only, limits)
    base = replace(found, seed=seed, factor=_HARD, note=f"random{seed}")
    changes = random_stages.CHANGES if stages else _CHANGES
    impl = REGISTRY.get(backend).backend.ops[base.op]
    differentiable = impl.backward is not None and not judge(replace(base, check="gradients"))
    case = base
    for share in _SHARES if rng.random() < _MOSTLY_SERVED else _SHARES[:1]:
        case = base
        for change in changes:
            if rng.random() < share:
                case = change(case, rng, level)
        case = limits.resize(case, rng)
        if limits.check:
            case = replace(case, check=limits.check)
        else:
            case = random_stages.draw_check(case, rng) if stages else _check(case, rng, differentiable)
        if not judge(case):
            break
    else:
        return case  # declined
    case = random_edges.draw_sizes(case, base, np.random.default_rng((first, stages, _SIZES_STREAM)), limits)
    return random_edges.draw_edges(case, np.random.default_rng((seed, stages, _EDGES_STREAM)), limits)


def _base(
    backend: str, rng: Any, device: str, calls: Calls, only: tuple[ArrayKind, ...], limits: Limits
) -> Case:
    """The plainest call of some op, kind and dtype; mostly of the kind the backend is made for."""
    ops = [name for name in ops_of(backend, calls) if limits.op in ("", name)]
    if limits.many:
        ops = [name for name in ops if OPS[name].family in ("chunk", "recurrent")]
    kinds = [k for k in kinds_of(backend) if has_device(k, device) and (not only or k in only)]
    mostly = kinds[:1] if rng.random() < _OWN_KIND else []
    for some in (mostly, kinds):
        triples = list(itertools.product(ops, some, ("float32", "bfloat16", "float16")))
        for n in rng.permutation(len(triples)):
            op, kind, dtype = triples[n]
            if not representable(kind, dtype):
                continue
            base = plainest(backend, op, kind, device, dtype)
            if base is not None:
                trained = plainest_trained(backend, op, kind, device, dtype)
                return base if trained in (None, base) or rng.random() < 0.5 else trained
    raise NothingServedError(f"backend {backend!r} serves none of its {NAMES[calls]} on {device} here")


def _sizes(case: Case, rng: Any, level: Level) -> Case:
    most = FULL_TOKENS if level == "full" else QUICK_TOKENS
    shape = case.shape
    if case.family in ("recurrent", "decode"):
        most = 20 if case.family == "recurrent" else 17
    T = int(rng.integers(1, most))
    H = int(rng.integers(1, 4))
    K, V = shape.K, shape.V
    if rng.random() < 0.5:
        K, V = pick(rng, 16, 32, 60, 64, 100, 128), pick(rng, 16, 32, 60, 64, 100, 128)
    return replace(
        case,
        shape=replace(shape, B=int(rng.integers(1, 4)), T=T, H=H, HV=H * int(rng.integers(1, 4)), K=K, V=V),
    )


def _packing(case: Case, rng: Any, level: Level) -> Case:
    if case.family in ("gate", "commit") or rng.random() < 0.5:
        return case
    lengths = rng.multinomial(case.shape.T, rng.dirichlet(np.ones(int(rng.integers(1, 8)))))
    padding = pick(rng, 0, int(rng.integers(1, 80)))
    packed = replace(
        case.shape, B=1, T=case.shape.T + padding, lengths=tuple(int(n) for n in lengths), padding=padding
    )
    return replace(case, shape=packed, host_offsets=bool(rng.random() < 0.3))


def _gate(case: Case, rng: Any, level: Level) -> Case:
    if case.family == "commit":
        return replace(case, one_decay=bool(rng.random() < 0.5))
    case = replace(case, gates=pick(rng, "random", "random", "init", "slow", "zero", "floor", "mixed"))
    if case.family == "gate":
        return case.having(lower_bound=pick(rng, None, -5.0, -2.0))
    how = pick(rng, "", "log", "safe", "softplus", "sigmoid", "model")
    if not how:
        return case
    raw = how in ("softplus", "sigmoid", "model")
    bound = None if how in ("log", "softplus") else pick(rng, -5.0, -1.0)
    safe = True if how in ("safe", "model") else None
    case = case.having(use_gate_in_kernel=raw or None, lower_bound=bound, safe_gate=safe)
    if not raw:
        return case
    A_log = how == "softplus" or rng.random() < 0.8
    return replace(case, A_log=bool(A_log), dt_bias=pick(rng, "", "matrix", "flat"))


def _norms(case: Case, rng: Any, level: Level) -> Case:
    if case.family in ("gate", "commit"):
        return case
    if rng.random() < 0.5:
        case = case.having(use_qk_l2norm_in_kernel=pick(rng, None, True))
    if rng.random() < 0.5:
        sigmoid = bool(rng.random() < 0.7)
        negative = sigmoid and rng.random() < 0.4
        case = case.having(use_beta_sigmoid_in_kernel=sigmoid or None, allow_neg_eigval=negative or None)
    return case.having(scale=0.3) if rng.random() < 0.2 else case


def _dtypes(case: Case, rng: Any, level: Level) -> Case:
    usable = usable_dtypes(case)
    return replace(
        case,
        gate_dtype=pick(rng, "float32", *usable),
        beta_dtype=pick(rng, "float32", *usable),
        bias_dtype=pick(rng, "float32", "float32", *usable),
        index_dtype=index_dtype(case, rng),
    )


def _state(case: Case, rng: Any, level: Level) -> Case:
    if case.family == "gate":
        return case
    case = case.having(state_v_first=pick(rng, None, True))
    if case.family != "commit":
        case = case.having(output_final_state=pick(rng, None, True, True))
    share = rng.random()
    state_dtype = "bfloat16" if share < 0.2 else "float16" if share < 0.3 else "float32"
    if not representable(case.kind, state_dtype):
        state_dtype = "float32"
    case = replace(case, initial_state=bool(rng.random() < 0.6), state_dtype=state_dtype)
    if case.family == "chunk":
        every = pick(rng, None, None, None, 64, 128)
        return case.having(checkpoint_every=every, disable_recompute=pick(rng, None, True))
    return case


def _around_the_recurrence(case: Case, rng: Any, level: Level) -> Case:
    """Convolution and norm of the fused decode ops, and the convolution's state where records are committed."""
    if case.family == "commit":
        given = bool(rng.random() < 0.6)
        rows, windows = (bool(rng.random() < 0.4) for _ in range(2))
        return replace(case, conv_state_given=given, conv_indices=rows, conv_windows=windows)
    if case.family != "decode":
        return case
    norm = pick(rng, "", "vector", "heads")
    z = bool(norm and rng.random() < 0.7)
    case = replace(
        case,
        conv_width=pick(rng, 0, 2, 3, 4, 4),
        conv_bias=bool(rng.random() < 0.5),
        conv_indices=bool(rng.random() < 0.4),
        conv_windows=bool(rng.random() < 0.4),
        norm=norm,
        z=z,
        weight_dtype=pick(rng, "float32", *usable_dtypes(case)),
    )
    case = case.having(norm_eps=pick(rng, None, 1e-3) if norm else None)
    return case.having(norm_activation=pick(rng, None, "sigmoid", "silu") if z else None)


_CHANGES = (_sizes, _packing, _gate, _norms, _dtypes, _state, _around_the_recurrence, draw_memory)


def _check(case: Case, rng: Any, differentiable: bool) -> Case:
    """What is measured: a pool call, gradients where the base has them, or the forward results."""
    if rng.random() < {"recurrent": 0.5, "decode": 0.7, "chunk": 0.4, "commit": 1.0}.get(case.family, 0.0):
        return draw_pool(case, rng)
    differentiable = differentiable and rng.random() < 0.6
    return replace(case, check="gradients" if differentiable else "accuracy")


def run_random(
    backend: str,
    count: int,
    seed: int = 0,
    device: str | None = None,
    *,
    level: Level = "quick",
    calls: Calls = "whole",
    stream: TextIO | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run ``count`` random calls, seeds ``seed``, ``seed + 1``, ...

    A failing one is reproduced by ``run_random(backend, 1, its seed, device)``.

    Args:
        backend: a registered name.
        count: how many.
        seed: of the first.
        device: as for :func:`kdacore.testing.matrix.plan`.
        level: ``full`` draws longer sequences.
        calls: of which ops.
        stream: where progress and failing seeds are printed; standard error when None.
        on_result: called with every result, instead of printing.
    """
    device = device or default_device(backend)
    out = stream or sys.stderr
    results = []
    for n in range(count):
        result = run_case(random_case(backend, seed + n, device, level, calls))
        results.append(result)
        if on_result is not None:
            on_result(result)
        elif result.status == "failed":
            print(f"seed {seed + n} FAILED: {result.case}\n{result.message}", file=out, flush=True)
        elif (n + 1) % 20 == 0 or n + 1 == count:
            failed = sum(r.status == "failed" for r in results)
            print(f"{n + 1}/{count} random calls, {failed} failed", file=out, flush=True)
    return results
