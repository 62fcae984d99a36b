"""A Request as the integers that kernels take: type codes, flags, strides of contiguous arrays."""

from __future__ import annotations

import math

from kdacore.types import Request
from kdacore_cuda.kernel_parameters import FLAGS, TYPES

LOWEST_BOUND = -5.0
"""A gate counts as bounded if each log decay is at least this: then one product can cover 16
tokens."""


def has_bounded_gate(request: Request) -> bool:
    """Whether every log decay is promised, or computed so as, to lie in ``[LOWEST_BOUND, 0]``."""
    if request.gate == "sigmoid":
        return request.lower_bound is not None and request.lower_bound >= LOWEST_BOUND
    return request.safe_gate and request.gate == "log"


def type_code(request: Request, name: str) -> int:
    """Code of the dtype of an array argument, of :data:`kdacore_cuda.kernel_parameters.TYPES`; 0 if
    not given."""
    return TYPES[request.spec(name).dtype] if request.has(name) else 0


def is_int64(request: Request, name: str) -> bool:
    """Whether an index array was given, as int64."""
    return request.has(name) and request.spec(name).dtype == "int64"


def token_flags(r: Request) -> int:
    """Bits of ``flags`` for what is done to a call's tokens."""
    return (
        FLAGS["L2NORM"] * r.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * r.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * r.neg_eigval
        | FLAGS["CU64"] * is_int64(r, "cu_seqlens")
    )


def chunk_flags(r: Request) -> int:
    """Bits of ``flags`` of a chunk call: :func:`token_flags`, the layout and dtype of its states
    and of the indices into pools, and whether it clears rows that belong to no sequence."""
    return (
        token_flags(r)
        | FLAGS["V_FIRST"] * r.state_v_first
        | FLAGS["STATE_BF16"] * (r.state_dtype == "bfloat16")
        | FLAGS["INDEX64"] * is_int64(r, "state_indices")
        | FLAGS["WRITES64"] * is_int64(r, r.written_indices)
        | FLAGS["MARK_OFFSETS64"] * is_int64(r, "checkpoint_offsets")
        | FLAGS["MARK_ROWS64"] * is_int64(r, "checkpoint_indices")
        | FLAGS["CLEAR_TAIL"] * (r.packed and not r.has("out"))
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def contiguous_token_strides(r: Request) -> tuple[int, ...]:
    """Batch, token and head stride of q, k, v, g and beta, in elements, if all of them are
    contiguous."""
    g = (r.T * r.HV, r.HV, 1) if r.scalar_gate else (r.T * r.HV * r.K, r.HV * r.K, r.K)
    qk = (r.T * r.H * r.K, r.H * r.K, r.K)
    return (*qk, *qk, r.T * r.HV * r.V, r.HV * r.V, r.V, *g, r.T * r.HV, r.HV, 1)


MANY = 1 << 20
"""More sequences and heads than a device computes at once."""


def items_for_choice(request: Request) -> int:
    """Sequences times value heads, as far as kernels may be chosen by them.

    Where a sequence's bits must not depend on others, every call is computed as one of many.
    """
    return MANY if request.batch_invariant else request.N * request.HV


def division(divisor: int) -> tuple[int, int]:
    """A division as kernels do it, by a multiplication and a shift (csrc/common/fast_division.cuh).

    ``factor, shift`` with ``n // divisor == n * factor >> shift`` for ``0 <= n < 2**31``;
    ``factor < 2**32``, ``shift >= 31``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
