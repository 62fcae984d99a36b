"""A call of kdacore that does what a call of another project's function asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kdacore import api

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chunk_kda": api.chunk_kda,
    "chunk_gated_delta_rule": api.chunk_gated_delta_rule,
    "fused_recurrent_kda": api.fused_recurrent_kda,
    "fused_recurrent_gated_delta_rule": api.fused_recurrent_gated_delta_rule,
    "fused_decode_kda": api.fused_decode_kda,
    "fused_decode_gated_delta_rule": api.fused_decode_gated_delta_rule,
    "kda_gate": api.kda_gate,
}


class Call(NamedTuple):
    """A call of a public function of kdacore."""

    op: str
    arguments: dict[str, Any]
    finish: Callable[[Any], Any] | None = None
    """Makes the other project's result of kdacore's; None where the two are alike."""


def run(call: Call) -> Any:
    """Make the call. Returns what the other project's function returns."""
    op, arguments, finish = call
    result = _FUNCTIONS[op](**arguments)
    return result if finish is None else finish(result)
