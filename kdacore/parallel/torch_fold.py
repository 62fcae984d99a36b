"""What ranks do with maps and states of slices in torch. :mod:`kdacore.parallel.fold` says what a map is."""

from __future__ import annotations

import torch


def applied(M: torch.Tensor, state: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """``M @ state + C`` of ``[..., K, K]`` and ``[..., K, V]`` in one dtype, in one launch."""
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (C, M, state)]
    return torch.baddbmm(*flat).view(C.shape)


def folded(M: torch.Tensor, C: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """The state after slices with maps ``M`` and ``C``, one or more, in C's dtype; computed in float64.

    Args:
        M: ``[R, ..., K, K]``.
        C: ``[R, ..., K, V]``.
        state: ``[..., K, V]``, the state before the first; zeros when None.
    """
    if state is None and C.shape[0] == 1:
        return C[0]
    M, wide = M.double(), C.double()
    found = wide[0] if state is None else applied(M[0], state.double(), wide[0])
    for q in range(1, wide.shape[0]):
        found = applied(M[q], found, wide[q])
    return found.to(C.dtype)


def folded_back(M: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """The gradient of the state before slices, one or more, in B's dtype; computed in float64.

    Args:
        M: ``[R - 1, ..., K, K]`` or more: that of the last slice is not used.
        B: ``[R, ..., K, V]``: what each slice contributes itself to the gradient of the state before it.
    """
    if B.shape[0] == 1:
        return B[0]
    M, wide = M.double().mT, B.double()
    found = wide[-1]
    for q in reversed(range(wide.shape[0] - 1)):
        found = applied(M[q], found, wide[q])
    return found.to(B.dtype)
