"""flash-linear-attention: Triton kernels for everything. A first call of new sizes tunes them for about a minute.

The gated delta rule is called behind its registry of backends, so that a row is never another project's kernels: with
flash-qla installed the registry hands some calls on. Its backward takes a part from tilelang where that is installed.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case
from kdacore.bench.peers.peer import Call, Peer
from kdacore.machine import release_of, version_of

HOPPER = (9, 0)
WRONG_FROM, RIGHT_FROM = (3, 4), (3, 7, 1)
"""Versions of Triton whose code for its gated backward is wrong on Hopper: it refuses to run."""


def _refusal(case: Case) -> str:
    if case.op != "chunk_gated_delta_rule" or not case.trains or version_of("tilelang"):
        return ""
    version = version_of("triton")
    if not version or not WRONG_FROM <= release_of(version) < RIGHT_FROM or _capability() != HOPPER:
        return ""
    return f"refuses to train with Triton {version} on Hopper without tilelang"


def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _build(case: Case) -> Call:
    """Its own kernels: it hands ``chunk_kda`` on to FlashKDA only for value-major states, which are not asked for."""
    if case.op == "chunk_gated_delta_rule":
        module = importlib.import_module("fla.ops.gated_delta_rule")
        return _chunk(case, inspect.unwrap(module.chunk_gated_delta_rule))
    function = getattr(importlib.import_module("fla.ops.kda"), case.op)
    return _chunk(case, function) if case.op == "chunk_kda" else _decode(case, function)


def _chunk(case: Case, function: Any) -> Call:
    given = options(case)

    def call(arrays: Arrays) -> tuple[Any, Any]:
        x = {**arrays, "dt_bias": arrays["dt_bias"].reshape(-1)} if "dt_bias" in arrays else arrays
        return function(**x, **given)  # type: ignore[no-any-return]

    return call


def _decode(case: Case, function: Any) -> Call:
    """It takes one state a sequence, in order, and returns new ones: the pool without its indices."""
    given = {k: v for k, v in options(case).items() if k not in ("inplace_state", "safe_gate")}

    def call(arrays: Arrays) -> tuple[Any, Any]:
        x = {k: v for k, v in arrays.items() if k != "state_indices"}
        x["dt_bias"] = x["dt_bias"].reshape(-1)
        return function(**x, **given)  # type: ignore[no-any-return]

    return call


PEER = Peer("fla-core", _build, _refusal, note=lambda case: "")
