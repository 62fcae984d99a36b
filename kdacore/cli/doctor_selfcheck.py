"""The doctor's self-checks: each available backend against the oracle, in a child process that may crash."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdacore import machine
from kdacore.calls.description import CallDescription
from kdacore.dispatch import selection
from kdacore.feature_matrix import Place, arch_of, at, places_of, plain_calls, request_of
from kdacore.machine import Machine, version_of
from kdacore.ops import OPS
from kdacore.registry import REGISTRY, Registered
from kdacore.selfcheck import check as selfcheck
from kdacore.types import Request

SECONDS = 900.0
"""Kernels may have to be built first."""
_MARK = "kdacore-selfcheck "
_CHILD = "from kdacore.cli.doctor_selfcheck import child; child()"
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "chunk": (
        {"requires_grad": True, "initial_state": True, "output_final_state": True},
        {
            "output_final_state": True,
            "use_gate_in_kernel": True,
            "lower_bound": None,
            "safe_gate": None,
            "HV": 4,
            "lengths": (100, 0, 156),
            "dtype": "float32",
            "gate_dtype": "float32",
            "beta_dtype": "float32",
        },
    ),
    "recurrent": (
        {"initial_state": True},
        {"T": 4, "pool": "indexed", "pool_rows": 8, "inplace_state": True, "HV": 4, "state_v_first": True},
    ),
    "gate": ({}, {"lower_bound": None}),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One self-check. ``error`` is the worst relative error against the oracle, None when nothing came back."""

    backend: str
    op: str
    place: str
    call: str
    mark: str
    """``verified``: the op's tests have run on this architecture; else ``compiled only``."""
    error: float | None
    bound: float
    status: str
    """``ok``, ``wrong`` or ``FAILED``."""
    detail: str = ""


def run(registered: Registered, where: Machine, in_child: bool, quick: bool = False) -> list[Check]:
    """Check one backend wherever this machine can run it.

    Args:
        quick: without what JAX takes ten seconds and more to compile (:func:`requests`).
    """
    places = [p for p in places_of(registered.backend, where) if _present(p, where)]
    if not in_child:
        return [measure(registered, r) for r in requests(registered, places, quick)]
    words = [registered.backend.name, json.dumps([dataclasses.astuple(p) for p in places]), json.dumps(quick)]
    try:
        done = machine.start(_CHILD, words, SECONDS)
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return read(registered.backend.name, text, f"no answer within {SECONDS:g} s")
    except OSError as error:
        return [_failure(registered.backend.name, "", f"cannot start a child process: {error}")]
    _, problem = machine.decode(done.returncode, "null", done.stderr)
    return read(registered.backend.name, done.stdout, problem)


def read(backend: str, text: str, problem: str) -> list[Check]:
    """The checks a child reported, and a failed one for what it was at when it died."""
    lines = [json.loads(line[len(_MARK) :]) for line in text.splitlines() if line.startswith(_MARK)]
    checks = [Check(**line) for line in lines if "op" in line]
    if problem:
        started = [line["start"] for line in lines if "start" in line]
        checks.append(_failure(backend, started[-1] if len(started) > len(checks) else "", problem))
    return checks


def child() -> None:
    """Run in the child: check the backend named on the command line and report line by line."""
    name, places, quick = sys.argv[1], [Place(*p) for p in json.loads(sys.argv[2])], json.loads(sys.argv[3])
    registered = REGISTRY.get(name)
    if any(p.kind == "torch" for p in places):
        import torch  # noqa: F401  an adapter looks for it among the imported modules
    for request in requests(registered, places, quick):
        print(_MARK + json.dumps({"start": f"{request.op} on {request.device}, {request.kind}"}), flush=True)
        print(_MARK + json.dumps(dataclasses.asdict(measure(registered, request))), flush=True)


def requests(registered: Registered, places: Iterable[Place], quick: bool = False) -> list[Request]:
    """The first plain call of each place and op, with each variant that the backend says it serves.

    Args:
        quick: not where two calls are enough, and of JAX one variant of each op, without gradients.
    """
    found: list[Request] = []
    for place in places:
        brief = _brief(registered, place)
        if brief and quick:
            continue
        for op in registered.backend.ops:
            variants = _VARIANTS.get(OPS[op].family, ())
            if brief:
                variants = variants[:1] if op in ("chunk_kda", "fused_recurrent_kda") else ()
            if quick and place.kind == "jax":
                variants = tuple({**change, "requires_grad": False} for change in variants[:1])
            for change in variants:
                found += _first_served(registered, op, place, change)
    return found


def _brief(registered: Registered, place: Place) -> bool:
    """One variant of the two main ops is enough: eager JAX takes seconds a call, and some kinds are only by request."""
    backend = registered.backend
    by_request = backend.auto_kinds is not None and place.kind not in backend.auto_kinds
    return by_request or (place.kind == "jax" and not backend.traceable)


def _first_served(registered: Registered, op: str, place: Place, change: dict[str, Any]) -> list[Request]:
    # What few backends lack is let go of first, so that a narrow backend is still asked for the rest.
    tried = [
        {name: value for name, value in change.items() if name not in without}
        for without in (
            (),
            ("output_final_state",),
            ("requires_grad",),
            ("requires_grad", "output_final_state"),
        )
    ]
    for extra in tried:
        if extra.get("requires_grad") and place.kind == "numpy":
            continue
        for call in plain_calls(op):
            asked = at(call.changed(**extra), place)
            if not _expressible(asked):
                continue
            request = request_of(asked)
            if not selection.judge(registered, request).reasons:
                return [request]
    return []


def _expressible(call: CallDescription) -> bool:
    """NumPy itself has no bfloat16; ml_dtypes, which brings it, is not a base dependency."""
    return (
        call.kind != "numpy"
        or "bfloat16" not in (call.dtype, call.state_dtype)
        or bool(version_of("ml-dtypes"))
    )


def measure(registered: Registered, request: Request) -> Check:
    """One self-check, here."""
    result = selfcheck.measure(registered, request)
    failure, error, bound = result["failure"], result["error"], result["bound"]
    status = "FAILED" if failure else "ok" if error < bound else "wrong"
    mark = "verified" if selection.judge(registered, request).verified else "compiled only"
    place = str(Place(request.kind, request.device.type, request.device.arch))
    finite = error if error < float("inf") else None
    if status == "wrong" and finite is None:
        failure = result["misfit"] or "not finite, or of the wrong shape"
    return Check(
        registered.backend.name, request.op, place, describe(request), mark, finite, bound, status, failure
    )


def describe(request: Request) -> str:
    """The call in a few words."""
    words = [
        request.dtype,
        {"log": "log decay", "softplus": "unbounded gate", "sigmoid": "bounded gate"}[request.gate],
    ]
    words += (
        ["gradients"] * request.needs_grad + ["packed"] * request.packed + ["GVA"] * (request.HV > request.H)
    )
    words += ["pool"] * bool(request.pool_size) + ["state"] * (
        request.has("initial_state") and not request.pool_size
    )
    words += ["final state"] * request.output_final_state
    return ", ".join(words)


def _failure(backend: str, during: str, problem: str) -> Check:
    return Check(backend, during or "(start)", "", "", "", None, 0.0, "FAILED", problem)


def _present(place: Place, where: Machine) -> bool:
    """Is there such a device here, and the array library that sees it?"""
    if place.kind not in where.frameworks:
        return False
    if place.device == "cpu":
        return True
    here = [a for a in where.accelerators if a.kind == place.kind and a.type == place.device]
    return bool(here) and place.arch == arch_of(place.device, place.kind, here)
