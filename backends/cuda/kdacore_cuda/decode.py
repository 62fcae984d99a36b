"""Host side of the recurrent kernels: torch tensors in, one launch, nothing read back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda import runtime
from kdacore_cuda.arrays import aligned_rows, is_wide, pointer, type_code
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import DECODE, FLAGS, GATES
from kdacore_cuda.variants import decode_columns, decode_kernel, decode_warps

if TYPE_CHECKING:
    import torch

TOKENS = 16
"""Tokens whose gates and norms a block prepares together; ``TOKENS`` in decode.cu."""


def shared_bytes(K: int, T: int) -> int:
    """Dynamic shared memory: q, k, decay and beta of up to 16 tokens."""
    return min(T, TOKENS) * (3 * K + 4) * 4


@cache
def _launcher(K: int, tokens: int, v_first: bool, bf16_state: bool) -> Launcher:
    kernel = decode_kernel(K, v_first, bf16_state)
    return Launcher(kernel, DECODE, 32 * decode_warps(v_first), shared_bytes(K, tokens))


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on CUDA tensors.

    Sizes as in the contract; see :class:`kdacore.types.RecurrentInputs`. Every option of the two ops is served but
    gradients. Raises BackendBuildError or DriverError.
    """
    q, k, v = (aligned_rows(x, 4) for x in (inputs.q, inputs.k, inputs.v))
    g = inputs.g if request.scalar_gate else aligned_rows(inputs.g, 4)
    bias = inputs.dt_bias
    if bias is not None:
        bias = (
            bias.contiguous() if request.scalar_gate else aligned_rows(bias.reshape(request.HV, request.K), 4)
        )
    out = inputs.out
    o = (
        out
        if out is not None and out.is_contiguous()
        else v.new_empty(request.B, request.T, request.HV, request.V)
    )
    source, written = _states(request, inputs, o)
    _launch(request, inputs, (q, k, v, g, bias, o), source, written)
    if out is not None and o is not out:
        out.copy_(o)
        o = out
    final = written if request.output_final_state else None
    if request.inplace_state:
        pool = inputs.initial_state
        if written is not pool:
            pool.copy_(written)
        final = pool if request.output_final_state else None
    return Outputs(o, final)


def _states(request: Request, inputs: RecurrentInputs, o: torch.Tensor) -> tuple[Any, Any]:
    """The array states are read from, and the one they are written to (None: nothing is written)."""
    source = inputs.initial_state
    if source is not None and not source[0].is_contiguous():
        source = source.contiguous()
    if request.inplace_state:
        return source, source
    if not request.output_final_state:
        return source, None
    dtype = source.dtype if source is not None else runtime.float32()
    return source, o.new_empty(request.state_shape, dtype=dtype)


def _flags(request: Request, inputs: RecurrentInputs) -> int:
    return (
        FLAGS["L2NORM"] * request.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * request.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * request.neg_eigval
        | FLAGS["SCALAR_GATE"] * request.scalar_gate
        | FLAGS["CU64"] * is_wide(inputs.cu_seqlens)
        | FLAGS["INDEX64"] * is_wide(inputs.state_indices)
        | FLAGS["ACCEPTED64"] * is_wide(inputs.num_accepted_tokens)
        | FLAGS["INDEXED_OUT"] * (request.inplace_state and request.state_indices_ndim == 1)
        | FLAGS["SCATTER_TOKENS"] * (request.inplace_state and request.state_indices_ndim == 2)
    )


def _launch(
    request: Request, inputs: RecurrentInputs, rows: tuple[Any, ...], source: Any, written: Any
) -> None:
    q, k, v, g, bias, o = rows
    indices, accepted, cu_seqlens = (
        None if x is None else x.contiguous()
        for x in (inputs.state_indices, inputs.num_accepted_tokens, inputs.cu_seqlens)
    )
    A_log = None if inputs.A_log is None else inputs.A_log.contiguous()
    bf16_state = request.state_dtype == "bfloat16"
    launcher = _launcher(request.K, min(request.T, TOKENS), request.state_v_first, bf16_state)
    runtime.launch(
        launcher,
        request.N * request.HV * (request.V // decode_columns(request.state_v_first)),
        request,
        o,
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), inputs.beta.data_ptr()),
        *(pointer(A_log), pointer(bias), pointer(cu_seqlens), o.data_ptr()),
        *(pointer(source), pointer(written), pointer(indices), pointer(accepted)),
        *(q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + g.stride()[:3] + inputs.beta.stride()),
        0 if source is None else source.stride(0),
        0 if written is None else written.stride(0),
        0 if indices is None else indices.stride(0),
        request.T,
        request.N,
        request.H,
        request.HV,
        GATES[request.gate],
        _flags(request, inputs),
        type_code(v),
        type_code(g),
        type_code(inputs.beta),
        type_code(bias),
        request.scale,
        request.lower_bound or 0.0,
    )
