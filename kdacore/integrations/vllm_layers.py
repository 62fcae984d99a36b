"""Hooks of vLLM's fused decode steps that take arrays of a layer: what the call has is not enough, or not as kdacore
reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.packed_arguments import of_each_sequence

_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Layers of Kimi K3 by the identity of their weights for decoding."""


def with_rows_of_weight(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """``fused_kda_decode``, with the convolution's weight as its layer holds it for prefill.

    vLLM passes a copy ``[3, w, H*K]``, of which no view is ``[3*H*K, w]``. A copy of our own would be out of date in a
    captured graph once weights are loaded again; the layer's parameter is what vLLM loads its copy with.
    """

    @functools.wraps(original)
    def fused_kda_decode(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        def leave() -> Any:
            return original(x, weight, *args, **kwargs)

        return compute_or_leave(handover, (x, rows_of_weight(weight), *args), kwargs, leave)

    return fused_kda_decode


def rows_of_weight(weight: Tensor) -> Tensor | None:
    """The parameter ``[D, w]`` of the layer whose ``decode_conv1d_weight`` this is; None where no layer of vLLM's
    forward context has it."""
    layer: Any = _layers.get(id(weight))
    if layer is None or layer.decode_conv1d_weight is not weight:
        found = [x for x in _layers_of_this_pass() if getattr(x, "decode_conv1d_weight", None) is weight]
        if not found:
            return None
        layer = _layers[id(weight)] = found[0]
    rows: Tensor = layer.conv1d.weight.flatten(1)
    return rows


def _layers_of_this_pass() -> list[Any]:
    context = import_module("vllm.forward_context")
    if not context.is_forward_context_available():
        return []
    return list(context.get_forward_context().no_compile_layers.values())


def with_arrays_of_layer(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Qwen's layer that convolves the packed projections and decodes."""

    @functools.wraps(original)
    def decode(
        self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, attn_metadata: Any
    ) -> Any:
        N, D = attn_metadata.num_actual_tokens, mixed_qkv.shape[1]
        conv_state, state = self.kv_cache[:2]
        if conv_state.shape[1] != D:  # [rows, L, D], vLLM's default
            conv_state = conv_state.transpose(1, 2)
        arguments = (
            of_each_sequence(mixed_qkv, N),
            of_each_sequence(b, N),
            of_each_sequence(a, N),
            of_each_sequence(core_attn_out, N),
            conv_state,
            self.conv1d.weight.flatten(1),
            self.conv1d.bias,
            self.A_log,
            self.dt_bias,
            state,
            of_each_sequence(attn_metadata.non_spec_state_indices_tensor, N),
            self.activation,
        )

        def leave() -> Any:
            return original(self, mixed_qkv, b, a, core_attn_out, attn_metadata)

        return compute_or_leave(handover, arguments, {}, leave)

    return decode
