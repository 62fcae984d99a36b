"""Forward calls on torch tensors: results and buffers are allocated, and the executor makes the form's launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from kdacore.types import FastCall, Outputs, Request
from kdacore_cuda.fitted_head_dims import is_fitted, never
from kdacore_cuda.forms.launches import Launches, Layout
from kdacore_cuda.forms.recurrent.record_numbers import PARTS, record_strides
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import contiguous_token_strides, strides_behind
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_cuda.runtime.plan_cache import FamilyCache, PlanCache
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, aligned, contiguous_rows


class TorchOp:
    """A forward that has launches.

    Args:
        launches_of: the launches of a request; the flag: tokens are contiguous, and states lie on 16 bytes.
        arrays: arguments that the launches take, ahead of :data:`kdacore_cuda.forms.launches.RESULTS`.
        fields: arguments of the op, in order.
        takes_rows: whether rows of states may lie apart.
        aligned_bias_and_states: ``dt_bias`` must begin on 16 bytes, as q, k, v, out, and g with a gate for each channel
            must, and so must states where ``launches_of`` was told that they do.
        takes_float16_gate: kernels take g as float16.
        in_place: of calls whose head dims are filled up, those that launches serve as they are.
    """

    def __init__(
        self,
        launches_of: Callable[[Request, bool], Launches],
        arrays: tuple[str, ...],
        fields: tuple[str, ...],
        takes_rows: Callable[[Request], bool],
        *,
        aligned_bias_and_states: bool = False,
        takes_float16_gate: bool = False,
        in_place: Callable[[Request], bool] = never,
    ) -> None:
        self.launches_of, self.arrays, self.fields, self.takes_rows = launches_of, arrays, fields, takes_rows
        self.aligned_bias_and_states, self.takes_float16_gate = aligned_bias_and_states, takes_float16_gate
        self.in_place = in_place
        self.take = itemgetter(*map(fields.index, arrays))
        """Takes what belongs to ``arrays`` out of a list with an entry for each argument."""
        self.run_of = FamilyCache(partial(_make_run, self))
        self._call: PlanCache[FastCall] = PlanCache(partial(_make_call, self))

    def forward(self, request: Request, inputs: Any) -> Outputs:
        """The op on CUDA tensors, of any layout. Raises BackendBuildError or DriverError."""
        if is_readable(self, inputs):
            found = self._call(request, None)(inputs)
            if found is not None:
                return Outputs(found[0], found[1], found[2], found[3:])
        return self._forward_in_readable_layout(request, inputs)

    def make_fast_call(self, request: Request, inputs: Any) -> FastCall | None:
        """:meth:`forward` for calls whose arrays have the layout of ``inputs``; None where one would be copied, as
        where no kernel has the head dims. It returns None, having launched nothing, where arrays lie off 16 bytes or
        another device is current."""
        if is_fitted(request) and not self.in_place(request):
            return None
        given, layout = readable(self, request, inputs)
        return self._call(request, layout) if given is inputs else None

    def _forward_in_readable_layout(self, r: Request, inputs: Any) -> Outputs:
        """A call of which kernels cannot read, or cannot write, some arrays as they lie."""
        given, layout = readable(self, r, inputs)
        with torch.cuda.device(inputs.q.get_device()):
            found = self._call(r, layout)(given)
        if found is None:
            raise ValueError(f"{r.op}: arrays lie off {ALIGNMENT} bytes after they were copied")
        o, state, checkpoints, *saved = found
        if inputs.out is not None and given.out is not inputs.out:
            o = inputs.out.copy_(o)
        if r.inplace_state:
            pool = getattr(inputs, r.written_pool)
            written = getattr(given, r.written_pool)
            if written is not pool:
                pool.copy_(written)
            state = pool if r.output_final_state else None
        return Outputs(o, state, checkpoints, tuple(saved))


Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a contiguous tensor."""


def form_of(shape: tuple[int, ...]) -> Form:
    """That of a tensor of this shape, of one axis or more."""
    return shape, strides_behind(shape[1:])


def _make_call(op: TorchOp, r: Request, layout: Layout | None) -> FastCall:
    """``layout``: None: contiguous."""
    launches = op.launches_of(r, layout is None or layout.is_plain)
    numbers = launches.program.pack_numbers(launches.with_layout(layout))
    needs_aligned_states = op.aligned_bias_and_states and (layout is None or layout.aligned_states)
    state_bits = ALIGNMENT - 1 if needs_aligned_states else 0  # of addresses of states, which must be 0
    forms = form_of((r.B, r.T, r.HV, r.V)), form_of(r.state_shape)
    buffers = [(launches.buffers.get(name, 0),) for name in ("workspace", "saved")]
    bound: dict[int, tuple[Any, Any, Any]] = {}  # by device: what allocates there, and makes the launches
    call = r, launches.program, launches.arch, numbers, state_bits, *forms, *buffers, bound
    return partial(op.run_of(r), call)


def _make_run(op: TorchOp, r: Request) -> Callable[..., tuple[Any, ...] | None]:
    """What makes the calls of a family, given what :func:`_make_call` makes of lengths and layout."""
    fields, take = op.fields, op.take
    out, reads = fields.index("out"), fields.index("state_indices")
    writes, pool = fields.index("write_indices"), fields.index(r.written_pool)
    initial, bias = fields.index("initial_state"), fields.index("dt_bias")
    # Bits of addresses that must be 0, of g and of dt_bias.
    bits = ALIGNMENT - 1
    g_bits, bias_bits = 0 if r.scalar_gate else bits, bits if op.aligned_bias_and_states else 0
    state_dtype, byte, unit = getattr(torch, r.state_dtype), torch.uint8, (1,)
    in_place, returns_state, every = r.inplace_state, r.output_final_state, r.checkpoint_every
    fresh = returns_state and not in_place

    def run(call: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        r, program, arch, numbers, state_bits, o_form, state_form, workspace_shape, saved_shape, bound = call
        at = [0 if x is None else x.data_ptr() for x in arrays]
        misaligned = (at[0] | at[1] | at[2] | at[out]) & (ALIGNMENT - 1)
        misaligned |= at[3] & g_bits | at[bias] & bias_bits | (at[initial] | at[pool]) & state_bits
        q, v, index = arrays[0], arrays[2], arrays[0].get_device()
        if misaligned or torch_launch.current_device() != index:
            return None
        here = bound.get(index)
        if here is None:
            start = executor.start_of(program, arch, index)
            here = bound[index] = torch_launch.allocator(q.device.type), start, program.pack_addresses
        empty, start, pack = here
        o, o_at, state, state_at = arrays[out], at[out], None, 0
        if o is None:
            o = empty(*o_form, v.dtype)
            o_at = o.data_ptr()
        if in_place:
            state, state_at = arrays[pool], at[pool]
        elif fresh:
            state = empty(*state_form, state_dtype)
            state_at = state.data_ptr()
        checkpoints, checkpoints_at, workspace_at, saved_at = None, 0, 0, 0
        if every:
            checkpoints = _checkpoints(r, q, state_dtype)
            checkpoints_at = checkpoints.data_ptr()
        if workspace_shape[0]:
            workspace = empty(workspace_shape, unit, byte)
            workspace_at = workspace.data_ptr()
        if saved_shape[0]:
            saved = empty(saved_shape, unit, byte)
            saved_at = saved.data_ptr()
        writes_at = (at[writes] or at[reads]) if in_place else 0
        addresses = *take(at), o_at, state_at, writes_at, checkpoints_at, workspace_at, saved_at
        start(torch_launch.current_stream(index), pack(*addresses) + numbers)
        results = o, state if returns_state else None, checkpoints
        return (*results, saved) if saved_at else results

    return run


def _checkpoints(r: Request, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised, except of a pack or where sequences may be padding: no kernel writes the unused rows there, so
    all are zero."""
    make = q.new_zeros if r.packed or r.pool_size else q.new_empty
    return make(r.checkpoint_shape, dtype=dtype)


def is_readable(op: TorchOp, inputs: Any) -> bool:
    """Whether kernels can read the arrays as they lie, all contiguous, if they are on 16 bytes."""
    if inputs.g.dtype is torch.float16 and not op.takes_float16_gate:
        return False
    for x in inputs:  # noqa: SIM110  a loop takes less than all()
        if not (x is None or x.is_contiguous()):
            return False
    return True


def readable(op: TorchOp, r: Request, inputs: Any, rows_apart: bool = True) -> tuple[Any, Layout | None]:
    """The arrays as kernels can read them, ``inputs`` itself where nothing was copied, and how they lie; None: all are
    contiguous.

    Args:
        op: the op.
        r: the call.
        inputs: its arrays.
        rows_apart: rows of states may lie apart where the op's forward allows it.
    """
    row, changed, takes_rows = r.HV * r.K * r.V, dict[str, Any](), rows_apart and op.takes_rows(r)
    if inputs.g.dtype == torch.float16 and not op.takes_float16_gate:
        changed["g"] = inputs.g.float()
    for name in ("q", "k", "v") if r.scalar_gate else ("q", "k", "v", "g"):
        x = changed.get(name, getattr(inputs, name))
        if (y := aligned(x)) is not x:
            changed[name] = y
    rows = {"initial_state": row, "write_pool": row}
    for name in rows:
        x = getattr(inputs, name)
        if not (x is None or takes_rows or x.is_contiguous()):
            x = changed[name] = x.contiguous()
        y, rows[name] = contiguous_rows(x, row)
        if y is not x:
            changed[name] = y
    for name, x in zip(op.fields, inputs, strict=True):
        if x is None or name in _TAKEN_AS_THEY_LIE or name == "cu_seqlens_cpu":
            continue
        y = x.contiguous()
        if y.data_ptr() % ALIGNMENT and (name == "out" or (name == "dt_bias" and op.aligned_bias_and_states)):
            y = y.clone()
        if y is not x:
            changed[name] = _fresh_output(r, x) if name == "out" else y
    given = inputs._replace(**changed) if changed else inputs
    tokens = given.q, given.k, given.v, given.g, given.beta
    strides = tuple([s for x in tokens for s in x.stride()[:3]])
    of_rows = rows["initial_state"], rows[r.written_pool] if r.inplace_state else row
    states = given.initial_state, getattr(given, r.written_pool) if r.inplace_state else None
    given_states = [
        (x, y * ITEM_SIZES[r.state_dtype]) for x, y in zip(states, of_rows, strict=True) if x is not None
    ]
    aligned_states = not any((x.data_ptr() | size) % ALIGNMENT for x, size in given_states)
    records = [getattr(given, name) for name in PARTS] if r.has(PARTS[0]) else []
    is_contiguous = all(x.is_contiguous() for x in tokens)
    if is_contiguous:
        strides = contiguous_token_strides(r)  # of axes of one element torch's may differ
        if aligned_states and of_rows == (row, row) and all(x.is_contiguous() for x in records):
            return given, None
    is_plain = is_contiguous and aligned_states
    return given, Layout(strides, of_rows, aligned_states, is_plain, record_strides(r, records))


_TAKEN_AS_THEY_LIE = frozenset({"q", "k", "v", "g", "beta", "initial_state", "write_pool", *PARTS})
"""Or copied already."""


def _fresh_output(r: Request, out: torch.Tensor) -> torch.Tensor:
    """Memory for an output that kernels cannot write where it lies; rows of no sequence are not written."""
    o = out.new_empty(out.shape)
    return o.copy_(out) if r.packed else o
