"""Calls of ``chunk_kda`` and ``chunk_gated_delta_rule`` whose head dims no kernel has, as calls with K = V = 128.

Kernels of ``chunk_gated_delta_rule`` have K from 32 and V up to 128 that are multiples of 16, and so have some forms of
``chunk_kda``, which also split values themselves: :mod:`kdacore_cuda.forms.own_head_dims`.

Channels of q and k are filled up with zeros, which neither norms nor products notice; values too, and wider values
become several value heads that share q, k, decays and betas. So K may be anything up to 128 and V anything; what it
costs is the time of the larger call and copies of the arrays that do not have its layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request, TensorSpec
from kdacore_cuda.architectures import HEAD_DIMS

SIZE, SECTOR = 128, 16
"""Elements of a head that kernels have; those of 32 bytes, which two copies read together."""
LEAST_K = 32
"""Channels of q and k. The fewer channels keys have, the more those of a chunk overlap, and what a token adds to a
state is rounded to 16 bits: with 16 channels, betas up to 2 and gates that hardly decay, final states are wrong by
7e-3, where the contract allows 6.6e-3 (docs/lab/cuda-gated-delta.md)."""
Forward = Callable[[Request, Any], Outputs]
Backward = Callable[[Request, ChunkInputs, tuple[Any, ...], OutputGrads], InputGrads]

OPS = frozenset({"chunk_kda", "chunk_gated_delta_rule"})


def is_fitted(r: Request) -> bool:
    """Whether a call is served by the kernels of another size."""
    return r.op in OPS and not _has_kernels(r, r.needs_grad)


def _has_kernels(r: Request, backward: bool) -> bool:
    """Whether kernels read and write a call's arrays as they are; those of the backward too."""
    if r.op == "chunk_gated_delta_rule":
        return LEAST_K <= r.K and max(r.K, r.V) <= SIZE and r.K % SECTOR == r.V % SECTOR == 0
    return r.K == r.V and (r.K == SIZE or (r.K in HEAD_DIMS and not backward))


def blocks_of(r: Request) -> int:
    """Value heads of 128 that make one of the call's."""
    return -(-r.V // SIZE)


@lru_cache(maxsize=1024)
def fitted_request(r: Request) -> Request:
    """The call that is made instead."""
    HV = r.HV * blocks_of(r)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (r.B, r.T, r.H, SIZE),
        "k": (r.B, r.T, r.H, SIZE),
        "v": (r.B, r.T, HV, SIZE),
        "g": (r.B, r.T, HV) if r.scalar_gate else (r.B, r.T, HV, SIZE),
        "beta": (r.B, r.T, HV),
        "A_log": (HV,),
        "dt_bias": (HV,) if r.scalar_gate else (HV, SIZE),
        "initial_state": (r.N, HV, SIZE, SIZE),
    }
    tensors = tuple(
        (name, TensorSpec(shapes.get(name, spec.shape), spec.dtype))
        for name, spec in r.tensors
        if name != "out"
    )
    return dataclasses.replace(r, HV=HV, K=SIZE, V=SIZE, tensors=tensors, features=r.features - {"out"})


def kernel_request(r: Request) -> Request:
    """The call as kernels are planned for it: that one, or the call itself."""
    return fitted_request(r) if is_fitted(r) else r


def never(r: Request) -> bool:
    """Of a backend whose kernels read no call in place that is filled up for others."""
    return False


def forward(of_size: Forward, in_place: Callable[[Request], bool] = never) -> Forward:
    """A forward for calls of any head dims.

    Args:
        of_size: the forward of the head dims that have kernels.
        in_place: whether it takes a call of other head dims without change.
    """

    @wraps(of_size)
    def fitted(request: Request, inputs: Any) -> Outputs:
        if not is_fitted(request) or in_place(request):
            return of_size(request, inputs)
        fit = _Fit(request)
        found = of_size(fitted_request(request), fit.inputs(inputs))
        o = fit.values_of(found.o)
        if inputs.out is not None:
            o = inputs.out.copy_(o)
        state, checkpoints = (None if x is None else fit.states_of(x) for x in found[1:3])
        return Outputs(o, state, checkpoints, found.saved)

    return fitted


def backward(of_size: Backward, in_place: Callable[[Request], bool] = never) -> Backward:
    """The same of a backward, which has kernels of one size. Gradients of what several value heads share are the sums
    over them."""

    @wraps(of_size)
    def fitted(
        request: Request, inputs: ChunkInputs, saved: tuple[Any, ...], grads: OutputGrads
    ) -> InputGrads:
        if _has_kernels(request, backward=True) or in_place(request):
            return of_size(request, inputs, saved, grads)
        fit = _Fit(request)
        given = OutputGrads(
            None if grads.o is None else fit.values(grads.o),
            None if grads.final_state is None else fit.states(grads.final_state),
        )
        return fit.gradients_of(of_size(fitted_request(request), fit.inputs(inputs), saved, given))

    return fitted


class _Fit:
    """Arrays of a call to and from those of the call that is made instead."""

    def __init__(self, r: Request) -> None:
        self.r, self.blocks = r, blocks_of(r)
        self.pad = _pad_jax if r.kind == "jax" else _pad_torch

    def inputs(self, x: ChunkInputs) -> ChunkInputs:
        more = {name: self.shared(name, y) for name in _SHARED if (y := getattr(x, name)) is not None}
        if x.initial_state is not None:
            more["initial_state"] = self.states(x.initial_state)
        return x._replace(q=self.pad(x.q, SIZE), k=self.pad(x.k, SIZE), v=self.values(x.v), out=None, **more)

    def values(self, x: Any) -> Any:
        """``[B, T, HV, V]`` -> ``[B, T, HV * blocks, 128]``."""
        r = self.r
        return self.pad(x, self.blocks * SIZE).reshape(r.B, r.T, r.HV * self.blocks, SIZE)

    def values_of(self, x: Any) -> Any:
        r = self.r
        return _plain(x.reshape(r.B, r.T, r.HV, self.blocks * SIZE)[..., : r.V])

    def states(self, x: Any) -> Any:
        """``[..., HV, K, V]`` or, by the request, ``[..., HV, V, K]`` -> ``[..., HV * blocks, 128, 128]``."""
        lead = x.shape[:-3]
        if self.r.state_v_first:
            wide = self.pad(x, SIZE, self.blocks * SIZE)
        else:
            wide = self.pad(x, self.blocks * SIZE, SIZE)
            wide = _swapped(wide.reshape(*lead, self.r.HV, SIZE, self.blocks, SIZE))
        return wide.reshape(*lead, self.r.HV * self.blocks, SIZE, SIZE)

    def states_of(self, x: Any) -> Any:
        r, lead, wide = self.r, x.shape[:-3], self.blocks * SIZE
        if r.state_v_first:
            return _plain(x.reshape(*lead, r.HV, wide, SIZE)[..., : r.V, : r.K])
        x = _swapped(x.reshape(*lead, r.HV, self.blocks, SIZE, SIZE))
        return _plain(x.reshape(*lead, r.HV, SIZE, wide)[..., : r.K, : r.V])

    def shared(self, name: str, x: Any) -> Any:
        """What several value heads have in common, once for each."""
        if name in _OF_CHANNELS and not self.r.scalar_gate:
            # A bias may be flat.
            x = self.pad(x.reshape(self.r.HV, self.r.K) if x.ndim == 1 else x, SIZE)
        return x if self.blocks == 1 else _namespace(x).repeat(x, self.blocks, axis=_SHARED[name])

    def summed(self, name: str, x: Any) -> Any:
        """The gradient of that."""
        if self.blocks > 1:
            xp, axis = _namespace(x), _SHARED[name]
            each = x.reshape(*x.shape[:axis], self.r.HV, self.blocks, *x.shape[axis + 1 :])
            x = xp.astype(xp.sum(each, axis=axis + 1, dtype=xp.float32), x.dtype)
        if name in _OF_CHANNELS and not self.r.scalar_gate:
            x = _plain(x[..., : self.r.K].reshape(self.r.spec(name).shape))
        return x

    def gradients_of(self, x: InputGrads) -> InputGrads:
        more = {name: self.summed(name, y) for name in _SHARED if (y := getattr(x, name)) is not None}
        if x.initial_state is not None:
            more["initial_state"] = self.states_of(x.initial_state)
        q, k = (_plain(y[..., : self.r.K]) for y in (x.q, x.k))
        return x._replace(q=q, k=k, v=self.values_of(x.v), **more)


_SHARED = {"g": 2, "beta": 2, "A_log": 0, "dt_bias": 0}
"""Arrays that the blocks of a value head share, and their axis of value heads."""
_OF_CHANNELS = frozenset({"g", "dt_bias"})
"""Those with an axis of channels, the last, unless there is one decay a head."""


def _namespace(x: Any) -> Any:
    from array_api_compat import array_namespace

    return array_namespace(x)


def _swapped(x: Any) -> Any:
    """The two axes before the last one, exchanged."""
    *lead, a, b, last = range(x.ndim)
    return _namespace(x).permute_dims(x, (*lead, b, a, last))


def _plain(x: Any) -> Any:
    """Contiguous and no view, where an array can be otherwise."""
    return x.contiguous().detach() if hasattr(x, "contiguous") else x


def _pad_torch(x: Any, last: int, before: int = 0) -> Any:
    """Zeros behind the last axis, up to a length, and behind the one before it."""
    from torch.nn.functional import pad

    more = max(before - x.shape[-2], 0)
    return x if x.shape[-1] == last and not more else pad(x, (0, last - x.shape[-1], 0, more))


def _pad_jax(x: Any, last: int, before: int = 0) -> Any:
    """The same."""
    import jax.numpy as jnp

    more = max(before - x.shape[-2], 0) if x.ndim > 1 else 0
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, last - x.shape[-1])])
