"""nvidia-cudnn-frontend: on Hopper one fused kernel forward and four backward, compiled by NVRTC at the first call."""

from __future__ import annotations

import importlib
from typing import Any

from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case
from kdacore.bench.peers import preparation
from kdacore.bench.peers.peer import Call, Peer, missing
from kdacore.ops import OPS

SIZE = 128
HOPPER_ENGINE = "kda_hopper_cuda"
"""Named there, so that the row cannot be another engine's; elsewhere the library chooses."""


def _refusal(case: Case) -> str:
    training = case.phase == "training"
    return missing(
        (OPS[case.op].family != "recurrent", "its in-place decode is not this op's"),
        (case.op != "chunk_gated_delta_rule", "timed on Kimi Delta Attention only"),
        (case.phase in ("forward", "host", "training"), f"not timed in phase {case.phase}"),
        (case.K == case.V == SIZE, f"K = V = {SIZE} only"),
        (not training or case.value_heads == case.H, "no grouped value heads in its backward"),
        (not case.disable_recompute, "no choice of what is kept"),
        (case.dtype == "bfloat16", "bfloat16 only"),
        (case.gate_inside, "raw gates only"),
    )


def _note(case: Case) -> str:
    if case.phase == "training":
        return "gate, l2norm and sigmoid by torch in the timed region: its backward has none of them"
    if case.gate != "sigmoid":
        return "gate by torch in the timed region: it fuses bounded ones only"
    return ""


def _build(case: Case) -> Call:
    """Tokens of all sequences in one row, their offsets in int32 (made once), value-major states."""
    import torch

    function = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    given: dict[str, Any] = {"output_final_state": True}
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        given["plan_name"] = HOPPER_ENGINE
    made: list[Any] = []

    def offsets(arrays: Arrays) -> Any:
        if not made:
            packed, device = arrays.get("cu_seqlens"), arrays["q"].device
            uniform = torch.arange(case.B + 1, dtype=torch.int32, device=device) * case.T
            made.append(uniform if packed is None else packed.to(torch.int32))
        return made[0]

    def call(arrays: Arrays) -> tuple[Any, Any]:
        x = {name: arrays[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
        o, state = function(**_prepared(case, x, arrays), cu_seqlens=offsets(arrays), **given)
        return o.unflatten(0, (case.B, case.T)), state.mT

    return call


def _prepared(case: Case, x: Arrays, arrays: Arrays) -> Arrays:
    """The arguments, with what its kernels do not do done by torch."""
    training = case.phase == "training"
    if case.gate == "sigmoid" and not training:
        gate = {
            "safe_gate": True,
            "gate_lower_bound": options(case)["lower_bound"],
            "a_log": arrays["A_log"],
            "dt_bias": arrays["dt_bias"],
        }
    else:
        x["g"] = preparation.log_decay(case, {**arrays, "g": x["g"]})
        gate = {}
    if not training:
        return {**x, **gate, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    x["q"], x["k"] = preparation.l2norm(x["q"]), preparation.l2norm(x["k"])
    x["beta"] = x["beta"].float().sigmoid()
    return x


PEER = Peer("nvidia-cudnn-frontend", _build, _refusal, _note)
