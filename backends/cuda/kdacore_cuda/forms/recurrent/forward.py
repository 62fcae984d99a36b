"""Host side of the recurrent ops: ``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule``
in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.chosen import chosen
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel, recurrent_tile
from kdacore_cuda.kernel_parameters import FLAGS, GATES, ITEM_SIZES, RECURRENT
from kdacore_cuda.request_encoding import contiguous_token_strides, division, is_int64, token_flags, type_code
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.prepacked_launch import PrepackedLauncher
from kdacore_cuda.runtime.torch_arguments import (
    ALIGNMENT,
    address,
    contiguous,
    contiguous_rows,
    token_arguments,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")

FULL_DEVICE_ITEMS = 128
"""Sequences and heads from which the next launch may be placed before this one starts. With fewer,
several launches would wait on the device at once, which was slower."""
PER_CALL = tuple(name for name, _ in RECURRENT.fields[:17])
"""Parameters that change from call to call: addresses, and the row strides of states."""


class RecurrentLaunch(NamedTuple):
    """A launcher with what the request and the arrays' strides determine packed, and its grid."""

    launcher: PrepackedLauncher
    grid: int


class RecurrentPlan:
    """What the request alone determines, the launch for contiguous arrays, and those for other
    strides seen so far."""

    __slots__ = (
        *("_launches", "arch", "contiguous_launch", "o_shape", "request", "state_dtype", "state_row"),
        *("state_size", "strides", "written_indices"),
    )

    def __init__(self, r: Request) -> None:
        self.request = r
        self.arch = arch_of(r)
        self.strides = contiguous_token_strides(r)
        self.state_dtype = torch_dtype(r, r.state_dtype)
        self.state_size = ITEM_SIZES[r.state_dtype]
        self.o_shape = (r.B, r.T, r.HV, r.V)
        self.state_row = r.HV * r.K * r.V
        self.written_indices = r.written_indices if r.inplace_state else ""
        self._launches: dict[tuple[int, ...], RecurrentLaunch] = {}
        self.contiguous_launch = _make_launch(r, self.strides, chosen(r).mode)

    def launch_for(self, strides: tuple[int, ...]) -> RecurrentLaunch:
        """The launch for these batch, token and head strides of q, k, v, g and beta, and any row
        stride of states."""
        found = self._launches.get(strides)
        if found is None:
            found = self._launches[strides] = _make_launch(self.request, strides, RecurrentMode.GENERAL)
        return found


def _make_launch(r: Request, strides: tuple[int, ...], mode: RecurrentMode) -> RecurrentLaunch:
    written = r.written_indices if r.inplace_state else ""
    rows_read, rows_written = _width(r, "state_indices"), _width(r, written)
    scatter = rows_written > 0 and r.spec(written).shape[1:] != () and (r.packed or r.T > 1)
    flags = (
        token_flags(r)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * is_int64(r, "state_indices")
        | FLAGS["ACCEPTED64"] * is_int64(r, "num_accepted_tokens")
        | FLAGS["WRITES64"] * is_int64(r, written)
        | FLAGS["INDEXED_OUT"] * (rows_written > 0 and not scatter)
        | FLAGS["SCATTER_TOKENS"] * scatter
        | FLAGS["CLEAR_TAIL"] * (r.packed and not r.has("out"))
    )
    bf16_state = r.state_dtype == "bfloat16"
    tile = recurrent_tile(r.K, r.state_v_first, bf16_state, mode)
    (hv_factor, hv_shift), (group_factor, group_shift) = division(r.HV), division(r.HV // r.H)
    fixed = RECURRENT.last(
        *(*strides, hv_factor, group_factor, rows_read, rows_written),
        *(r.N, r.T, r.H, r.HV, hv_shift, group_shift, r.N * r.HV >= FULL_DEVICE_ITEMS),
        *(r.null_index, GATES[r.gate], flags),
        *(type_code(r, name) for name in ("v", "g", "beta", "dt_bias")),
        *(r.scale, r.lower_bound or 0.0),
    )
    kernel = recurrent_kernel(r.K, r.state_v_first, bf16_state, mode)
    plain = Launcher(kernel, RECURRENT, tile.threads, tile.shared_bytes(r.K, r.state_v_first))
    return RecurrentLaunch(PrepackedLauncher(plain, PER_CALL, fixed), r.N * r.HV * (r.V // tile.columns))


def _width(r: Request, name: str) -> int:
    """Rows that an index array names for each sequence; 0 if it was not given."""
    if not name or not r.has(name):
        return 0
    return r.spec(name).shape[1] if len(r.spec(name).shape) == 2 else 1


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
    _, _, v, _, _, A_log, bias, initial, cu_seqlens, _, indices, accepted, out, has_initial, _, pool = inputs
    o: Any = out
    if out is None:
        o = torch.empty_like(v) if not kept else v.new_empty(plan.o_shape)
    elif not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        o = v.new_empty(plan.o_shape)
        if request.packed:
            o.copy_(out)  # rows that belong to no sequence are not written
    source, source_row = contiguous_rows(initial, plan.state_row)
    written, written_row = source, source_row
    if not request.inplace_state:
        written, written_row = None, plan.state_row
        if request.output_final_state:
            written = o.new_empty(request.state_shape, dtype=plan.state_dtype)
    elif pool is not None:
        written, written_row = contiguous_rows(pool, plan.state_row)
    A_log_at = bias_at = 0
    if A_log is not None:
        A_log = A_log if A_log.is_contiguous() else A_log.contiguous()
        A_log_at = A_log.data_ptr()
    if bias is not None:
        bias = bias if bias.is_contiguous() else bias.contiguous()
        bias_at = bias.data_ptr()
        if bias_at % ALIGNMENT:
            bias = bias.clone()
            bias_at = bias.data_ptr()
    source_at, written_at = address(source), address(written)
    indices, has_initial = contiguous(indices), contiguous(has_initial)
    cu_seqlens, accepted = contiguous(cu_seqlens), contiguous(accepted)
    named = plan.written_indices
    writes = indices if named == "state_indices" else contiguous(getattr(inputs, named)) if named else None
    launch, size = plan.contiguous_launch, plan.state_size
    aligned_states = (source_at | source_row * size | written_at | written_row * size) % ALIGNMENT == 0
    if strides is not plan.strides or not aligned_states:
        launch = plan.launch_for(strides)
    values = (
        *addresses,
        *(A_log_at, bias_at, address(cu_seqlens), o.data_ptr()),
        *(source_at, written_at, address(indices), address(accepted), address(has_initial), address(writes)),
        *(source_row, written_row),
    )
    torch_launch.launch(launch.launcher, launch.grid, plan.arch, o, values)
    del kept  # copies live until the launch is queued; the allocator reuses them in stream order
    if out is not None and o is not out:
        o = out.copy_(o)
    if request.inplace_state:
        given: Any = initial if pool is None else pool
        if written is not given:
            given.copy_(written)
            written = given
    return Outputs(o, written if request.output_final_state else None)
