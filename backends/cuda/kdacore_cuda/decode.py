"""Host side of the recurrent kernels: torch tensors in, one launch, nothing read back."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda import runtime
from kdacore_cuda.arrays import Plans, build_arch, contiguous_strides, flat, is_wide, rows, spec_type
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import DECODE, FLAGS, GATES
from kdacore_cuda.variants import DECODE_COLUMNS, DECODE_WARPS, decode_kernel

TOKENS = 16
"""Tokens whose gates and norms a block prepares together; ``TOKENS`` in decode.cu."""


def shared_bytes(K: int, T: int) -> int:
    """Dynamic shared memory: q, k, decay and beta of up to 16 tokens, and partial sums of the ``[K, V]`` kernel."""
    return min(T, TOKENS) * (3 * K + 4) * 4 + 2 * DECODE_WARPS * 128


@cache
def _launcher(K: int, tokens: int, v_first: bool, bf16_state: bool) -> Launcher:
    kernel = decode_kernel(K, v_first, bf16_state)
    return Launcher(kernel, DECODE, 32 * DECODE_WARPS, shared_bytes(K, tokens))


class _Plan(NamedTuple):
    launcher: Launcher
    grid: int
    arch: str
    strides: tuple[int, ...]
    sizes: tuple[Any, ...]
    """What follows the strides in the parameters."""
    state_dtype: Any
    o_shape: tuple[int, ...]


def _make_plan(r: Request) -> _Plan:
    flags = (
        FLAGS["L2NORM"] * r.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * r.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * r.neg_eigval
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["CU64"] * is_wide(r, "cu_seqlens")
        | FLAGS["INDEX64"] * is_wide(r, "state_indices")
        | FLAGS["ACCEPTED64"] * is_wide(r, "num_accepted_tokens")
        | FLAGS["INDEXED_OUT"] * (r.inplace_state and r.state_indices_ndim == 1)
        | FLAGS["SCATTER_TOKENS"] * (r.inplace_state and r.state_indices_ndim == 2)
    )
    types = (spec_type(r, "v"), spec_type(r, "g"), spec_type(r, "beta"), spec_type(r, "dt_bias"))
    sizes = (r.T, r.N, r.H, r.HV, GATES[r.gate], flags, *types, r.scale, r.lower_bound or 0.0)
    return _Plan(
        launcher=_launcher(r.K, min(r.T, TOKENS), r.state_v_first, r.state_dtype == "bfloat16"),
        grid=r.N * r.HV * (r.V // DECODE_COLUMNS),
        arch=build_arch(r.device.arch),
        strides=contiguous_strides(r),
        sizes=sizes,
        state_dtype=getattr(torch, r.state_dtype),
        o_shape=(r.B, r.T, r.HV, r.V),
    )


_plan_of = Plans(_make_plan)


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on CUDA tensors.

    Sizes as in the contract; see :class:`kdacore.types.RecurrentInputs`. Every option of the two ops is served but
    gradients. Raises BackendBuildError or DriverError.
    """
    plan = _plan_of(request)
    pointers, strides, kept = rows(inputs, request.scalar_gate, plan.strides)
    _, _, _, _, _, A_log, bias, initial, cu_seqlens, _, indices, accepted, out = inputs
    o: Any = out
    if out is None or not out.is_contiguous():
        o = inputs.v.new_empty(plan.o_shape)
    source, written = _states(request, initial, plan.state_dtype, o)
    A_log, bias, cu_seqlens = flat(A_log), flat(bias), flat(cu_seqlens)
    indices, accepted = flat(indices), flat(accepted)
    values = (
        *pointers,
        0 if A_log is None else A_log.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        o.data_ptr(),
        0 if source is None else source.data_ptr(),
        0 if written is None else written.data_ptr(),
        0 if indices is None else indices.data_ptr(),
        0 if accepted is None else accepted.data_ptr(),
        *strides,
        0 if source is None else source.stride(0),
        0 if written is None else written.stride(0),
        0 if indices is None else indices.stride(0),
        *plan.sizes,
    )
    runtime.launch(plan.launcher, plan.grid, plan.arch, o, values)
    del kept  # copies live until the launch is queued; the allocator reuses them in stream order
    if out is not None and o is not out:
        out.copy_(o)
        o = out
    if request.inplace_state:
        pool: Any = initial
        if written is not pool:
            pool.copy_(written)
            written = pool
    return Outputs(o, written if request.output_final_state else None)


def _states(request: Request, initial: Any, dtype: Any, o: Any) -> tuple[Any, Any]:
    """The array states are read from, and the one they are written to (None: nothing is written)."""
    source = initial
    if source is not None and not source.is_contiguous() and not source[:1].is_contiguous():
        source = source.contiguous()  # rows may have any stride, what is in a row may not
    if request.inplace_state:
        return source, source
    if not request.output_final_state:
        return source, None
    return source, o.new_empty(request.state_shape, dtype=dtype)
