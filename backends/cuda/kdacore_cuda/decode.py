"""Host side of the recurrent kernels: torch tensors in, one launch, nothing read back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.frameworks.torch_empty import allocator
from kdacore.types import Outputs, RecurrentInputs, Request, Step
from kdacore_cuda import runtime
from kdacore_cuda.arrays import (
    ALIGNMENT,
    Plans,
    build_arch,
    contiguous_of,
    contiguous_strides,
    flat,
    is_wide,
    rows,
    spec_type,
    strides_as_given,
    token_flags,
)
from kdacore_cuda.fixed import FixedLauncher
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import FLAGS, GATES, RECURRENT
from kdacore_cuda.variants import DECODE_ANY, decode_kernel, decode_mode, decode_tile

MANY = 128
"""Sequences and heads from which the next launch may be placed before this one begins. With fewer, several launches
come to wait on the device at once, which was slower."""
GIVEN = tuple(name for name, _ in RECURRENT.fields[:16])
"""Parameters that a call gives: addresses, and the rows of states and indices."""


def division(divisor: int) -> tuple[int, int]:
    """``factor, shift`` with ``n // divisor == n * factor >> shift`` for ``0 <= n < 2**31``; ``shift >= 31``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


class _Plan:
    """What a Request fixes, with the launch for contiguous arrays and those for other strides seen."""

    __slots__ = (
        *("_launches", "arch", "indices_row", "o_shape", "request", "state_dtype", "state_row", "state_size"),
        *("strides", "usual"),
    )

    def __init__(self, r: Request) -> None:
        self.request = r
        self.arch = build_arch(r.device.arch)
        self.strides = contiguous_strides(r)
        self.state_dtype = getattr(torch, r.state_dtype)
        self.state_size = self.state_dtype.itemsize
        self.o_shape = (r.B, r.T, r.HV, r.V)
        self.state_row = r.HV * r.K * r.V
        self.indices_row = r.spec("state_indices").shape[1] if r.state_indices_ndim == 2 else 1
        self._launches: dict[tuple[int, ...], _Launch] = {}
        self.usual = _make_launch(r, self.strides, decode_mode(r))

    def launch_for(self, strides: tuple[int, ...]) -> _Launch:
        """The launch for these batch, token and head strides of q, k, v, g and beta, and any rows of states."""
        found = self._launches.get(strides)
        if found is None:
            found = self._launches[strides] = _make_launch(self.request, strides, DECODE_ANY)
        return found


class _Launch(NamedTuple):
    launcher: FixedLauncher
    grid: int


def _make_launch(r: Request, strides: tuple[int, ...], mode: int) -> _Launch:
    flags = (
        token_flags(r)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * is_wide(r, "state_indices")
        | FLAGS["ACCEPTED64"] * is_wide(r, "num_accepted_tokens")
        | FLAGS["INDEXED_OUT"] * (r.inplace_state and r.state_indices_ndim == 1)
        | FLAGS["SCATTER_TOKENS"] * (r.inplace_state and r.state_indices_ndim == 2)
    )
    bf16_state = r.state_dtype == "bfloat16"
    tile = decode_tile(r.K, r.state_v_first, bf16_state, mode)
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    fixed = RECURRENT.last(
        *(*strides, hv_factor, group_factor),
        *(r.T, r.H, r.HV, hv_shift, group_shift, r.N * r.HV >= MANY),
        *(GATES[r.gate], flags),
        *(spec_type(r, name) for name in ("v", "g", "beta", "dt_bias")),
        *(r.scale, r.lower_bound or 0.0),
    )
    kernel = decode_kernel(r.K, r.state_v_first, bf16_state, mode)
    plain = Launcher(kernel, RECURRENT, tile.threads, tile.shared(r.K, r.state_v_first))
    launcher = FixedLauncher(plain, GIVEN, fixed)
    return _Launch(launcher, r.N * r.HV * (r.V // tile.columns))


_plan_of = Plans(_Plan)


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on CUDA tensors.

    Sizes as in the contract; see :class:`kdacore.types.RecurrentInputs`. Every option of the two ops is served but
    gradients. Raises BackendBuildError or DriverError.
    """
    plan = _plan_of(request)
    pointers, strides, kept = rows(inputs, request.scalar_gate, plan.strides)
    _, _, v, _, _, A_log, bias, initial, cu_seqlens, _, indices, accepted, out = inputs
    o: Any = out
    if out is None:
        o = torch.empty_like(v) if not kept else v.new_empty(plan.o_shape)
    elif not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        o = v.new_empty(plan.o_shape)
    source = written = initial
    source_row = plan.state_row
    if source is not None and not source.is_contiguous():
        if not source[:1].is_contiguous():
            source = written = source.contiguous()  # rows may have any stride, what is in a row may not
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
    cu_seqlens, accepted = flat(cu_seqlens), flat(accepted)
    launch = plan.usual
    if strides is not plan.strides or (source_at | source_row * plan.state_size) % ALIGNMENT:
        launch = plan.launch_for(strides)
    values = (
        *pointers,
        *(A_log_at, bias_at, 0 if cu_seqlens is None else cu_seqlens.data_ptr(), o.data_ptr()),
        *(source_at, written_at, indices_at, 0 if accepted is None else accepted.data_ptr()),
        *(source_row, written_row, plan.indices_row),
    )
    runtime.launch(launch.launcher, launch.grid, plan.arch, o, values)
    del kept  # copies live until the launch is queued; the allocator reuses them in stream order
    if out is not None and o is not out:
        o = out.copy_(o)
    if request.inplace_state:
        pool: Any = initial
        if written is not pool:
            pool.copy_(written)
            written = pool
    return Outputs(o, written if request.output_final_state else None)


def repeat(request: Request, inputs: RecurrentInputs) -> Step | None:
    """:func:`forward` for calls whose arrays lie in memory as these do: all that strides decide is decided here.

    None where an array would have to be copied, and from the step where one starts off 16 bytes.
    """
    r, plan = request, _plan_of(request)
    q, _, v, _, _, A_log, bias, source, cu_seqlens, _, indices, accepted, out = inputs
    small = (A_log, bias, cu_seqlens, indices, accepted, out)
    strides = strides_as_given(inputs, r.scalar_gate, plan.strides, small)
    if strides is None:
        return None
    if source is not None and not source[:1].is_contiguous():
        return None
    row = plan.state_row if source is None or source.is_contiguous() else source.stride(0)
    in_place, fresh = r.inplace_state, r.output_final_state and not r.inplace_state
    launch = plan.usual if strides is plan.strides else plan.launch_for(strides)
    if row * plan.state_size % ALIGNMENT or not launch.grid:
        return None
    index, current_device, current_stream = q.get_device(), runtime.current_device, runtime.current_stream
    with torch.cuda.device(index):  # loads the kernel, which is a matter of the current context
        start = runtime.starter(launch.launcher, launch.grid, plan.arch, index)
    empty = allocator(v.device.type)
    o_shape, o_strides, o_dtype = plan.o_shape, contiguous_of(plan.o_shape), v.dtype
    state_shape, state_strides, state_dtype = r.state_shape, contiguous_of(r.state_shape), plan.state_dtype
    written_row, indices_row = row if in_place else plan.state_row * fresh, plan.indices_row
    returns_state = r.output_final_state

    def step(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, A_log, bias, state, cu_seqlens, _, indices, accepted, o = arrays
        at_q, at_k, at_v, at_g = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        at_bias = 0 if bias is None else bias.data_ptr()
        at_state = written = 0 if state is None else state.data_ptr()
        at_o = 0 if o is None else o.data_ptr()
        if (at_q | at_k | at_v | at_g | at_bias | at_state | at_o) % ALIGNMENT or current_device() != index:
            return None
        if o is None:
            o = empty(o_shape, o_strides, o_dtype)
            at_o = o.data_ptr()
        if fresh:
            state = empty(state_shape, state_strides, state_dtype)
            written = state.data_ptr()
        elif not in_place:
            state, written = None, 0
        start(current_stream(index), (
            at_q, at_k, at_v, at_g, beta.data_ptr(), 0 if A_log is None else A_log.data_ptr(), at_bias,
            0 if cu_seqlens is None else cu_seqlens.data_ptr(), at_o, at_state, written,
            0 if indices is None else indices.data_ptr(), 0 if accepted is None else accepted.data_ptr(),
            row, written_row, indices_row,
        ))  # fmt: skip
        return o, state if returns_state else None, None

    return step
