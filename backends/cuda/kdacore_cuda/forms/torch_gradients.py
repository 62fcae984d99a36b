"""Backward calls on torch tensors: gradients and buffers are allocated, and the executor makes the op's launches.
Nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kdacore.types import FastGradients, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.launches import Launches, Layout
from kdacore_cuda.forms.torch_forward import Form, TorchOp, form_of, is_readable, readable
from kdacore_cuda.runtime import executor, torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, aligned_bytes

LARGEST_FLOAT16 = 65504.0

Backward = Callable[[tuple[Any, ...], tuple[Any, ...], Any, Any], "tuple[Any, ...] | None"]
"""As :attr:`kdacore.types.FastGradients.backward`."""


class TorchGradients:
    """A backward that has launches.

    Args:
        forward: the op's forward.
        launches_of: the launches of a request's backward in two groups, given which gradients are wanted and what the
            forward saved. What each takes: ``FIRST_ARRAYS`` and ``SECOND_ARRAYS`` of
            :mod:`kdacore_cuda.forms.backward.launches`. Without a first group the second takes ``d_ht`` and ``d_h0``
            behind ``d_o``, and the buffer ``workspace`` in the place of ``both``.
        saved_kind: what the forward of a request saves, as :attr:`kdacore_cuda.choice.Choice.saves`.
    """

    def __init__(
        self,
        forward: TorchOp,
        launches_of: Callable[[Request, InputGrads, str], tuple[Launches | None, Launches]],
        saved_kind: Callable[[Request], str],
    ) -> None:
        self.forward, self.launches_of, self.saved_kind = forward, launches_of, saved_kind
        self._backward_of: PlanCache[Backward] = PlanCache(partial(_make_backward, self))

    def backward(
        self, request: Request, inputs: Any, saved: tuple[Any, ...], grads: OutputGrads
    ) -> InputGrads:
        """Gradients with respect to every differentiable input.

        Args:
            request: the call that the forward served; bfloat16 q, k, v, K = V = 128.
            inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says, of any layout.
            saved: what the forward saved, or nothing: then it is recomputed.
            grads: those of ``o`` ``[B, T, HV, V]`` and of ``final_state`` (``request.state_shape``); either may be
                None.

        Returns:
            Gradients with the shape and dtype of their inputs, None where the input is None.

        Raises:
            BackendBuildError: a kernel had to be compiled and could not be.
            DriverError: the driver refused a launch.
        """
        wanted = InputGrads(*[x is not None for x in inputs[: len(InputGrads._fields)]])
        kind, found = self.saved_kind(request) if saved else "", None
        if is_readable(self.forward, inputs):
            found = self._backward_of(request, (None, wanted, kind))(inputs, saved, *grads)
        if found is None:
            given, layout = readable(self.forward, request, inputs, rows_apart=False)
            call = self._backward_of(request, (layout, wanted, kind))
            with torch.cuda.device(inputs.q.get_device()):
                found = call(given, tuple([aligned_bytes(x) for x in saved]), *grads)
        if found is None:
            raise ValueError(f"{request.op}: arrays lie off {ALIGNMENT} bytes after they were copied")
        gradients = InputGrads(*found)
        if gradients.g.dtype is not inputs.g.dtype:
            gradients = gradients._replace(g=narrowed(gradients.g, inputs.g.dtype))
        return gradients

    def make_fast_gradients(
        self, request: Request, inputs: Any, wanted: tuple[bool, ...]
    ) -> FastGradients | None:
        """The forward and :meth:`backward` for calls of ``request`` whose arrays have the layout of ``inputs``.

        None where an array would be copied. The returned backward returns None, having launched nothing, where q, k,
        v, a gate for each channel or what was saved is not 16-byte aligned, where nothing was, and where another device
        is current.
        """
        forward = self.forward.make_fast_call(request, inputs)
        given, layout = readable(self.forward, request, inputs, rows_apart=False)
        if forward is None or given is not inputs:
            return None
        call = layout, InputGrads(*wanted), self.saved_kind(request)
        return FastGradients(forward, self._backward_of(request, call))


def narrowed(dg: Any, dtype: torch.dtype) -> Any:
    """The gradient of a gate in the dtype of the gate, which kernels may not write if it is float16. It saturates."""
    return dg if dg.dtype == dtype else dg.clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(dtype)


def _make_backward(op: TorchGradients, r: Request, call: tuple[Layout | None, InputGrads, str]) -> Backward:
    """``call``: how arrays lie, the gradients that are wanted, what the forward saved."""
    layout, wanted, saved_kind = call
    first, second = op.launches_of(r, wanted, saved_kind)
    second_program, arch, unit, byte = second.program, second.arch, (1,), torch.uint8
    pack_second = second_program.pack_addresses
    numbers_second = second_program.pack_numbers(second.with_layout(layout))
    second_shape, zeroed_shape = ((second.buffers[name],) for name in ("second", "zeroed"))
    if first is None:
        workspace_shape = (second.buffers["workspace"],)
    else:
        first_program, pack_first = first.program, first.program.pack_addresses
        numbers_first = first_program.pack_numbers(first.with_layout(layout))
        workspace_shape, first_shape = ((first.buffers[name],) for name in ("both", "first"))
    bound: dict[int, tuple[Any, Any, Any]] = {}
    """By device: what allocates there, and what makes the launches of both groups."""
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    specs, o_form = dict(r.tensors), form_of((r.B, r.T, r.HV, r.V))
    g_bits = 0 if r.scalar_gate else ALIGNMENT - 1
    forms = [
        form_of(specs[name].shape) if is_wanted else None
        for name, is_wanted in zip(InputGrads._fields, wanted, strict=True)
    ]

    def backward(arrays: tuple[Any, ...], saved: tuple[Any, ...], d_o: Any, d_ht: Any) -> Any:
        at = [0 if x is None else x.data_ptr() for x in arrays]
        q, index = arrays[0], arrays[0].get_device()
        if (at[0] | at[1] | at[2] | at[3] & g_bits) % ALIGNMENT or current_device() != index:
            return None
        saved_at = 0
        if saved_kind:
            saved_at = saved[0].data_ptr() if saved else 0
            if not saved_at or saved_at % ALIGNMENT:
                return None
        here = bound.get(index)
        if here is None:
            start_first = None if first is None else executor.start_of(first_program, arch, index)
            start_second = executor.start_of(second_program, arch, index)
            here = bound[index] = (torch_launch.allocator(q.device.type), start_first, start_second)
        empty, start_first, start_second = here
        if d_o is None:
            d_o = empty(*o_form, arrays[2].dtype).zero_()
        elif not d_o.is_contiguous():
            d_o = d_o.contiguous()
        if d_o.data_ptr() % ALIGNMENT:
            d_o = d_o.clone()
        if d_ht is not None:
            d_ht = d_ht.contiguous()
        d_h0 = _like(empty, forms[7], arrays[7])
        # Arguments of the op come in the order of INPUTS, but for the last two.
        given = (*at[:7], at[8], at[7], d_o.data_ptr())
        of_states: Any = (
            0 if d_ht is None else d_ht.data_ptr(),
            0 if d_h0 is None else d_h0.data_ptr(),
        )
        stream = current_stream(index)
        workspace = empty(workspace_shape, unit, byte)
        workspace_at = workspace.data_ptr()
        if start_first is not None:
            operands = empty(first_shape, unit, byte)
            start_first(
                stream,
                pack_first(*given, *of_states, saved_at, workspace_at, operands.data_ptr()) + numbers_first,
            )
            del operands  # queued: from here on its memory may become the gradients'
            of_states = ()
        second = empty(second_shape, unit, byte) if second_shape[0] else None
        zeroed = empty(zeroed_shape, unit, byte) if zeroed_shape[0] else None
        own = [0 if x is None else x.data_ptr() for x in (second, zeroed)]
        made = [_like(empty, form, x) for form, x in zip(forms[:7], arrays, strict=False)]
        made_at = [0 if x is None else x.data_ptr() for x in made]
        start_second(
            stream,
            pack_second(*given, *of_states, saved_at, workspace_at, *own, *made_at, 0, 0) + numbers_second,
        )
        return (*made, d_h0)

    return backward


def _like(empty: Any, form: Form | None, x: torch.Tensor | None) -> Any:
    """A contiguous tensor of a form and a tensor's dtype; None without either."""
    return None if form is None or x is None else empty(*form, x.dtype)
