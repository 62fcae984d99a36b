"""flash-linear-attention: Triton kernels for everything. A first call of new sizes tunes them for about a minute."""

from __future__ import annotations

import importlib
from typing import Any

from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case
from kdacore.bench.peers.peer import Call, Peer


def _build(case: Case) -> Call:
    """Its own kernels: it hands calls on to FlashKDA only for value-major states, which are not asked for."""
    function = getattr(importlib.import_module("fla.ops.kda"), case.op)
    return _chunk(case, function) if case.op == "chunk_kda" else _decode(case, function)


def _chunk(case: Case, function: Any) -> Call:
    given = options(case)

    def call(arrays: Arrays) -> tuple[Any, Any]:
        return function(**{**arrays, "dt_bias": arrays["dt_bias"].reshape(-1)}, **given)  # type: ignore[no-any-return]

    return call


def _decode(case: Case, function: Any) -> Call:
    """It takes one state a sequence, in order, and returns new ones: the pool without its indices."""
    given = {k: v for k, v in options(case).items() if k not in ("inplace_state", "safe_gate")}

    def call(arrays: Arrays) -> tuple[Any, Any]:
        x = {k: v for k, v in arrays.items() if k != "state_indices"}
        x["dt_bias"] = x["dt_bias"].reshape(-1)
        return function(**x, **given)  # type: ignore[no-any-return]

    return call


PEER = Peer("fla-core", _build, refusal=lambda case: "", note=lambda case: "")
