"""What is drawn for a random call with pools of states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdacore.calls.pools import POOLS, Pool
from kdacore.calls.values import Shape
from kdacore.ops import OPS
from kdacore.testing.cases import Case
from kdacore.testing.random_parts import pick

_NAMED = 0.4
"""Share of the calls that use pools in one of the ways of the suite."""
_MOST_CANDIDATES = 16
"""Tokens of a sequence with ``read_only_state``, or with records."""


def draw_pool(case: Case, rng: Any) -> Case:
    """The case as a call on pools, of a recurrent or chunked op."""
    if case.family == "chunk" and rng.random() < 0.5:  # checkpoints at chosen tokens need B == 1
        case = replace(case, shape=replace(case.shape, B=1))
    if case.family == "commit" or rng.random() < _NAMED:
        pool = POOLS[pick(rng, *[name for name, p in POOLS.items() if _fits(p, case)])]
    else:
        pool = _any(case, rng)
    case = with_pool(case, pool)
    out = bool(case.kind != "jax" and "out" in OPS[case.op].arrays and rng.random() < 0.2)
    return replace(case, out=out)


def with_pool(case: Case, pool: Pool) -> Case:
    """The case as a call that uses pools in this way."""
    changes = {n: x for n, x in pool.options.items() if x is None or n in OPS[case.op].options}
    if pool.read_only or pool.records:
        case = replace(case, shape=_at_most(case.shape, _MOST_CANDIDATES))
    if pool.read_only:
        changes["output_final_state"] = None
    elif case.kind == "jax" and case.family != "commit":
        changes["output_final_state"] = True
    return replace(case.having(**changes), check="pool", pool=pool)


def _fits(pool: Pool, case: Case) -> bool:
    if pool.strided and case.kind == "jax":
        return False
    return pool.suits(case.family) and not (pool.checkpoints and case.shape.B > 1)


def _any(case: Case, rng: Any) -> Pool:
    """Any way that the contract has."""
    recurrent = case.family in ("recurrent", "decode")

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    indices = pick(rng, 0, 1, 1, 2) if recurrent else pick(rng, 0, 1, 1)
    inplace = chance(0.7)
    read_only = recurrent and not inplace and chance(0.5)
    writes = (pick(rng, 0, 1, 2) if recurrent else pick(rng, 0, 1)) if inplace else 0
    separate = bool(writes and not indices) or (inplace and indices > 0 and chance(0.4))
    reads = indices > 0 or not separate or case.family == "decode" or chance(0.5)
    return Pool(
        indices=indices,
        inplace=inplace,
        read_only=read_only,
        negatives=indices > 0 and chance(0.5),
        strided=case.kind != "jax" and chance(0.3),
        reads=reads,
        null=bool(indices or writes) and chance(0.5),
        has_state=reads and chance(0.4),
        writes=writes,
        separate=separate,
        checkpoints=_may_checkpoint(case, indices, inplace, separate) and chance(0.6),
        records=recurrent and inplace and indices == 1 and writes < 2 and chance(0.4),
    )


def _may_checkpoint(case: Case, indices: int, inplace: bool, separate: bool) -> bool:
    in_a_pool = inplace and (separate or indices > 0)
    return in_a_pool and case.family == "chunk" and case.shape.B == 1


def _at_most(shape: Shape, tokens: int) -> Shape:
    if not shape.lengths:
        return replace(shape, T=min(shape.T, tokens))
    lengths = tuple(min(n, tokens) for n in shape.lengths)
    padding = min(shape.padding, tokens * len(lengths) - sum(lengths))
    T = sum(lengths) + padding
    return replace(shape, lengths=lengths, T=T, padding=padding) if T else shape
