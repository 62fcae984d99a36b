"""Host side of the recurrent ops: ``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule``
in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda import torch_launch
from kdacore_cuda.architectures import build_arch
from kdacore_cuda.kernel_parameters import FLAGS, GATES, RECURRENT
from kdacore_cuda.launch import Launcher
from kdacore_cuda.plan_cache import PlanCache
from kdacore_cuda.prepacked_launch import PrepackedLauncher
from kdacore_cuda.recurrent_kernels import RecurrentMode, recurrent_kernel, recurrent_mode, recurrent_tile
from kdacore_cuda.request_encoding import contiguous_token_strides, is_int64, token_flags, type_code
from kdacore_cuda.torch_arguments import ALIGNMENT, contiguous, token_arguments

FULL_DEVICE_ITEMS = 128
"""Sequences and heads from which the next launch may be placed before this one starts. With fewer,
several launches would wait on the device at once, which was slower."""
PER_CALL = tuple(name for name, _ in RECURRENT.fields[:16])
"""Parameters that change from call to call: addresses, and the row strides of states and
indices."""


def division(divisor: int) -> tuple[int, int]:
    """``factor, shift`` with ``n // divisor == n * factor >> shift`` for ``0 <= n < 2**31``;
    ``shift >= 31``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


class RecurrentLaunch(NamedTuple):
    """A launcher with what the request and the arrays' strides determine packed, and its grid."""

    launcher: PrepackedLauncher
    grid: int


class RecurrentPlan:
    """What the request alone determines, the launch for contiguous arrays, and those for other
    strides seen so far."""

    __slots__ = (
        *("_launches", "arch", "contiguous_launch", "indices_row", "o_shape", "request", "state_dtype"),
        *("state_row", "state_size", "strides"),
    )

    def __init__(self, r: Request) -> None:
        self.request = r
        self.arch = build_arch(r.device.arch)
        self.strides = contiguous_token_strides(r)
        self.state_dtype = getattr(torch, r.state_dtype)
        self.state_size = self.state_dtype.itemsize
        self.o_shape = (r.B, r.T, r.HV, r.V)
        self.state_row = r.HV * r.K * r.V
        self.indices_row = r.spec("state_indices").shape[1] if r.state_indices_ndim == 2 else 1
        self._launches: dict[tuple[int, ...], RecurrentLaunch] = {}
        self.contiguous_launch = _make_launch(r, self.strides, recurrent_mode(r))

    def launch_for(self, strides: tuple[int, ...]) -> RecurrentLaunch:
        """The launch for these batch, token and head strides of q, k, v, g and beta, and any row
        stride of states."""
        found = self._launches.get(strides)
        if found is None:
            found = self._launches[strides] = _make_launch(self.request, strides, RecurrentMode.GENERAL)
        return found


def _make_launch(r: Request, strides: tuple[int, ...], mode: RecurrentMode) -> RecurrentLaunch:
    flags = (
        token_flags(r)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * is_int64(r, "state_indices")
        | FLAGS["ACCEPTED64"] * is_int64(r, "num_accepted_tokens")
        | FLAGS["INDEXED_OUT"] * (r.inplace_state and r.state_indices_ndim == 1)
        | FLAGS["SCATTER_TOKENS"] * (r.inplace_state and r.state_indices_ndim == 2)
    )
    bf16_state = r.state_dtype == "bfloat16"
    tile = recurrent_tile(r.K, r.state_v_first, bf16_state, mode)
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    fixed = RECURRENT.last(
        *(*strides, hv_factor, group_factor),
        *(r.T, r.H, r.HV, hv_shift, group_shift, r.N * r.HV >= FULL_DEVICE_ITEMS),
        *(GATES[r.gate], flags),
        *(type_code(r, name) for name in ("v", "g", "beta", "dt_bias")),
        *(r.scale, r.lower_bound or 0.0),
    )
    kernel = recurrent_kernel(r.K, r.state_v_first, bf16_state, mode)
    plain = Launcher(kernel, RECURRENT, tile.threads, tile.shared_bytes(r.K, r.state_v_first))
    return RecurrentLaunch(PrepackedLauncher(plain, PER_CALL, fixed), r.N * r.HV * (r.V // tile.columns))


plan_of = PlanCache(RecurrentPlan)


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on CUDA tensors. Nothing is
    read back.

    Args:
        request: K = V = 64 or 128, no gradients; every other option of the two ops is served.
        inputs: its arrays, shaped as :class:`kdacore.types.RecurrentInputs` says.

    Returns:
        ``o`` ``[B, T, HV, V]``, and the final state where the request asks for it:
        ``request.state_shape``, or the pool itself where states are updated in place.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    plan = plan_of(request)
    addresses, strides, kept = token_arguments(inputs, request.scalar_gate, plan.strides)
    _, _, v, _, _, A_log, bias, initial, cu_seqlens, _, indices, accepted, out, *_ = inputs
    o: Any = out
    if out is None:
        o = torch.empty_like(v) if not kept else v.new_empty(plan.o_shape)
    elif not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        o = v.new_empty(plan.o_shape)
    source = written = initial
    source_row = plan.state_row
    if source is not None and not source.is_contiguous():
        if not source[:1].is_contiguous():
            source = written = source.contiguous()  # rows may have any stride; a row itself is contiguous
        source_row = source.stride(0)
    if not request.inplace_state:
        written = (
            o.new_empty(request.state_shape, dtype=plan.state_dtype) if request.output_final_state else None
        )
    A_log_at = bias_at = source_at = written_at = written_row = indices_at = 0
    if A_log is not None:
        A_log = A_log if A_log.is_contiguous() else A_log.contiguous()
        A_log_at = A_log.data_ptr()
    if bias is not None:
        bias = bias if bias.is_contiguous() else bias.contiguous()
        bias_at = bias.data_ptr()
        if bias_at % ALIGNMENT:
            bias = bias.clone()
            bias_at = bias.data_ptr()
    if source is not None:
        source_at = source.data_ptr()
    if written is source:
        written_at, written_row = source_at, source_row
    elif written is not None:
        written_at, written_row = written.data_ptr(), plan.state_row
    if indices is not None:
        indices = indices if indices.is_contiguous() else indices.contiguous()
        indices_at = indices.data_ptr()
    cu_seqlens, accepted = contiguous(cu_seqlens), contiguous(accepted)
    launch = plan.contiguous_launch
    if strides is not plan.strides or (source_at | source_row * plan.state_size) % ALIGNMENT:
        launch = plan.launch_for(strides)
    values = (
        *addresses,
        *(A_log_at, bias_at, 0 if cu_seqlens is None else cu_seqlens.data_ptr(), o.data_ptr()),
        *(source_at, written_at, indices_at, 0 if accepted is None else accepted.data_ptr()),
        *(source_row, written_row, plan.indices_row),
    )
    torch_launch.launch(launch.launcher, launch.grid, plan.arch, o, values)
    del kept  # copies live until the launch is queued; the allocator reuses them in stream order
    if out is not None and o is not out:
        o = out.copy_(o)
    if request.inplace_state:
        pool: Any = initial
        if written is not pool:
            pool.copy_(written)
            written = pool
    return Outputs(o, written if request.output_final_state else None)
