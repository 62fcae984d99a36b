"""Which fused decode steps of serving engines kdacore takes over."""

from __future__ import annotations

from typing import Any

from kdacore.integrations.handover import was_asked_for
from kdacore.types import Selection


def why_left(selection: Selection, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a fused step stays with the engine; empty where it does not.

    There are records of fused steps with the CUDA backend alone (in vLLM), so another one computes them only where it
    was asked for.
    """
    if selection.request.device.type == "cpu" or selection.backend == "cuda" or was_asked_for(selection):
        return ""
    reasons = [str(r) for c in selection.candidates if c.backend == "cuda" for r in c.reasons]
    return "; ".join(["fused decode steps are taken over by the cuda backend alone", *reasons])
