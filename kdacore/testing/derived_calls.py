"""The calls a check makes beside, or in place of, its case's own: a backend must serve all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kdacore.ops import OPS
from kdacore.testing.cases import Case

RECURRENT_OF = {
    "chunk_kda": "fused_recurrent_kda",
    "chunk_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}
"""The decoding op that carries on from a prefill."""


def cut_points(case: Case) -> tuple[int, ...]:
    """Tokens after which the causality checks change or cut a sequence: near both ends and around chunk edges."""
    T = case.shape.T
    wanted: tuple[int, ...] = (0, 14, 15, 16, 40, 62, 63, 64, 100, T - 2)
    if not case.slow and T > 24:  # the quick selection
        wanted = (0, 15, 40, 63, T - 2)
    return tuple(t for t in dict.fromkeys(wanted) if 0 <= t < T - 1)


def prefix(case: Case, tokens: int) -> Case:
    """The same call on the first tokens only."""
    return replace(case, shape=replace(case.shape, T=tokens))


def halves(case: Case) -> tuple[Case, Case]:
    """The case's sequence in two calls, the state handed over."""
    first = case.having(output_final_state=True)
    T = case.shape.T
    cut = max(1, (2 * T) // 3)
    return prefix(first, cut), replace(prefix(first, T - cut), initial_state=True)


def prefill_and_decode(case: Case) -> tuple[Case, Case]:
    """The case's sequence as a prefill and a call of the decoding op."""
    first, second = halves(case)
    allowed = OPS[RECURRENT_OF[case.op]].options
    kept = tuple((n, x) for n, x in second.options if n in allowed)
    return first, replace(second, op=RECURRENT_OF[case.op], options=kept)


def single_step(case: Case) -> Case:
    """One token of the case's sequence, carried on from a state."""
    return replace(prefix(case.having(output_final_state=True), 1), initial_state=True)


def alone(case: Case) -> tuple[Case, ...]:
    """Each non-empty sequence of a pack, or row of a batch, in a call of its own."""
    shape = case.shape
    if not shape.lengths:
        return (replace(case, shape=replace(shape, B=1)),) * shape.B
    return tuple(
        replace(case, shape=replace(shape, T=n, lengths=(), padding=0), host_offsets=False)
        for n in shape.lengths
        if n
    )


def _appended(case: Case) -> tuple[Case, ...]:
    return (case, *(prefix(case, t + 1) for t in cut_points(case)))


_PARTS: dict[str, Callable[[Case], tuple[Case, ...]]] = {
    "causality_append": _appended,
    "gradient_causality_append": _appended,
    "split": halves,
    "split_decode": prefill_and_decode,
    "drift": lambda case: (single_step(case),),
    "batch_invariance": lambda case: (case, *alone(case)),
    "gradient_batch_invariance": lambda case: (case, *alone(case)),
}


def parts_of(case: Case) -> tuple[Case, ...]:
    """Every call the case makes, in order, without repetitions."""
    found = _PARTS[case.check](case) if case.check in _PARTS else (case,)
    return tuple(dict.fromkeys(found))
