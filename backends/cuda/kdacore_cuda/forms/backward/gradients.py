"""Gradients of ``chunk_kda`` on torch tensors. Nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.types import ChunkInputs, FastGradients, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward.launches import launches_of
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.chunk_numbers import CHUNK as CHUNK_TOKENS
from kdacore_cuda.forms.launches import Layout
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.launches import keeps_maps
from kdacore_cuda.forms.torch_forward import Form, form_of, is_readable, readable
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, aligned_bytes

LARGEST_FLOAT16 = 65504.0

Backward = Callable[[tuple[Any, ...], tuple[Any, ...], Any, Any], "tuple[Any, ...] | None"]
"""As :attr:`kdacore.types.FastGradients.backward`."""


def backward(request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads) -> InputGrads:
    """Gradients of ``chunk_kda`` with respect to every differentiable input.

    Args:
        request: the call that the forward served; bfloat16 q, k, v, K = V = 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.
        saved: what the forward saved, or nothing: then it is recomputed, to the same bits
            (:mod:`kdacore_cuda.forms.saving_forward.workspace`), or in other segments
            (:mod:`kdacore_cuda.forms.segments.workspace`).
        grads: those of ``o`` ``[B, T, HV, V]`` and of ``final_state`` (``request.state_shape``);
            either may be None.

    Returns:
        Gradients with the shape and dtype of their inputs, None where the input is None.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    wanted = InputGrads(*[x is not None for x in inputs[: len(InputGrads._fields)]])
    kind, found = saved_kind(request) if saved else "", None
    if is_readable(CHUNK, inputs):
        found = _backward_of(request, (None, wanted, kind))(inputs, saved, grads.o, grads.final_state)
    if found is None:
        given, layout = readable(CHUNK, request, inputs, rows_apart=False)
        call = _backward_of(request, (layout, wanted, kind))
        with torch.cuda.device(inputs.q.get_device()):
            found = call(given, tuple([aligned_bytes(x) for x in saved]), grads.o, grads.final_state)
    if found is None:
        raise ValueError(f"{request.op}: arrays lie off {ALIGNMENT} bytes after they were copied")
    gradients = InputGrads(*found)
    if gradients.g.dtype is not inputs.g.dtype:
        gradients = gradients._replace(g=narrowed(gradients.g, inputs.g.dtype))
    return gradients


def narrowed(dg: Any, dtype: torch.dtype) -> Any:
    """The gradient of a gate in the dtype of the gate, which kernels do not write if it is float16. It saturates."""
    return dg if dg.dtype == dtype else dg.clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(dtype)


def saved_kind(r: Request) -> str:
    """What the forward of a request saves: as :attr:`kdacore_cuda.choice.Choice.saves`, but nothing of calls whose
    sequences have one segment."""
    saves = chosen(r).saves
    if saves == "maps":
        segments = segment_lengths.lengths_of(r).segments(-(-r.T // CHUNK_TOKENS))
        return saves if keeps_maps(r, segments) else ""
    return saves


def make_fast_gradients(
    request: Request, inputs: ChunkInputs, wanted: tuple[bool, ...]
) -> FastGradients | None:
    """The forward and :func:`backward` for calls of ``request`` whose arrays have the layout of ``inputs``.

    None where an array would be copied. The returned backward returns None, having launched nothing, where q, k, v, g
    or what was saved is not 16-byte aligned, where nothing was, and where another device is current.
    """
    forward = CHUNK.make_fast_call(request, inputs)
    given, layout = readable(CHUNK, request, inputs, rows_apart=False)
    if forward is None or given is not inputs:
        return None
    return FastGradients(forward, _backward_of(request, (layout, InputGrads(*wanted), saved_kind(request))))


def _make_backward(r: Request, call: tuple[Layout | None, InputGrads, str]) -> Backward:
    """``call``: how arrays lie, the gradients that are wanted, what the forward saved."""
    layout, wanted, saved_kind = call
    first, second = launches_of(r, wanted, saved_kind)
    given = first.with_layout(layout)
    (pack_first, numbers_first), (pack_second, numbers_second) = (
        (x.program.pack_addresses, x.program.pack_numbers(given)) for x in (first, second)
    )
    first_program, second_program, arch = first.program, second.program, first.arch
    both_shape, first_shape = ((first.buffers[name],) for name in ("both", "first"))
    second_shape, zeroed_shape = ((second.buffers[name],) for name in ("second", "zeroed"))
    unit, byte = (1,), torch.uint8
    bound: dict[int, tuple[Any, Any, Any]] = {}
    """By device: what allocates there, and what makes the launches of both groups."""
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    specs, o_form = dict(r.tensors), form_of((r.B, r.T, r.HV, r.V))
    forms = [
        form_of(specs[name].shape) if is_wanted else None
        for name, is_wanted in zip(InputGrads._fields, wanted, strict=True)
    ]

    def backward(arrays: tuple[Any, ...], saved: tuple[Any, ...], d_o: Any, d_ht: Any) -> Any:
        at = [0 if x is None else x.data_ptr() for x in arrays]
        q, index = arrays[0], arrays[0].get_device()
        if (at[0] | at[1] | at[2] | at[3]) % ALIGNMENT or current_device() != index:
            return None
        saved_at = 0
        if saved_kind:
            saved_at = saved[0].data_ptr() if saved else 0
            if not saved_at or saved_at % ALIGNMENT:
                return None
        here = bound.get(index)
        if here is None:
            first_start = executor.start_of(first_program, arch, index)
            second_start = executor.start_of(second_program, arch, index)
            here = bound[index] = (torch_launch.allocator(q.device.type), first_start, second_start)
        empty, start_first, start_second = here
        if d_o is None:
            d_o = empty(*o_form, arrays[2].dtype).zero_()
        elif not d_o.is_contiguous():
            d_o = d_o.contiguous()
        if d_o.data_ptr() % ALIGNMENT:
            d_o = d_o.clone()
        if d_ht is not None:
            d_ht = d_ht.contiguous()
        # Arguments of the op come in the order of INPUTS, but for the last two.
        given = (*at[:7], at[8], at[7])
        d_o_at, d_h0 = d_o.data_ptr(), _like(empty, forms[7], arrays[7])
        d_h0_at = 0 if d_h0 is None else d_h0.data_ptr()
        d_ht_at = 0 if d_ht is None else d_ht.data_ptr()
        stream = current_stream(index)
        both, first = empty(both_shape, unit, byte), empty(first_shape, unit, byte)
        start_first(
            stream,
            pack_first(*given, d_o_at, d_ht_at, d_h0_at, saved_at, both.data_ptr(), first.data_ptr())
            + numbers_first,
        )
        del first  # queued: from here on its memory may become the gradients'
        second = empty(second_shape, unit, byte) if second_shape[0] else None
        zeroed = empty(zeroed_shape, unit, byte) if zeroed_shape[0] else None
        buffers = [0 if x is None else x.data_ptr() for x in (both, second, zeroed)]
        made = [_like(empty, form, x) for form, x in zip(forms[:7], arrays, strict=False)]
        made_at = [0 if x is None else x.data_ptr() for x in made]
        start_second(
            stream,
            pack_second(*given, d_o_at, saved_at, *buffers, *made_at, 0, 0) + numbers_second,
        )
        return (*made, d_h0)

    return backward


def _like(empty: Any, form: Form | None, x: torch.Tensor | None) -> Any:
    """A contiguous tensor of a form and a tensor's dtype; None without either."""
    return None if form is None or x is None else empty(*form, x.dtype)


_backward_of = PlanCache(_make_backward)
