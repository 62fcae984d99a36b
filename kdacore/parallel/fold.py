"""Maps of slices: composing them, and applying those of several slices to a state.

A slice of a sequence maps the state before it to the state after it: ``S_end = M @ S_start + C``, with ``M [K, K]`` and
``C [K, V]`` for each value head, and states ``[K, V]``.

Products are computed in float64 with NumPy and torch (whatever torch's settings allow for float32), and in float32
at the highest precision with JAX. Where decays are slow M is close to the identity over thousands of tokens, and a
product in bfloat16 or TF32 would lose what the slices before it contributed.

Source: the chunk form of arXiv 2510.26692, section 3, with a chunk of any length.
"""

from __future__ import annotations

from kdacore.arrays import adapter_of
from kdacore.errors import ContractError
from kdacore.types import Array


def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """The map of two slices, one after the other, from the map of each.

    Args:
        first, second: ``(M, C)`` of each, ``[..., K, K]`` and ``[..., K, V]``, one dtype.

    Returns:
        ``(M2 @ M1, M2 @ C1 + C2)``, shaped and typed as those of ``second``. Differentiable.

    Raises:
        ContractError: shapes or dtypes do not fit.

    Examples:
        >>> import numpy as np
        >>> from kdacore.parallel import compose
        >>> half, one = np.full((1, 1), 0.5), np.ones((1, 1))
        >>> M, C = compose((half, one), (half, one))
        >>> float(M[0, 0]), float(C[0, 0])
        (0.25, 1.5)
    """
    (M1, C1), (M2, C2) = first, second
    _check("compose", ("first", M1, C1), ("second", M2, C2))
    M1, C1, M2, wide = *(widened(x) for x in (M1, C1, M2)), widened(C2)
    return narrowed(product(M2, M1), second[0]), narrowed(product(M2, C1) + wide, second[1])


def fold(M: Array, C: Array, state: Array | None = None) -> Array:
    """The state after R slices that follow one another.

    Args:
        M: ``[R, ..., K, K]``, the transitions of the slices in their order.
        C: ``[R, ..., K, V]``.
        state: ``[..., K, V]``, the state before the first; zeros when None.

    Returns:
        ``[..., K, V]`` in C's dtype. Differentiable.

    Raises:
        ContractError: shapes or dtypes do not fit.

    Examples:
        >>> import numpy as np
        >>> from kdacore.parallel import fold
        >>> fold(np.full((3, 1, 1), 0.5), np.ones((3, 1, 1)), np.full((1, 1), 2.0))
        array([[2.]])
    """
    _check("fold", ("M", M, C))
    if state is not None and tuple(state.shape) != tuple(C.shape)[1:]:
        raise ContractError("fold", "state", f"shape {list(state.shape)}", f"shape {list(C.shape[1:])}")
    return narrowed(folded(widened(M), widened(C), None if state is None else widened(state)), C)


def folded(M: Array, C: Array, state: Array | None) -> Array:
    """Like :func:`fold`, on arrays as :func:`widened` returns them."""
    for q in range(M.shape[0]):
        state = C[q] if state is None else applied(M[q], state, C[q])
    if state is None:
        raise ContractError("fold", "M", "no slice and no state", "one of the two")
    return state


def applied(M: Array, state: Array, C: Array) -> Array:
    """``M @ state + C`` of arrays as :func:`widened` returns them."""
    if _kind(M) == "torch":
        from kdacore.parallel import (
            torch_fold,
        )  # here: no framework is imported before the caller's arrays are of it

        return torch_fold.applied(M, state, C)
    return product(M, state) + C


def product(a: Array, b: Array) -> Array:
    """``a @ b`` of arrays as :func:`widened` returns them."""
    if _kind(a) == "jax":
        import jax.numpy as jnp

        return jnp.matmul(a, b, precision="highest")
    return a @ b


def widened(x: Array) -> Array:
    """``x`` in the dtype that maps are multiplied in."""
    kind = _kind(x)
    if kind == "torch":
        return x.double()
    return x.astype("float64") if kind == "numpy" else x


def narrowed(x: Array, like: Array) -> Array:
    """``x`` in the dtype of ``like``."""
    return x.to(like.dtype) if _kind(x) == "torch" else x.astype(like.dtype)


def _kind(x: Array) -> str:
    adapter = adapter_of(x)
    return "" if adapter is None else adapter.kind


def _check(function: str, *maps: tuple[str, Array, Array]) -> None:
    """Hold each (argument, M, C) to one another's shapes and dtypes."""
    first = maps[0]
    for argument, M, C in maps:
        for x in (M, C):
            if not _kind(x):
                raise ContractError(
                    function, argument, type(x).__name__, "a NumPy array, torch.Tensor or jax.Array"
                )
        if len(M.shape) < 2 or M.shape[-1] != M.shape[-2]:
            raise ContractError(function, argument, f"M of shape {list(M.shape)}", "M [..., K, K]")
        if tuple(C.shape[:-1]) != tuple(M.shape[:-1]):
            raise ContractError(
                function, argument, f"C of shape {list(C.shape)}", f"C [..., K, V] beside M {list(M.shape)}"
            )
        if tuple(M.shape) != tuple(first[1].shape) or tuple(C.shape) != tuple(first[2].shape):
            got = f"M {list(M.shape)} and C {list(C.shape)}"
            want = f"M {list(first[1].shape)} and C {list(first[2].shape)}, as those of {first[0]}"
            raise ContractError(function, argument, got, want)
        if C.dtype != M.dtype or M.dtype != first[1].dtype:
            raise ContractError(function, argument, f"dtypes {M.dtype} and {C.dtype}", "one dtype")
