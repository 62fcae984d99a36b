"""FlashInfer's prefill of the gated delta rule: one kernel a GPU architecture, what vLLM runs on Hopper.

The kernel is compiled at the first call: up to 0.6 from CUDA C++ (needs nvcc and ninja), later by CuTe DSL.

The timed call is ``flashinfer.gdn_prefill.chunk_gated_delta_rule`` with what its callers do before: the decay itself
rather than its logarithm, beta after its sigmoid, both in float32, and q and k normalised. Releases before 0.7 accept
``use_qk_l2norm_in_kernel`` without effect, so the l2norm is FlashInfer's only where the package has a kernel for it.
Where flash-linear-attention is installed its kernels compute the other l2norms and the decay, as copies of them do in
vLLM and SGLang; else torch does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case
from kdacore.bench.peers import preparation
from kdacore.bench.peers.peer import Call, Peer, missing

SIZE = 128
OWN_L2NORM = "flashinfer.gdn_kernels.qk_l2norm"


def _refusal(case: Case) -> str:
    return missing(
        (case.op == "chunk_gated_delta_rule", "the gated delta rule over whole sequences only"),
        (case.phase in ("forward", "host"), "forward only"),
        (case.K == case.V == SIZE, f"K = V = {SIZE} only"),
        (case.dtype in ("bfloat16", "float16"), "bfloat16 and float16 only"),
    )


def _note(case: Case) -> str:
    before = "l2norm, gate and sigmoid" if case.gate_inside else "l2norm and the exponential of the decay"
    return f"{before} outside of its kernel, in the timed region"


def _build(case: Case) -> Call:
    """Tokens of all sequences in one row, their offsets (made once), value-major states."""
    import torch

    function = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    own_l2norm = importlib.util.find_spec(OWN_L2NORM) is not None
    l2norm, log_decay = _preparation(case)
    offsets: list[Any] = []
    states: list[tuple[Any, Any]] = []

    def offsets_of(arrays: Arrays) -> Any:
        if not offsets:
            uniform = torch.arange(case.B + 1, dtype=torch.int64, device=arrays["q"].device) * case.T
            offsets.append(arrays.get("cu_seqlens", uniform))
        return offsets[0]

    def value_major(state: Any) -> Any:
        """The state as its callers keep it: they transpose none at a call."""
        if state is None or case.state_v_first:
            return state
        if not states or states[0][0] is not state:
            states[:] = [(state, state.mT.contiguous())]
        return states[0][1]

    def call(arrays: Arrays) -> tuple[Any, Any]:
        q, k = (arrays[name].flatten(0, 1) for name in ("q", "k"))
        if not own_l2norm:
            q, k = l2norm(q), l2norm(k)
        o, state = function(
            q=q,
            k=k,
            v=arrays["v"].flatten(0, 1),
            g=log_decay(arrays).flatten(0, 1).exp(),
            beta=preparation.beta(case, arrays).flatten(0, 1).float(),
            initial_state=value_major(arrays.get("initial_state")),
            output_final_state=True,
            cu_seqlens=offsets_of(arrays),
            use_qk_l2norm_in_kernel=own_l2norm,
        )
        return o.unflatten(0, (case.B, case.T)), state if case.state_v_first else state.mT

    return call


def _preparation(case: Case) -> tuple[Callable[[Any], Any], Callable[[Arrays], Any]]:
    """The l2norm of q or k, and the log decay: flash-linear-attention's where it is installed, else torch's."""
    if importlib.util.find_spec("fla") is None:
        return preparation.l2norm, lambda arrays: preparation.log_decay(case, arrays)
    l2norm_fwd = importlib.import_module("fla.modules.norm.l2norm").l2norm_fwd
    gate = importlib.import_module("fla.ops.gated_delta_rule.gate").fused_gdn_gate

    def log_decay(arrays: Arrays) -> Any:
        g = arrays["g"]
        return gate(g, arrays["A_log"], arrays["dt_bias"]) if case.gate_inside else g

    return lambda x: l2norm_fwd(x)[0], log_decay


PEER = Peer("flashinfer-python", _build, _refusal, _note)
