"""Host side of the fused prefill kernel: torch tensors in, one launch, nothing read back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import runtime
from kdacore_cuda.arrays import aligned_rows, build_arch, is_wide, pointer, type_code
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import FLAGS, GATES, PREFILL
from kdacore_cuda.variants import CLUSTERS, prefill_kernel, prefill_shared, prefill_threads

if TYPE_CHECKING:
    import torch

SAFE_BOUND = -5.0
"""Log decays of one token at least this large let one product cover 16 tokens."""


def is_safe(request: Request) -> bool:
    """Is every log decay promised, or made, to lie in ``[-5, 0]``?"""
    if request.gate == "sigmoid":
        return request.lower_bound is not None and request.lower_bound >= SAFE_BOUND
    return request.safe_gate and request.gate == "log"


def cluster_size(items: int, processors: int, arch: str) -> int:
    """Blocks per sequence and head: as many as leave every cluster a place of its own, so all start at once."""
    if arch not in ("sm_90a", "sm_100f"):
        return 1
    return max(c for c in CLUSTERS if c == 1 or items * c <= processors)


@cache
def _launcher(K: int, cluster: int, safe: bool, float_gate: bool, arch: str) -> Launcher:
    kernel = prefill_kernel(K, cluster, safe, float_gate, arch)
    return Launcher(kernel, PREFILL, prefill_threads(K, cluster, arch), prefill_shared(K, cluster, arch))


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` without gradients on CUDA tensors, bfloat16 q, k, v.

    Sizes as in the contract; see :class:`kdacore.types.ChunkInputs`. Raises BackendBuildError or DriverError.
    """
    q, k, v = (aligned_rows(x, 8) for x in (inputs.q, inputs.k, inputs.v))
    g = inputs.g
    float_gate = type_code(g) != 1
    g = aligned_rows(g.float() if type_code(g) == 2 else g, 4 if float_gate else 8)
    o = v.new_empty(request.B, request.T, request.HV, request.V)
    h0 = None if inputs.initial_state is None else inputs.initial_state.contiguous()
    ht, ckpt = _written_states(request, h0, o)
    arch = build_arch(request.device.arch)
    cluster = cluster_size(request.N * request.HV, runtime.processors(o), arch)
    _launch(request, inputs, cluster, _launcher(request.K, cluster, is_safe(request), float_gate, arch), (q, k, v, g), (o, h0, ht, ckpt))
    return Outputs(o, ht, ckpt)


def _written_states(request: Request, h0: torch.Tensor | None, o: torch.Tensor) -> tuple[Any, Any]:
    """Arrays for the final state and the checkpoints, None where not asked for."""
    dtype = runtime.float32() if request.state_dtype == "float32" else o.dtype
    ht = o.new_empty(request.state_shape, dtype=dtype) if request.output_final_state else None
    if not request.checkpoint_every:
        return ht, None
    make = o.new_zeros if request.packed else o.new_empty  # a pack's unused rows are zero
    return ht, make(request.checkpoint_shape, dtype=dtype)


def _launch(
    request: Request, inputs: ChunkInputs, cluster: int, launcher: Launcher, rows: tuple[Any, ...], states: tuple[Any, ...]
) -> None:
    q, k, v, g = rows
    o, h0, ht, ckpt = states
    A_log, bias, cu_seqlens = (
        None if x is None else x.contiguous() for x in (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens)
    )
    flags = (
        FLAGS["L2NORM"] * request.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * request.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * request.neg_eigval
        | FLAGS["V_FIRST"] * request.state_v_first
        | FLAGS["STATE_BF16"] * (request.state_dtype == "bfloat16")
        | FLAGS["CU64"] * is_wide(cu_seqlens)
    )
    runtime.launch(
        launcher,
        request.N * request.HV * cluster,
        request,
        o,
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), inputs.beta.data_ptr()),
        *(pointer(A_log), pointer(bias), pointer(cu_seqlens), o.data_ptr()),
        *(pointer(h0), pointer(ht), pointer(ckpt)),
        *(q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + g.stride()[:3] + inputs.beta.stride()),
        request.T,
        request.N,
        request.H,
        request.HV,
        request.checkpoint_every,
        GATES[request.gate],
        flags,
        type_code(inputs.beta),
        type_code(bias),
        request.scale,
        request.lower_bound or 0.0,
    )
