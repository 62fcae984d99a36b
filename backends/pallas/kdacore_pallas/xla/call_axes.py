"""The axes of a call's arrays and results: what is split where batch or heads are.

An array's axes are words in one string: ``b`` batch, ``t`` tokens, ``h`` q/k heads, ``r`` value heads
of each, ``k`` and ``w`` channels of keys and of values; ``(h r)`` is one axis of both.
"""

from __future__ import annotations

from typing import Any

from kdacore.types import Request


def arrays_of(arrays: Any) -> dict[str, Any]:
    """The arrays of a named tuple that are not None, by name."""
    return {name: x for name, x in arrays._asdict().items() if x is not None}


def batch_is_whole(request: Request) -> bool:
    """Whether the batch cannot be split: of packs, and where sequences find their states by number."""
    return bool(
        request.packed
        or request.pool_size
        or request.write_pool_size
        or request.inplace_state
        or request.checkpoint_count
    )


def _value_heads(request: Request) -> str:
    """The axis of value heads. XLA takes no product of axes of which one has size 1."""
    if request.HV == request.H:
        return "h"
    return "r" if request.H == 1 else "(h r)"


def open_sizes(request: Request, rule: str) -> dict[str, int]:
    """Sizes that the rule's text leaves open."""
    return {"r": request.HV // request.H} if "(h r)" in rule else {}


def axes_of(request: Request, name: str, ndim: int) -> str:
    """The axes of an array: ``b`` batch, ``t`` tokens, ``h`` q/k heads and ``r`` value heads of each, ``k`` and ``w``
    channels of keys and of values. Axes that have nothing in common with other arrays' are named after the array."""
    heads = _value_heads(request)
    whole = batch_is_whole(request)
    rows = f"{name}_rows" if whole else "b"
    states = f"{heads} w k" if request.state_v_first else f"{heads} k w"
    bias = f"({heads.strip('()')} k)" if ndim == 1 else f"{heads} k"
    batch = "batch" if whole else "b"
    known = {
        "q": f"{batch} t h k",
        "k": f"{batch} t h k",
        **dict.fromkeys(("v", "o", "d_o"), f"{batch} t {heads} w"),
        "g": f"{batch} t {heads}" if ndim == 3 else f"{batch} t {heads} k",
        "beta": f"{batch} t {heads}",
        "A_log": heads,
        "dt_bias": heads if request.scalar_gate else bias,
        **dict.fromkeys(("initial_state", "final_state", "d_final_state", "write_pool"), f"{rows} {states}"),
        "checkpoints": f"{name}_rows {states}" if ndim == 4 else f"{batch} {name}_rows {states}",
        **({} if whole else dict.fromkeys(("state_indices", "has_initial_state"), "b")),
    }
    return known.get(name) or " ".join(f"{name}_{n}" for n in range(ndim))
