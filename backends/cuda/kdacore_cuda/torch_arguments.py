"""Torch tensors as the pointers, strides and type codes a kernel takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kdacore.types import Request
from kdacore_cuda.layout import FLAGS, TYPES
from kdacore_cuda.variants import BUILD_ARCHS

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes the kernels read at once; every row of q, k, v and g starts on a multiple of it."""
_MAX_PLANS = 4096

P = TypeVar("P")


def build_arch(arch: str) -> str:
    """``sm_90`` -> ``sm_90a``: what to compile for a device."""
    return BUILD_ARCHS.get(arch, arch)


class Plans(Generic[P]):
    """What depends on the Request alone, worked out once for each Request object.

    Dispatch hands the same object to every call of one shape, so identity is the key; hashing its thirty fields would
    cost more than a launch.
    """

    def __init__(self, make: Callable[[Request], P]) -> None:
        self._make = make
        self._plans: dict[int, tuple[Request, P]] = {}

    def __call__(self, request: Request) -> P:
        found = self._plans.get(id(request))
        if found is not None and found[0] is request:
            return found[1]
        plan = self._make(request)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[id(request)] = (request, plan)
        return plan


Rows = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]
"""q, k, v, g and beta as kernels read them: pointers; batch, token and head stride of each, in elements; copies to keep
alive until the launch. A plain tuple: making a named one takes as long as reading four pointers."""


def contiguous_strides(request: Request) -> tuple[int, ...]:
    """Strides of contiguous q, k, v, g, beta, as in :data:`Rows`."""
    r = request
    g = (r.T * r.HV, r.HV, 1) if r.scalar_gate else (r.T * r.HV * r.K, r.HV * r.K, r.K)
    qk = (r.T * r.H * r.K, r.H * r.K, r.K)
    return (*qk, *qk, r.T * r.HV * r.V, r.HV * r.V, r.V, *g, r.T * r.HV, r.HV, 1)


def rows(inputs: Any, scalar_gate: bool, contiguous: tuple[int, ...]) -> Rows:
    """The five token arrays of a call; what a kernel cannot read where it lies is copied."""
    q, k, v, g, beta = inputs[:5]
    if (
        q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and g.is_contiguous()
        and beta.is_contiguous()
    ):
        pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr())
        if not (pointers[0] | pointers[1] | pointers[2] | (0 if scalar_gate else pointers[3])) % ALIGNMENT:
            return pointers, contiguous, ()
    q, k, v = aligned(q), aligned(k), aligned(v)
    if not scalar_gate:
        g = aligned(g)
    kept = (q, k, v, g, beta)
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + g.stride()[:3] + beta.stride()
    return tuple(x.data_ptr() for x in kept), strides, kept


def strides_as_given(
    inputs: Any, scalar_gate: bool, contiguous: tuple[int, ...], small: tuple[torch.Tensor | None, ...]
) -> tuple[int, ...] | None:
    """Strides of the five token arrays; None where one of them, or of the ``small`` ones, would have to be copied."""
    _, strides, kept = rows(inputs, scalar_gate, contiguous)
    if any(x is not y for x, y in zip(kept, inputs, strict=False)):
        return None
    return strides if all(x is None or x.is_contiguous() for x in small) else None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, T, heads, width]`` itself when all its rows are contiguous and aligned, else a contiguous copy."""
    size = x.element_size()
    strides = x.stride()
    ragged = any(s * size % ALIGNMENT for s in strides[:-1])
    if strides[-1] == 1 and strides[1] < _MAX_STRIDE and not ragged and x.data_ptr() % ALIGNMENT == 0:
        return x
    copy = x.contiguous()
    return copy if copy.data_ptr() != x.data_ptr() else x.clone()


_MAX_STRIDE = 2**27
"""Elements from one token to the next; kernels keep that in bytes in 32 bits. Other strides are 64-bit."""


def spec_type(request: Request, name: str) -> int:
    """Type code of an array argument for the kernels; 0 when it was not given."""
    return TYPES[request.spec(name).dtype] if request.has(name) else 0


def is_wide(request: Request, name: str) -> bool:
    """Was this index array given as int64?"""
    return request.has(name) and request.spec(name).dtype == "int64"


def token_flags(r: Request) -> int:
    """Bits of ``flags`` that say what is done to a call's tokens."""
    return (
        FLAGS["L2NORM"] * r.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * r.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * r.neg_eigval
        | FLAGS["CU64"] * is_wide(r, "cu_seqlens")
    )


def chunk_flags(r: Request) -> int:
    """The bits of a chunk call: :func:`token_flags`, and how its states lie."""
    return (
        token_flags(r)
        | FLAGS["V_FIRST"] * r.state_v_first
        | FLAGS["STATE_BF16"] * (r.state_dtype == "bfloat16")
    )


def contiguous_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def pointer(x: torch.Tensor | None) -> int:
    """Device address, 0 for an absent array."""
    return 0 if x is None else int(x.data_ptr())


def flat(x: torch.Tensor | None) -> torch.Tensor | None:
    """A contiguous version of a small array."""
    return x if x is None or x.is_contiguous() else x.contiguous()
