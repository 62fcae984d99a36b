"""What a call on several ranks would do: the backend of a slice, what the ranks exchange, and how long it takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kdacore import contract
from kdacore.arrays import is_spec
from kdacore.dispatch.call import explain as explain_plain
from kdacore.dispatch.call import explain_request
from kdacore.dispatch.plan import asked_of, current_policy
from kdacore.errors import UnsupportedError
from kdacore.ops import OpDef
from kdacore.parallel import cost, slices
from kdacore.parallel.call import kind_of
from kdacore.parallel.cost import Exchange
from kdacore.parallel.local_call import check_arguments, check_request, serving, slice_request, without_cp
from kdacore.types import Candidate, Selection, sealed


@sealed
@dataclass(frozen=True)
class RanksSelection(Selection):
    """The :class:`~kdacore.types.Selection` of one rank's slice, and what it means on several ranks."""

    ranks: int = 1
    exchange: Exchange | None = None
    composed: bool = False
    """The slice is served by several calls of the backend, since it has no functions for one."""
    seconds: float | None = None
    """Predicted, on the ranks; None where the backend's cost is not known."""
    seconds_alone: float | None = None
    """Predicted, of the whole row on one device."""

    @property
    def text(self) -> str:
        e = self.exchange or Exchange(0, 0, 0, 0)
        parts = [f"{e.forward} forward"]
        if e.backward:
            parts.append(f"{e.backward} backward")
        if e.final_states:
            parts.append(f"{e.final_states} for final states")
        served = "composed of several calls" if self.composed else "by functions of its own"
        lines = [
            Selection(self.request, self.backend, self.why, self.candidates).text,
            f"ranks: {self.ranks}, each with T={self.request.T} of {self.ranks * self.request.T} tokens; "
            f"a slice is served {served if self.backend else 'by none'}",
            f"each rank receives {e.total} bytes in {e.collectives} collectives: {', '.join(parts)}; whatever T is",
            f"predicted: {_shown(self.seconds)} on {self.ranks} ranks, {_shown(self.seconds_alone)} on one",
        ]
        return "\n".join(lines)


def _shown(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.3g} ms"


def explain(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object) -> Selection:
    """What a call with ``cp`` would do; ``cp`` may also be a number of ranks. Nothing runs, nothing is exchanged.

    Raises:
        ContractError: the call breaks the contract.
    """
    cp, given = without_cp(opdef, options)
    kind = kind_of(opdef, inputs, options)
    if isinstance(cp, int) and not isinstance(cp, bool) and cp > 0:
        ranks = cp
    elif kind == "jax":
        from kdacore.parallel.jax_ranks import axis_size, unwrapped

        inputs, ranks = unwrapped(inputs), axis_size(opdef, cp)
    else:
        from kdacore.parallel.torch_ranks import ranks_of

        ranks = ranks_of(opdef.name, cp).size
    if ranks == 1:
        return explain_plain(opdef, inputs, given, backend)
    return explain_on(opdef, inputs, given, ranks, backend)


def explain_on(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], ranks: int, backend: object
) -> RanksSelection:
    """Like :func:`explain`, for a number of ranks. ``options``: without ``cp``."""
    check_arguments(opdef, inputs, options)
    policy = current_policy(opdef, backend)
    request = asked_of(slice_request(contract.build_request(opdef, inputs, options)[0]), policy)
    check_request(request)
    chosen = explain_request(request, policy, assumed=any(is_spec(x) for x in inputs))
    functions = None
    if chosen.backend:
        try:
            chosen, functions = serving(chosen, policy, asked_only=True)
        except UnsupportedError as error:
            chosen = dataclasses.replace(
                chosen,
                backend="",
                why=error.message,
                candidates=tuple([_refused(c, error) for c in chosen.candidates]),
            )
    name = chosen.backend
    composed = bool(name) and slices.is_composed(name, request)
    return RanksSelection(
        chosen.request,
        name,
        chosen.why,
        chosen.candidates,
        ranks,
        cost.exchange_of(request, ranks),
        composed,
        cost.seconds_on_ranks(request, name, ranks, functions, composed) if functions else None,
        cost.seconds_alone(request, name, ranks) if name else None,
    )


def _refused(candidate: Candidate, error: UnsupportedError) -> Candidate:
    more = error.reasons.get(candidate.backend, ())
    return dataclasses.replace(candidate, reasons=(*candidate.reasons, *more))
