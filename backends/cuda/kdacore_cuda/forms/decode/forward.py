"""``fused_decode_kda`` and ``fused_decode_gated_delta_rule`` on torch tensors, in one launch."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from kdacore.types import DecodeInputs, FastCall, Outputs, Request
from kdacore_cuda.forms.decode.launches import (
    STRIDED,
    STRIDED_RECORDS,
    arguments_of_launch,
    launches_of,
    strided_of,
    strides_of,
)
from kdacore_cuda.forms.launches import ROWS
from kdacore_cuda.forms.recurrent.record_numbers import PARTS
from kdacore_cuda.forms.torch_forward import form_of
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, contiguous, contiguous_rows

_FIELDS = DecodeInputs._fields
_OUT, _READS, _WRITES = map(_FIELDS.index, ("out", "state_indices", "write_indices"))
_ON_16_BYTES = ("conv_weight", "norm_weight", "initial_state", "write_pool", "z", *PARTS)
"""Arrays that the kernels that know types read 8 or 16 bytes at a time; ``out`` every kernel writes so."""
_PLAIN, _WHOLE_Z = (
    [_FIELDS.index(name) for name in names] for names in ((*_ON_16_BYTES, "out"), ("z", "out"))
)
_TAKEN_AS_THEY_LIE = frozenset(
    {*STRIDED, *STRIDED_RECORDS, "initial_state", "write_pool", "cu_seqlens_cpu", "out"}
)


class Layout(NamedTuple):
    """How the arrays of a call lie. Of one whose arrays are all contiguous there is none."""

    strides: tuple[tuple[int, ...], ...]
    """Of the arrays of :func:`kdacore_cuda.forms.decode.launches.strided_of`; none of those that were not given."""
    rows: tuple[int, int]
    """Elements from a row of the states read, and of those written, to the next."""
    z_whole: bool
    """Four columns of z lie together, at a multiple of their bytes."""
    is_plain: bool
    """The kernels that know types can read the arrays."""


def forward(request: Request, inputs: DecodeInputs) -> Outputs:
    """The ops on CUDA tensors, of any layout. Raises BackendBuildError or DriverError."""
    given, layout = _readable(request, inputs)
    with torch.cuda.device(inputs.x.get_device()):
        found = _call(request, layout)(given)
    if found is None:
        raise ValueError(f"{request.op}: arrays lie off {ALIGNMENT} bytes after they were copied")
    o, state, _ = found
    if inputs.out is not None and given.out is not inputs.out:
        o = inputs.out.copy_(o)
    if request.inplace_state:
        pool, written = getattr(inputs, request.written_pool), getattr(given, request.written_pool)
        if written is not pool:
            pool.copy_(written)
        state = pool if request.output_final_state else None
    return Outputs(o, state)


def make_fast_call(request: Request, inputs: DecodeInputs) -> FastCall | None:
    """:func:`forward` for calls whose arrays have the layout of ``inputs``; None where one would be copied. It returns
    None, having launched nothing, where arrays lie off 16 bytes or another device is current."""
    given, layout = _readable(request, inputs)
    return _call(request, layout) if given is inputs else None


def _readable(r: Request, inputs: DecodeInputs) -> tuple[DecodeInputs, Layout | None]:
    """The arrays as the kernel can read them, ``inputs`` itself where nothing was copied, and how they lie; None: all
    are contiguous."""
    row, changed, rows = r.HV * r.K * r.V, dict[str, Any](), {}
    for name in ("initial_state", "write_pool"):
        x = getattr(inputs, name)
        y, rows[name] = contiguous_rows(x, row)
        if y is not x:
            changed[name] = y
    for name, x in zip(_FIELDS, inputs, strict=True):
        if x is None or name in _TAKEN_AS_THEY_LIE:
            continue
        if (y := contiguous(x)) is not x:
            changed[name] = y
    for name in ("x",) if r.scalar_gate else ("x", "g"):  # neighbouring channels
        x = getattr(inputs, name)
        if x.stride(-1) != 1:
            changed[name] = x.contiguous()
    out = inputs.out
    if out is not None and not (out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0):
        changed["out"] = torch.empty_like(out, memory_format=torch.contiguous_format)
        if r.packed:  # rows behind the last sequence keep what out held
            changed["out"].copy_(out)
    given = inputs._replace(**changed) if changed else inputs
    strided = [getattr(given, name) for name in strided_of(r)]
    on_16_bytes = all(
        x is None or x.data_ptr() % ALIGNMENT == 0 for x in map(given._asdict().get, _ON_16_BYTES)
    )
    of_rows = rows["initial_state"], rows[r.written_pool] if r.inplace_state else row
    if on_16_bytes and of_rows == (row, row) and all(x is None or x.is_contiguous() for x in strided):
        return given, None
    z_whole = _is_whole(given.z)
    is_plain = (
        on_16_bytes and z_whole and not any(row * ITEM_SIZES[r.state_dtype] % ALIGNMENT for row in of_rows)
    )
    is_plain = is_plain and all(
        _extent(x) < 2**31 for x in (given.x, given.g, given.beta, given.z) if x is not None
    )
    for windows in (given.conv_state, given.conv_windows):
        is_plain = is_plain and (windows is None or _extent(windows[:1]) < 2**31)
    if given.record_update is not None:
        # One decay a head is read alone.
        parts = PARTS[: 2 if r.scalar_gate else 3]
        is_plain = is_plain and all(_has_whole_rows(getattr(given, name)) for name in parts)
    strides = tuple([() if x is None else tuple(x.stride()) for x in strided])
    return given, Layout(strides, of_rows, z_whole, is_plain)


def _is_whole(z: torch.Tensor | None) -> bool:
    if z is None:
        return True
    steps = z.stride()
    return steps[-1] == 1 and not any(s % 4 for s in steps[:-1]) and z.data_ptr() % ALIGNMENT == 0


def _has_whole_rows(x: torch.Tensor) -> bool:
    """The elements of the last axis lie together, on 16 bytes where the array does."""
    steps = x.stride()
    return steps[-1] == 1 and not any(step * x.element_size() % ALIGNMENT for step in steps[:-1])


def _extent(x: torch.Tensor) -> int:
    """Elements from the first to the last."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def _make_call(r: Request, layout: Layout | None) -> FastCall:
    launches = launches_of(r, layout is None or layout.is_plain)
    numbers = launches.numbers
    if layout is not None:
        given = zip(strided_of(r), layout.strides, strict=True)
        numbers = numbers | strides_of(r, dict(given)) | dict(zip(ROWS, layout.rows, strict=True))
        numbers["z_whole"] = layout.z_whole
    packed = launches.program.pack_numbers(numbers)
    if layout is None or layout.is_plain:
        on_16_bytes = _PLAIN
    else:
        on_16_bytes = _WHOLE_Z if layout.z_whole else [_OUT]
    bound: dict[int, tuple[Any, Any]] = {}  # by device: what allocates there, and makes the launch
    take = itemgetter(*map(_FIELDS.index, arguments_of_launch(launches)))
    return partial(_run, (launches, packed, take, itemgetter(*on_16_bytes, _OUT), bound, _results_of(r)))


class _Results(NamedTuple):
    """What a call returns."""

    o: tuple[tuple[int, ...], tuple[int, ...]]
    o_dtype: torch.dtype
    state: tuple[tuple[int, ...], tuple[int, ...]]
    state_dtype: torch.dtype
    pool: int
    """The place of the pool that is written, among the arguments; -1 if none is."""
    returns_state: bool


def _results_of(r: Request) -> _Results:
    pool = _FIELDS.index(r.written_pool) if r.inplace_state else -1
    dtypes = getattr(torch, r.dtype), getattr(torch, r.state_dtype)
    o, state = form_of((r.B, r.T, r.HV, r.V)), form_of(r.state_shape)
    return _Results(o, dtypes[0], state, dtypes[1], pool, r.output_final_state)


def _run(call: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    launches, numbers, take, take_on_16_bytes, bound, results = call
    at = [0 if x is None else x.data_ptr() for x in arrays]
    index = arrays[0].get_device()
    misaligned = 0
    for x in take_on_16_bytes(at):
        misaligned |= x
    if misaligned & (ALIGNMENT - 1) or torch_launch.current_device() != index:
        return None
    here = bound.get(index)
    if here is None:
        start = executor.start_of(launches.program, launches.arch, index)
        here = bound[index] = torch_launch.allocator(arrays[0].device.type), start
    empty, start = here
    o, o_at, state, state_at, writes_at = arrays[_OUT], at[_OUT], None, 0, 0
    if o is None:
        o = empty(*results.o, results.o_dtype)
        o_at = o.data_ptr()
    if results.pool >= 0:
        state, state_at = arrays[results.pool], at[results.pool]
        writes_at = at[_WRITES] or at[_READS]
    elif results.returns_state:
        state = empty(*results.state, results.state_dtype)
        state_at = state.data_ptr()
    values = launches.program.pack_addresses(*take(at), o_at, state_at, writes_at)
    start(torch_launch.current_stream(index), values + numbers)
    return o, state if results.returns_state else None, None


_call: PlanCache[FastCall] = PlanCache(_make_call)
"""What makes a call, by the layout of its arrays."""
