"""A Request as the integers that kernels take: type codes, flags, strides of contiguous arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

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


def dtypes_of(r: Request) -> dict[str, str]:
    """The dtypes of the arrays that a call gives, by name."""
    return {name: spec.dtype for name, spec in r.tensors}


def type_code(request: Request, name: str) -> int:
    """Code of an array argument's dtype, of :data:`kdacore_cuda.kernel_parameters.TYPES`; 0 if it was not given."""
    return TYPES[request.spec(name).dtype] if request.has(name) else 0


def token_flags(r: Request, dtypes: Mapping[str, str]) -> int:
    """Bits of ``flags`` for what is done to a call's tokens."""
    return (
        FLAGS["L2NORM"] * r.qk_l2norm
        | FLAGS["BETA_SIGMOID"] * r.beta_sigmoid
        | FLAGS["NEG_EIGVAL"] * r.neg_eigval
        | FLAGS["CU64"] * (dtypes.get("cu_seqlens") == "int64")
    )


def decoding_flags(r: Request, dtypes: Mapping[str, str]) -> int:
    """Bits of ``flags`` of a recurrent or fused decode call: :func:`token_flags`, the gate, the dtypes of index arrays,
    and which states are written."""
    written, axes = r.written_indices if r.inplace_state else "", axes_of_written(r)
    scatter = axes == 2 and (r.packed or r.T > 1)
    return (
        token_flags(r, dtypes)
        | FLAGS["SCALAR_GATE"] * r.scalar_gate
        | FLAGS["INDEX64"] * (dtypes.get("state_indices") == "int64")
        | FLAGS["ACCEPTED64"] * (dtypes.get("num_accepted_tokens") == "int64")
        | FLAGS["WRITES64"] * (dtypes.get(written) == "int64")
        | FLAGS["CLEAR_TAIL"] * (r.packed and "out" not in dtypes)
        | FLAGS["SCATTER_TOKENS" if scatter else "INDEXED_OUT"] * (axes > 0)
    )


def axes_of_written(r: Request) -> int:
    """Of the array with the rows that are written, 0 without."""
    return (r.write_indices_ndim or r.state_indices_ndim) if r.inplace_state else 0


def index_width(r: Request, name: str, axes: int) -> int:
    """Rows that an index array of so many axes names for each sequence; 0 if it was not given."""
    return axes if axes < 2 else r.spec(name).shape[1]


def chunk_flags(r: Request) -> int:
    """Bits of ``flags`` of a chunk call: :func:`token_flags`, the layout and dtype of its states
    and of the indices into pools, and whether it clears rows that belong to no sequence."""
    dtypes = dtypes_of(r)
    return (
        token_flags(r, dtypes)
        | FLAGS["V_FIRST"] * r.state_v_first
        | FLAGS["STATE_BF16"] * (r.state_dtype == "bfloat16")
        | FLAGS["INDEX64"] * (dtypes.get("state_indices") == "int64")
        | FLAGS["WRITES64"] * (dtypes.get(r.written_indices) == "int64")
        | FLAGS["MARK_OFFSETS64"] * (dtypes.get("checkpoint_offsets") == "int64")
        | FLAGS["MARK_ROWS64"] * (dtypes.get("checkpoint_indices") == "int64")
        | FLAGS["CLEAR_TAIL"] * (r.packed and "out" not in dtypes)
    )


@lru_cache(maxsize=4096)
def strides_behind(inner: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of contiguous arrays with these axes and one in front, on whose size they do not depend."""
    strides = [1]
    for size in reversed(inner):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


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


@lru_cache(maxsize=4096)
def division(divisor: int) -> tuple[int, int]:
    """A division as kernels do it, by a multiplication and a shift (csrc/common/fast_division.cuh).

    ``factor, shift`` with ``n // divisor == n * factor >> shift`` for ``0 <= n < 2**31``;
    ``factor < 2**32``, ``shift >= 31``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
