"""FlashQLA: TileLang kernels of the gated delta rule, forward and backward, for Hopper and Blackwell.

Pure Python on tilelang. New head counts take about two minutes of compilation at their first call.

The timed call is ``flash_qla.chunk_gated_delta_rule`` with its own l2norm, as flash-linear-attention makes it. Its
kernels compute neither the decay nor beta: where the case has them inside, torch does both before, as models of
transformers do, and that is timed with it. A case with the decay given times FlashQLA alone.
"""

from __future__ import annotations

import importlib
from typing import Any

from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case
from kdacore.bench.peers import preparation
from kdacore.bench.peers.peer import Call, Peer, missing

SIZE = 128
PHASES = ("forward", "training", "host", "host-training")
DTYPES = ("bfloat16", "float16")


def _refusal(case: Case) -> str:
    return missing(
        (case.op == "chunk_gated_delta_rule", "the gated delta rule over whole sequences only"),
        (case.phase in PHASES, f"not timed in phase {case.phase}"),
        (case.K == case.V == SIZE, f"K = V = {SIZE} only"),
        (case.dtype in DTYPES, "bfloat16 and float16 only"),
        (not case.disable_recompute, "no choice of what is kept"),
    )


def _note(case: Case) -> str:
    return preparation.BY_TORCH if case.gate_inside else ""


def _build(case: Case) -> Call:
    """Layouts and offsets are kdacore's own."""
    function = importlib.import_module("flash_qla").chunk_gated_delta_rule

    def call(arrays: Arrays) -> tuple[Any, Any]:
        return function(  # type: ignore[no-any-return]
            q=arrays["q"],
            k=arrays["k"],
            v=arrays["v"],
            g=preparation.log_decay(case, arrays),
            beta=preparation.beta(case, arrays),
            initial_state=arrays.get("initial_state"),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=case.state_v_first,
            cu_seqlens=arrays.get("cu_seqlens"),
        )

    return call


PEER = Peer("flash-qla", _build, _refusal, _note)
