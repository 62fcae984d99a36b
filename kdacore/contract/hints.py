"""What a refused call probably meant, for the end of its error message. Used on the way to an error alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from kdacore.arrays import adapter_of

Shapes = Mapping[str, tuple[int, ...]]

FLA = "kdacore.compat.fla takes flash-linear-attention's arguments as they are"
_TOKENS = ("q", "k", "v", "g", "beta")
"""The arrays that have tokens before heads."""


def exchanged(names: Sequence[str] = _TOKENS) -> str:
    """What to write for several arrays that are head-first."""
    return f"x.swapaxes(1, 2) of {', '.join(names[:-1])} and {names[-1]}"


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with axes 1 and 2 exchanged."""
    return (shape[0], shape[2], shape[1], *shape[3:]) if len(shape) > 2 else shape


def of_shape(name: str, shapes: Shapes, want: tuple[int, ...] = ()) -> str:
    """A reading of the arrays that fits; empty where there is none.

    Args:
        name: the array that was refused.
        shapes: of all arrays of the call that have been read.
        want: the shape that was wanted of the refused array, where it is known.
    """
    got = shapes[name]
    if axis := _of_axes(name, shapes, want):
        return axis
    if name in _TOKENS and set(_TOKENS) <= set(shapes):
        if _fit(shapes):
            return _other_op(name, shapes)
        names = _head_first(shapes)
        return _exchange(names) if names else ""
    if name == "A_log" and _has_tokens_for_heads(got, want, shapes.get("v", ())):
        return f"; it fits with {exchanged()}, which look head-first"
    if name == "A_log" and got != want and _size(got) == _size(want):
        return f"; A_log.reshape(-1) fits, and {FLA}"
    if name in ("initial_state", "write_pool") and _last_swapped(got) == want:
        return "; it fits with the other value of state_v_first"
    return f"; {name}.swapaxes(1, 2) fits" if swapped(got) == want != got else ""


def _of_axes(name: str, shapes: Shapes, want: tuple[int, ...]) -> str:
    """An axis too few or too many."""
    got, beta = shapes[name], shapes.get("beta", ())
    if want and got == want[1:] and want[0] == 1:
        return f"; {name}[None] fits"
    if want and got == (*want, 1):
        return f"; {name}[..., 0] fits"
    if name != "q" or len(got) != 3 or min(got) < 1:
        return ""
    if len(beta) == 2 and beta[0] == got[0]:
        return "; for a batch of one sequence pass x[None] of q, k, v, g and beta"
    if len(beta) == 3 and beta[:2] == got[:2] and got[2] % beta[2] == 0:
        return f"; to split the heads: q.reshape({got[0]}, {got[1]}, heads, -1)"
    return ""


def _has_tokens_for_heads(got: tuple[int, ...], want: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Whether a parameter of each head would fit if v were head-first."""
    return len(v) == 4 and got != want and want[:1] == v[2:3] and got == (v[1], *want[1:])


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _last_swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def _exchange(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"; {names[0]}.swapaxes(1, 2) fits"
    return f"; all fit as [B, T, H, ...] with {exchanged(names)}"


def _head_first(shapes: Shapes) -> tuple[str, ...]:
    """The fewest arrays whose axes 1 and 2 have to be exchanged for all to fit together; with no more heads than tokens
    where they can be read so."""
    fitting = []
    for names in _subsets():
        read = {name: swapped(shapes[name]) if name in names else shapes[name] for name in _TOKENS}
        if _fit(read):
            _, tokens, heads, *_ = read["v"]
            fitting.append((1 < tokens < heads, len(names), names))
    return min(fitting)[-1] if fitting else ()


def _subsets() -> Iterator[tuple[str, ...]]:
    for count in range(1, len(_TOKENS) + 1):
        yield from combinations(_TOKENS, count)


def _fit(shapes: Shapes) -> bool:
    """Whether the shapes are those of one call, with one decay a channel or a head."""
    q, k, v, g, beta = [shapes[name] for name in _TOKENS]
    if not (len(q) == len(v) == 4 and q == k and v[:2] == q[:2] and min((*q, *v)) > 0 and v[2] % q[2] == 0):
        return False
    return beta == v[:3] and g in ((*v[:3], q[3]), v[:3])


def _other_op(name: str, shapes: Shapes) -> str:
    """The ops of the other gate, for arrays that fit together."""
    if name != "g":
        return ""
    if len(shapes["g"]) == 3:
        return "; one decay a head is the gated delta rule: chunk_gated_delta_rule, fused_recurrent_gated_delta_rule"
    return "; one decay a channel is KDA: chunk_kda, fused_recurrent_kda"


def of_option(name: str, value: object, to: str) -> str:
    """How to pass an array where an option wants Python's own value.

    Args:
        name: the option.
        value: what was passed.
        to: the type wanted: ``bool``, ``int`` or ``float``.
    """
    adapter = adapter_of(value)
    if adapter is not None and adapter.is_traced(value):
        if adapter.kind == "jax":
            return f"; a traced value is no option: make it static, jax.jit(..., static_argnames={name!r})"
        return f"; a traced value is no option: pass {to}(x), computed outside the traced function"
    if adapter is not None and adapter.spec(value).shape != ():
        return ""
    return f"; pass {to}(x)" if adapter is not None or _is_numpy_scalar(value) else ""


def _is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
