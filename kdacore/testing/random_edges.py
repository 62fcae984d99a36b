"""What users reach at the edges of the contract: each change gives a random call one of them, if that is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kdacore.calls.description import specs
from kdacore.calls.pools import Pool
from kdacore.ops import HOST_ARGUMENTS, INDEX_ARGUMENTS, MASK_ARGUMENTS
from kdacore.testing.cases import Case
from kdacore.testing.faults import faults_of, written
from kdacore.testing.random_limits import Limits
from kdacore.testing.random_parts import END_GATES, USUAL_GATES, pick
from kdacore.testing.random_pools import with_pool
from kdacore.testing.serving import judge

_UNITS = (30, 33, 66, 132)
"""Clusters of four and of two blocks, and multiprocessors, that an H200 runs at once, an H100 alike: kernels divide the
work otherwise just below, at and above multiples."""
_MANY = 28
"""Items from which a call is counted as one of many."""
_MOST_WORK = {"cpu": 2e7, "cuda": 1.5e8}
"""Items times tokens times the elements of a state, of a call of many items: the oracle takes half a second for the
first. A tenth of those on a GPU may take four times as much."""
_MANY_SHARE = {"cpu": 0.04, "cuda": 0.25}
_SHARED_SHARE = 0.7
"""Share of the calls on pools."""
_GATES_SHARE, _NEGATED_SHARE, _INFERENCE_SHARE, _FAULT_SHARE = 0.15, 0.15, 0.1, 0.12


def draw_sizes(case: Case, plain: Case, rng: Any, limits: Limits) -> Case:
    """The call, or one of many items: of other sizes, perhaps on a pool with null slots.

    Args:
        case: the call.
        plain: one that is served for certain, which is drawn from where the call would not be served with many items.
        rng: a generator.
        limits: which calls are wanted.
    """
    wanted = limits.many or rng.random() < _MANY_SHARE.get(case.device, _MANY_SHARE["cpu"])
    if limits.sizes or not wanted or (not limits.many and _compiled_for_minutes(case)):
        return case
    found = _if_served(case, _many_items(case, rng, limits))
    return _if_served(case, _many_items(plain, rng, limits)) if limits.many and found is case else found


def _compiled_for_minutes(case: Case) -> bool:
    """JAX compiles each operation of the reference by itself, for each length that its slabs of sequences have."""
    return (case.backend, case.kind, case.check) == ("reference", "jax", "gradients")


def draw_edges(case: Case, rng: Any, limits: Limits) -> Case:
    """The call with other numbers, other views or modes of torch's, or a fault; its sizes and options stay."""
    if limits.together > 1:
        case = _other_numbers(case, rng)
    for change, share in (
        (_shared_rows, _SHARED_SHARE), (_end_gates, _GATES_SHARE), (_negated, _NEGATED_SHARE),
        (_inference, _INFERENCE_SHARE),
    ):  # fmt: skip
        if rng.random() < share:
            case = _if_served(case, change(case, rng))
    if not (limits.check or limits.many) and rng.random() < _FAULT_SHARE:
        case = _if_served(case, _with_fault(case, rng))
    return case


def _if_served(case: Case, changed: Case) -> Case:
    return case if judge(changed) else changed


def _many_items(case: Case, rng: Any, limits: Limits) -> Case:
    if case.family not in ("chunk", "recurrent"):
        return case
    items = pick(rng, *_UNITS) * int(rng.integers(1, 4)) + int(rng.integers(-2, 3))
    HV = pick(rng, *(n for n in range(1, 33) if items % n == 0))
    H = pick(rng, *(n for n in range(1, HV + 1) if HV % n == 0))
    N, K, V = items // HV, case.shape.K, case.shape.V
    if case.device == "cpu" and rng.random() < 0.5:
        K, V = min(K, 32), min(V, 32)
    work = _MOST_WORK.get(case.device, _MOST_WORK["cpu"])
    if case.device != "cpu" and rng.random() < 0.1:
        work *= 4
    most = max(1, int(work / (items * K * V)))
    wanted = int(rng.integers(1, 5)) if case.family == "recurrent" else pick(rng, 1, 16, 63, 64, 65, 129, 300)
    T = min(wanted, most)
    shape = replace(case.shape, B=N, T=T, H=H, HV=HV, K=K, V=V, lengths=(), padding=0)
    use = case.pool_use
    if not limits.many and ((use is not None and use.checkpoints) or rng.random() < 0.3):
        most_each = 2 * T if case.family == "chunk" else T
        lengths = tuple(int(n) for n in rng.integers(0, most_each + 1, N))
        lengths = (*lengths[:-1], max(1, lengths[-1]))
        padding = pick(rng, 0, 5)
        shape = replace(shape, B=1, T=sum(lengths) + padding, lengths=lengths, padding=padding)
    case = replace(case, shape=shape, host_offsets=case.host_offsets and bool(shape.lengths))
    if limits.many or (case.check == "accuracy" and not limits.check and rng.random() < 0.7):
        case = with_pool(case, _null_slots(rng))
    return case


def _null_slots(rng: Any) -> Pool:
    null = bool(rng.random() < 0.7)
    negatives = not null or bool(rng.random() < 0.5)
    return Pool(inplace=bool(rng.random() < 0.7), null=null, negatives=negatives)


def _other_numbers(case: Case, rng: Any) -> Case:
    """Other decays, and the same lengths in another order."""
    case = replace(case, gates=pick(rng, case.gates, *USUAL_GATES))
    if case.shape.lengths and not case.host_offsets:
        lengths = tuple(int(n) for n in rng.permutation(case.shape.lengths))
        case = replace(case, shape=replace(case.shape, lengths=lengths))
    return case


def _shared_rows(case: Case, rng: Any) -> Case:
    """Sequences that start from the same row, where none of them writes it."""
    use = case.pool_use
    if use is None or use.indices != 1 or (use.inplace and not (use.separate and use.writes)):
        return case
    if use.inplace and "conv_state" in specs(case) and not case.conv_indices:  # whose rows they would write
        return case
    return replace(case, pool=replace(use, shared=True))


def _end_gates(case: Case, rng: Any) -> Case:
    """Gates at the ends of float32. The other stages take decays that such gates have become."""
    if case.family == "stage" and case.op != "kda_chunk_gate":
        return case
    return replace(case, gates=pick(rng, *END_GATES))


def _negated(case: Case, rng: Any) -> Case:
    """Some of what is read is a lazily negated view."""
    if case.kind != "torch":
        return case
    whole = HOST_ARGUMENTS | INDEX_ARGUMENTS | MASK_ARGUMENTS | set(written(case))
    names = [name for name in specs(case) if name not in whole]
    some = tuple(name for name in names if rng.random() < 0.4)
    return replace(case, negated=some or (pick(rng, *names),))


def _inference(case: Case, rng: Any) -> Case:
    plain = case.kind == "torch" and case.check in ("accuracy", "pool", "uninitialised")
    return replace(case, mode="inference") if plain else case


def _with_fault(case: Case, rng: Any) -> Case:
    """One fault, each kind as likely as the others."""
    found = faults_of(case)
    if not found:
        return case
    kinds = sorted({fault.partition(":")[0] for fault in found})
    kind = pick(rng, *kinds)
    fault = pick(rng, *(f for f in found if f.startswith(f"{kind}:")))
    return replace(case, check="refusal", fault=fault, mode="eager", negated=())


def traits(case: Case) -> Iterator[str]:
    """What a record counts of the calls: the edges that a call reaches."""
    use = case.pool_use
    form = "packed" if case.shape.lengths else "dense"
    if case.fault:
        yield f"must be refused: {case.fault.partition(':')[0]}"
    if use is not None and (use.null or use.negatives):
        yield f"null slots, {form}"
        if use.null and use.negatives:
            yield "null slots, null_index and negative ones"
    if use is not None and use.shared and case.shape.N > 2:
        yield "rows that several sequences start from"
    if case.shape.N * case.shape.HV >= _MANY:
        yield f"many items, {form}"
        if use is not None and (use.null or use.negatives):
            yield f"many items and null slots, {form}"
    if case.gates in END_GATES:
        yield "gates at the ends of float32"
    if case.negated:
        yield "lazily negated views"
    if case.mode == "inference":
        yield "inference mode"
