"""FlashKDA: CUTLASS kernels of a prefill's forward, built from its source for one GPU."""

from __future__ import annotations

import importlib
from typing import Any

from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case
from kdacore.bench.peers.peer import Call, Peer, missing
from kdacore.ops import OPS

SIZE = 128


def _refusal(case: Case) -> str:
    return missing(
        (OPS[case.op].family != "recurrent", "has no decode step"),
        (case.op != "chunk_gated_delta_rule", "Kimi Delta Attention only"),
        (case.phase in ("forward", "host"), "forward only"),
        (case.gate == "sigmoid", "bounded gates only"),
        (case.K == case.V == SIZE, f"K = V = {SIZE} only"),
        (case.value_heads == case.H, "no grouped value heads"),
        (case.dtype == "bfloat16", "bfloat16 only"),
        (case.gate_inside, "raw gates only"),
    )


def _build(case: Case) -> Call:
    """Gate, l2norm and sigmoid are in its kernels; it writes value-major states into arrays of the caller's."""
    import torch

    forward = importlib.import_module("flash_kda").fwd
    lower_bound = options(case)["lower_bound"]

    def call(arrays: Arrays) -> tuple[Any, Any]:
        v = arrays["v"]
        out = torch.empty_like(v)
        state = torch.empty(case.N, case.H, SIZE, SIZE, dtype=torch.float32, device=v.device)
        forward(
            arrays["q"],
            arrays["k"],
            v,
            arrays["g"],
            arrays["beta"],
            SIZE**-0.5,
            out,
            A_log=arrays["A_log"],
            dt_bias=arrays["dt_bias"],
            lower_bound=lower_bound,
            final_state=state,
            cu_seqlens=arrays.get("cu_seqlens"),
        )
        return out, state.mT

    return call


PEER = Peer("flash-kda", _build, _refusal, lambda case: "")
