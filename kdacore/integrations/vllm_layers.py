"""Hooks of methods of vLLM's layers, which hold arrays that the functions inside do not get: kdacore computes what is
several launches there in one, and reads and writes pools in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.packed_arguments import of_each_sequence


def with_steps_of_kimi(
    decode: Handover, prefill: Handover, original: Callable[..., Any]
) -> Callable[..., Any]:
    """``_forward`` of Kimi's layers: all between the projections of the input and that of the output.

    A step of decodes alone is one launch of ``decode``, convolution and gated norm included. In a step with prefills
    vLLM's convolution runs once for q, k and v, which ``prefill`` takes as columns of its result; the states stay in
    vLLM's pool; vLLM's norm follows. Steps with drafted tokens or checkpoints, and layers that were told to use
    FlashInfer, are vLLM's, whose functions may be hooked in turn.
    """
    metadata_of = import_module("vllm.forward_context").get_forward_context
    convolve = _convolution()

    @functools.wraps(original)
    def forward(
        self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> Any:
        def leave() -> Any:
            return original(self, mixed_qkv, g1, g2, beta, core_attn_out)

        m = _of_layer(self, metadata_of())
        if m is None or m.num_spec_decodes or getattr(m, "checkpoint", None) is not None:
            return leave()
        if not (m.num_prefills or m.num_decodes):
            return leave()
        T = m.num_actual_tokens
        x, norm = mixed_qkv[:T], self.o_norm
        window, state = _pools(self, x.shape[1])
        weight = self.conv1d.weight.flatten(1)
        gates = (g1[:, :T], beta[:, :T], self.A_log, self.dt_bias, self.gate_lower_bound)
        out, rows = core_attn_out[:, :T], m.non_spec_state_indices_tensor
        if not m.num_prefills:
            if getattr(self, "kda_decode_backend", "") == "flashinfer":
                return leave()
            convolution = (weight, self.conv1d.bias, window)
            gated_norm = (g2[:T], norm.weight, norm.eps, norm.activation)
            arguments = (x, *convolution, *gates, state, of_each_sequence(rows, T), out, *gated_norm)
            return compute_or_leave(decode, arguments, {}, leave)
        if getattr(self, "kda_prefill_backend", "") == "flashinfer":
            return leave()
        N = m.non_spec_query_start_loc.shape[0] - 1
        pool = (state, of_each_sequence(rows, N), of_each_sequence(m.has_initial_state, N))
        rest = (*gates, *pool, m.non_spec_query_start_loc, out)
        if not _takes(prefill, (x, *rest)):
            return leave()
        convolved = convolve(x, weight, self.conv1d.bias, "silu", window, m)
        prefill.compute(convolved, *rest)
        core_attn_out.copy_(norm(core_attn_out, g2))
        return None

    breakable = import_module("vllm.compilation.breakable_cudagraph")
    broken: Callable[..., Any] = breakable.eager_break_during_capture(forward)
    return broken


def _takes(handover: Handover, arguments: tuple[Any, ...]) -> bool:
    """Would kdacore compute a call of these arguments outside a traced graph?"""
    return handover.may_take() and handover.verdict(arguments, {})[0]


def with_prefills_of_qwen(
    decode: Handover, prefill: Handover, original: Callable[..., Any]
) -> Callable[..., Any]:
    """``_forward_core`` of Qwen's layers: a step with prefills, behind vLLM's convolution of all its tokens.

    Decodes, which come first, and prefills are one call each. The gate, beta and the norms of q and k are computed
    inside, states stay in vLLM's pool, and both calls write their part of the output. Other steps, and layers whose
    prefill backend is not vLLM's Triton kernels, are vLLM's, whose functions may be hooked in turn.
    """
    metadata_of = import_module("vllm.forward_context").get_forward_context
    convolve = _convolution()

    @functools.wraps(original)
    def forward(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
        m = _of_layer(self, metadata_of())
        if m is None or m.num_spec_decodes or not m.num_prefills or m.checkpoint is not None:
            return original(self, mixed_qkv, b, a, core_attn_out)
        if self.gdn_prefill_backend != "triton":
            return original(self, mixed_qkv, b, a, core_attn_out)
        T, D, N = m.num_actual_tokens, m.num_decodes, m.prefill_query_start_loc.shape[0] - 1
        x = mixed_qkv[:T]
        window, state = _pools(self, x.shape[1])
        weights, scale = (self.A_log, self.dt_bias), state.shape[-1] ** -0.5
        rows = (
            of_each_sequence(m.prefill_state_indices, N),
            of_each_sequence(m.prefill_has_initial_state, N),
        )
        own, out = m.non_spec_state_indices_tensor[:D], core_attn_out[:D].unsqueeze(1)
        first = (a[:D], b[:D], *weights, scale, state, out, own, True)
        rest = (a[D:T], b[D:T], *weights, state, *rows, m.prefill_query_start_loc, core_attn_out[D:T])
        if not (_takes(prefill, (x[D:], *rest)) and (D == 0 or _takes(decode, (x[:D], *first)))):
            return original(self, mixed_qkv, b, a, core_attn_out)
        weight = self.conv1d.weight.flatten(1)
        convolved = convolve(x, weight, self.conv1d.bias, self.activation, window, m)
        if D:
            decode.compute(convolved[:D], *first)
        return prefill.compute(convolved[D:], *rest)

    return forward


def _of_layer(layer: Any, context: Any) -> Any:
    """The metadata of a layer's step; None where it has none, as in runs that measure memory."""
    steps = context.attn_metadata
    return steps.get(layer.prefix) if isinstance(steps, dict) else None


def _pools(layer: Any, D: int) -> tuple[Tensor, Tensor]:
    """Windows of the convolution ``[rows, D, L]`` and states of a layer's cache."""
    window, state = layer.kv_cache[:2]
    if window.shape[1] != D:  # [rows, L, D], vLLM's default
        window = window.transpose(1, 2)
    return window, state


def _convolution() -> Callable[..., Tensor]:
    """vLLM's convolution of packed prefills ``[T, D]``, which moves the windows."""
    function = import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d").causal_conv1d_fn

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, window: Tensor, m: Any
    ) -> Tensor:
        y: Tensor = function(
            x.transpose(0, 1),
            weight,
            bias,
            activation=activation,
            conv_states=window,
            has_initial_state=m.has_initial_state,
            cache_indices=m.non_spec_state_indices_tensor,
            query_start_loc=m.non_spec_query_start_loc,
            metadata=m,
        )
        return y.transpose(0, 1)

    return convolve


def with_arrays_of_layer(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Qwen's layer that convolves the packed projections and decodes."""

    @functools.wraps(original)
    def decode(
        self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, attn_metadata: Any
    ) -> Any:
        N = attn_metadata.num_actual_tokens
        conv_state, state = _pools(self, mixed_qkv.shape[1])
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
