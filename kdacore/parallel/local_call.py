"""The call of one rank: the caller's arguments checked, and the request and functions of its slice.

The slice's request has local rows and offsets, and its states are K-first in float32 (float64 of float64 inputs),
whatever the caller's are: a state that is rounded to bfloat16 at a rank's border would lose what one call keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kdacore.dispatch import selection
from kdacore.dispatch.forms import of_slice
from kdacore.dispatch.plan import Plan, asked_of
from kdacore.errors import ContractError, UnsupportedError, shown
from kdacore.ops import OpDef
from kdacore.parallel import slices
from kdacore.types import Candidate, Request, Selection, SliceFunctions, TensorSpec

_POOLS = (
    "state_indices",
    "has_initial_state",
    "write_indices",
    "write_pool",
    "checkpoint_offsets",
    "checkpoint_indices",
    "out",
)


def without_cp(opdef: OpDef, options: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """``cp``, and the options with None in its place."""
    at = opdef.options.index("cp")
    return options[at], (*options[:at], None, *options[at + 1 :])


def check_arguments(opdef: OpDef, inputs: Any, options: tuple[Any, ...]) -> None:
    """Refuse arguments that have no meaning on several ranks.

    Raises:
        ContractError: naming the argument.
    """
    for name in _POOLS:
        if getattr(inputs, name) is not None:
            raise ContractError(
                opdef.name, name, "an array with cp", "None: rows split over ranks use no pool or out"
            )
    given = dict(zip(opdef.options, options, strict=True))
    if given["inplace_state"]:
        raise ContractError(
            opdef.name, "inplace_state", "True with cp", "False: rows split over ranks use no pool"
        )
    if given["null_index"] is not None:
        raise ContractError(opdef.name, "null_index", f"{shown(given['null_index'])} with cp", "None")


def check_request(request: Request) -> None:
    """Refuse a valid call that cannot be spread over ranks.

    Raises:
        ContractError: checkpoints whose blocks would cross a rank's border.
        UnsupportedError: batch invariance was asked for.
    """
    every = request.checkpoint_every
    if every and request.packed:
        got, want = f"{every} with cu_seqlens and cp", "None: blocks of a sequence may cross a rank's border"
        raise ContractError(request.op, "checkpoint_every", got, want)
    if every and request.T % every:
        got = f"{every} with cp and T={request.T} tokens a rank: a block crosses a rank's border"
        raise ContractError(request.op, "checkpoint_every", got, f"None, or a divisor of T={request.T}")
    if request.batch_invariant:
        message = "batch_invariant() with cp: a sequence's bits depend on where the ranks' borders cut it"
        raise UnsupportedError(request.op, message, {})


def slice_request(request: Request) -> Request:
    """The request of a rank's slice, from that of the caller's arguments."""
    r = request
    dtype = "float64" if r.dtype == "float64" else "float32"
    specs = dict(r.tensors)
    specs["initial_state"] = TensorSpec((r.N, r.HV, r.K, r.V), dtype)
    return dataclasses.replace(
        r,
        state_dtype=dtype,
        state_v_first=False,
        tensors=tuple(specs.items()),
        features=(r.features | {"initial_state"}) - {"state_v_first"},
    )


def choose(request: Request, policy: selection.Policy) -> tuple[Selection, SliceFunctions]:
    """The backend for a slice, and its functions: the one that dispatch prefers, if it can serve a slice.

    Args:
        request: of the slice.
        policy: what the caller asked of dispatch.

    Raises:
        ContractError: there is no backend of the name asked for.
        UnsupportedError: no backend, or not the one asked for by ``backend=``, can.
    """
    request = asked_of(request, policy)
    check_request(request)
    return serving(selection.select(request, policy), policy)


def serving(
    chosen: Selection, policy: selection.Policy, *, asked_only: bool = False
) -> tuple[Selection, SliceFunctions]:
    """A selection for a slice's request, its backend replaced where that can serve no slice, and the functions.

    Args:
        asked_only: as for :func:`kdacore.parallel.slices.slice_functions`.

    Raises:
        UnsupportedError: as :func:`choose`.
    """
    request, refused = chosen.request, {}
    for candidate in _in_order(chosen):
        try:
            functions = slices.slice_functions(candidate.backend, request, asked_only=asked_only)
        except UnsupportedError as error:
            if policy.forced:
                raise
            refused[candidate.backend] = error.reasons.get(candidate.backend, ())
            continue
        if refused:
            why = f"{', '.join(refused)} would be chosen, but can serve no slice"
            chosen = dataclasses.replace(chosen, backend=candidate.backend, why=why)
        return of_slice(chosen, functions.form), functions
    raise UnsupportedError(request.op, "cp: no backend can serve a slice of this call", refused)


def _in_order(chosen: Selection) -> list[Candidate]:
    """The chosen backend, then the others that auto may take: of known cost first, then by rank."""
    others = [
        c
        for c in chosen.candidates
        if c.supported
        and c.backend != chosen.backend
        and selection.auto_may_choose(c.backend, chosen.request)
    ]
    others.sort(key=lambda c: (c.cost is None, c.cost or 0.0, -c.rank))
    return [chosen.candidate(chosen.backend), *others]


def plan_of(opdef: OpDef, chosen: Selection, adapter: Any) -> Plan:
    """A plan by which results are held to the slice's request."""
    return Plan(opdef, chosen.request, chosen, adapter)


def states_in(request: Request, x: Any) -> Any:
    """A caller's states, or their gradients, as a slice has them. ``request``: the caller's."""
    return None if x is None else _turned(request, x, "float64" if request.dtype == "float64" else "float32")


def states_out(request: Request, x: Any) -> Any:
    """A slice's states, or their gradients, as the caller has them."""
    return None if x is None else _turned(request, x, request.state_dtype)


def _turned(request: Request, x: Any, dtype: str) -> Any:
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    if request.state_v_first:
        x = xp.matrix_transpose(x)
    return xp.astype(x, getattr(xp, dtype), copy=False)
