"""Torch tensors as the addresses and strides a kernel takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kdacore.types import Request

ALIGNMENT = 16
"""Bytes the kernels read at once; every row of q, k, v and g starts on a multiple of it."""
_MAX_TOKEN_STRIDE = 2**27
"""Elements from one token to the next: kernels hold that distance, in bytes, in 32 bits. Other
strides have 64."""

TokenArguments = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]
"""q, k, v, g and beta for a kernel. Addresses; batch, token and head stride of each, in elements;
the tensors to keep until the launch is queued, copies among them. A plain tuple, because making a
named one takes as long as reading four addresses."""


def token_arguments(inputs: Any, scalar_gate: bool, contiguous: tuple[int, ...]) -> TokenArguments:
    """The five token arrays of a call. Arrays whose layout kernels cannot read are copied.

    Args:
        inputs: its first five fields are q, k, v, g and beta.
        scalar_gate: ``g`` is ``[B, T, HV]``, which needs no alignment.
        contiguous: the strides of contiguous arrays. This object is returned where all are
            contiguous.
    """
    q, k, v, g, beta = inputs[:5]
    if (
        q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and g.is_contiguous()
        and beta.is_contiguous()
    ):
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr())
        if (
            not (addresses[0] | addresses[1] | addresses[2] | (0 if scalar_gate else addresses[3]))
            % ALIGNMENT
        ):
            return addresses, contiguous, ()
    q, k, v = aligned(q), aligned(k), aligned(v)
    if not scalar_gate:
        g = aligned(g)
    kept = (q, k, v, g, beta)
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3] + g.stride()[:3] + beta.stride()
    return tuple(x.data_ptr() for x in kept), strides, kept


def strides_without_copies(
    inputs: Any, scalar_gate: bool, contiguous: tuple[int, ...], small: tuple[torch.Tensor | None, ...]
) -> tuple[int, ...] | None:
    """Strides of the five token arrays as :func:`token_arguments` returns them.

    None where one of them, or of the ``small`` arrays (which must be contiguous), would have to be
    copied.
    """
    _, strides, kept = token_arguments(inputs, scalar_gate, contiguous)
    if any(x is not y for x, y in zip(kept, inputs, strict=False)):
        return None
    return strides if all(x is None or x.is_contiguous() for x in small) else None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, T, heads, width]`` itself when all its rows are contiguous and aligned, else a
    contiguous copy."""
    size = x.element_size()
    strides = x.stride()
    misaligned = any(s * size % ALIGNMENT for s in strides[:-1]) or x.data_ptr() % ALIGNMENT
    if strides[-1] == 1 and strides[1] < _MAX_TOKEN_STRIDE and not misaligned:
        return x
    copy = x.contiguous()
    return copy if copy.data_ptr() != x.data_ptr() else x.clone()


def aligned_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer of bytes itself, or a copy of one that lies off 16 bytes."""
    return buffer.clone() if buffer.data_ptr() % ALIGNMENT else buffer


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` itself when it is contiguous or None, else a contiguous copy. For arrays that need no
    alignment."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def contiguous_rows(states: torch.Tensor | None, row: int) -> tuple[torch.Tensor | None, int]:
    """States ``[P, HV, K, V]`` whose rows are contiguous each (a copy where they are not), and the elements from one
    row to the next; ``row`` where they lie side by side."""
    if states is None or states.is_contiguous():
        return states, row
    if states[:1].is_contiguous():
        return states, states.stride(0)
    return states.contiguous(), row


def torch_dtype(request: Request, name: str) -> Any:
    """torch's dtype of that name; None for calls with other arrays, whose plans need none."""
    if request.kind != "torch":
        return None
    import torch

    return getattr(torch, name)


def address(x: torch.Tensor | None) -> int:
    """Device address; 0 for None."""
    return 0 if x is None else int(x.data_ptr())
