"""Choosing a backend for a request: *can* (every verifier, every reason) apart from *should* (cost, then rank)."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kdacore import config, plugin_faults
from kdacore.dispatch.candidates import Judge, Predict, judge, priced, with_costs
from kdacore.errors import PerformanceWarning, UnsupportedError, list_names
from kdacore.registry import OWN_DISTRIBUTION, REGISTRY
from kdacore.types import Candidate, Reason, Request, Selection, Verifier, family_of, lengths_of

__all__ = [
    "Family",
    "Policy",
    "auto_may_choose",
    "clear",
    "decide",
    "family",
    "is_slow",
    "judge",
    "select",
    "with_costs",
]


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller asked for: ``backend=`` forces; otherwise a preference order, possibly empty (auto)."""

    forced: str = ""
    preferred: tuple[str, ...] = ()
    source: str = "auto"
    batch_invariant: bool = False


_cache: dict[Hashable, Family] = {}
"""The families of which selections are kept, by policy and by all of a request but its lengths."""
_count = 0
"""Selections kept in all."""
_generation = object()
"""Another one whenever everything is forgotten."""
_lock = threading.RLock()
_warned: set[tuple[str, str]] = set()
_new: Any = tuple.__new__
"""Makes a named tuple in half the time of its constructor."""
_MAX_CACHED = 8192
_LOWEST = "lowest cost"
_ONLY_KNOWN = "the only one of known cost"
_PASSED_OVER = "passed over"


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


config.renew_in_child(_renew_lock)


def clear() -> None:
    """Forget every selection (the set of backends or the configuration changed)."""
    with _lock:
        _forget()
        _warned.clear()
        plugin_faults.clear()


def _forget() -> None:
    global _count, _generation
    _cache.clear()
    _count, _generation = 0, object()


REGISTRY.on_change(clear)


class Family:
    """The selections of calls that differ in lengths alone, under one policy.

    Args:
        request: one of the calls.
        policy: what the caller asked for.
        assumed: as for :class:`~kdacore.dispatch.candidates.Judge`.
        key: where it is kept in the cache, once a selection has been made.

    Raises:
        ContractError: a backend of an unknown name was asked for.
    """

    __slots__ = (
        "_able",
        "_answers",
        "_asked",
        "_assumed",
        "_by_rank",
        "_checks",
        "_chooses",
        "_generation",
        "_judges",
        "_key",
        "_predictors",
        "_registered",
        "_selections",
        "_strangers",
        "_tells",
        "policy",
    )

    def __init__(self, request: Request, policy: Policy, assumed: bool = False, key: Hashable = None) -> None:
        for name in filter(None, (policy.forced, *policy.preferred)):
            REGISTRY.get(name, request.op, "backend" if policy.forced else policy.source)
        self.policy = policy
        self._assumed = assumed
        self._registered = REGISTRY.backends()
        self._judges: dict[str, Judge] = {}
        self._answers: list[Candidate | None] | None = None
        """How each backend answers all of the calls; None of those in ``_asked``. None until all have been asked once,
        and where one has to be judged anew at every call."""
        self._asked: list[tuple[int, Judge]] = []
        """The backends whose answers depend on lengths, with their places."""
        self._checks: list[Verifier] | None = None
        """The verifiers of all these, where each of them has no other reasons against a call than those."""
        self._able: tuple[Candidate, ...] = ()
        """How each backend answers a call that none of these verifiers objects to."""
        self._predictors: list[tuple[int, Predict, bool]] = []
        """Of those that can serve such a call, by falling rank: their places, what predicts their costs, and whether
        they may be chosen though nobody asked for them. Empty where costs do not decide."""
        names = list(self._registered)
        eligible = [i for i, name in enumerate(names) if auto_may_choose(name, request)]
        eligible.sort(key=lambda i: -self._registered[names[i]].backend.rank)
        self._by_rank = tuple(eligible)
        """The places of the backends that may be chosen though nobody asked for them, by falling rank."""
        self._strangers = any(
            self._registered[names[i]].distribution != OWN_DISTRIBUTION for i in self._by_rank
        )
        """Whether backends of others may be chosen."""
        hooks = REGISTRY.hooks()
        self._chooses = bool(hooks.kdacore_choose.get_hookimpls())
        self._tells = bool(hooks.kdacore_selected.get_hookimpls())
        self._key = key
        self._generation = _generation
        self._selections: dict[Hashable, Selection] = {}
        """By :func:`~kdacore.types.lengths_of` the request."""

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """How each backend answers one of the calls. No cost is predicted yet."""
        if self._answers is None:
            return self._first_answers(request)
        checks = self._checks
        if checks is not None and plugin_faults.first_answer(checks, 0, request)[0] == len(checks):
            return self._able
        found: list[Any] = self._answers.copy()
        for i, asked in self._asked:
            found[i] = asked.candidate(request)
        return tuple(found)

    def _first_answers(self, request: Request) -> tuple[Candidate, ...]:
        judges, found = self._judges, []
        for name, registered in self._registered.items():
            judge = judges.get(name)
            if judge is None or not judge.lasts:
                judge = judges[name] = Judge(registered, request, self._assumed)
            found.append(judge.always or judge.candidate(request))
        if all(judge.lasts for judge in judges.values()):
            places = [judges[name] for name in self._registered]
            self._asked = [(i, judge) for i, judge in enumerate(places) if judge.always is None]
            self._answers = [judge.always for judge in places]
            if all(judge.objects_by_checks_alone for _, judge in self._asked):
                self._able = able = tuple([judge.always or judge.unopposed() for judge in places])
                ranked = [*self._by_rank, *[i for i in range(len(places)) if i not in self._by_rank]]
                serving = [i for i in ranked if not able[i].reasons]
                eligible = [i for i in serving if i in self._by_rank]
                if len(eligible) > 1 and not request.batch_invariant:  # else costs decide nothing
                    self._predictors = [(i, places[i].predict, i in eligible) for i in serving]
                self._checks = [check for _, judge in self._asked for check in judge.checks or ()]
        return tuple(found)

    def with_costs(self, request: Request, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """As :func:`kdacore.dispatch.candidates.with_costs`."""
        if request.batch_invariant:
            return candidates
        judges = self._judges
        return tuple([c if c.reasons else priced(c, judges[c.backend].predict(request)) for c in candidates])

    def _priced(self, request: Request) -> tuple[tuple[Candidate, ...], Candidate | None]:
        """The answers to a call that no verifier objects to, with costs; and the one of lowest cost, where that decides
        and nothing else is to be asked, which is the usual case."""
        found, known, cheapest = list(self._able), 0, None
        for i, predict, may_be_chosen in self._predictors:
            prediction = predict(request)
            if prediction is not None:
                c = found[i] = priced(found[i], prediction)
                if may_be_chosen:
                    known += 1
                    if cheapest is None or c.cost < cheapest.cost:  # type: ignore[operator]
                        cheapest = c
        if known < 2 or cheapest is None or self._chooses or self.policy.preferred or not cheapest.verified:
            cheapest = None
        return tuple(found), cheapest

    def decide(self, request: Request, run_selfchecks: bool) -> Selection:
        """See :func:`decide`."""
        policy, by_rank = self.policy, self._by_rank
        candidates = self.candidates(request)
        if policy.forced:
            return _forced(request, policy, candidates)
        if candidates is self._able:
            candidates, cheapest = self._priced(request)
            if cheapest is not None:
                selected: Selection = _new(Selection, (request, cheapest.backend, _LOWEST, candidates))
                return selected
        elif len([i for i in by_rank if not candidates[i].reasons]) > 1 or not run_selfchecks:
            candidates = self.with_costs(request, candidates)  # a call that leaves no choice needs none
        eligible = [c for i in by_rank if not (c := candidates[i]).reasons]
        if policy.preferred:
            able = [c.backend for c in candidates if not c.reasons]
            for name in policy.preferred:
                if name in able:
                    return Selection(request, name, f"preferred by {policy.source}", candidates)
        for chosen, why in self._ranked(request, eligible, candidates):
            if not chosen.verified:
                from kdacore.selfcheck import check as selfcheck  # `import kdacore` stays light

                problem = selfcheck.problem(REGISTRY.get(chosen.backend), request, run=run_selfchecks)
                if problem is not None:
                    candidates = tuple(
                        [_with_reason(c, problem) if c.backend == chosen.backend else c for c in candidates]
                    )
                    continue
            if policy.preferred:
                why += f"; {policy.source} preferred {list_names(policy.preferred)}, which cannot serve this call"
            return Selection(request, chosen.backend, why, candidates)
        return Selection(request, "", "no backend can serve this call", candidates)

    def _ranked(
        self, request: Request, by_rank: list[Candidate], candidates: tuple[Candidate, ...]
    ) -> Iterable[tuple[Candidate, str]]:
        """Capable backends, best first, each with the reason for its place."""
        if len(by_rank) < 2:
            others = any(not c.reasons and c not in by_rank for c in candidates)
            why = "the only one that automatic choice takes" if others else "the only one that can"
            order: Iterable[tuple[Candidate, str]] = [(c, why) for c in by_rank]
        else:
            order = self._in_order(request, by_rank)
        if not self._chooses or not by_rank:
            return order
        able = tuple([c for c in candidates if c in by_rank])
        answers = REGISTRY.ask_each("kdacore_choose", request=request, candidates=able)
        named = next((answer for answer in answers if answer is not None), None)
        if named is None:
            return order
        # A str first: other objects may compare equal to anything.
        chosen = [c for c in able if c.backend == named] if isinstance(named, str) else []
        if not chosen:
            asked = REGISTRY.hooks().kdacore_choose.get_hookimpls()
            where = f"plugin {list_names(i.plugin_name for i in asked)}"
            shown = plugin_faults.shown(named)
            plugin_faults.complain(
                where, "kdacore_choose", shown, f"named {shown}, which cannot serve the call"
            )
            return order
        return [
            (chosen[0], "chosen by the kdacore_choose hook"),
            *[o for o in order if o[0] is not chosen[0]],
        ]

    def _in_order(self, request: Request, by_rank: list[Candidate]) -> Iterator[tuple[Candidate, str]]:
        """Backends whose cost is known first, by cost; the others follow by rank."""
        known = [c for c in by_rank if c.cost is not None]
        if len(known) > 1:
            known.sort(key=_cost_of)
            why = _LOWEST
        else:
            why = _ONLY_KNOWN
        for c in known:
            yield c, why
        # Where some backend has been tested on this architecture: those neither tested there nor of known speed.
        judges, others = self._judges, [c for c in by_rank if c.cost is None]
        tested = [c for c in by_rank if judges[c.backend].tested]
        unproven = [c for c in others if not judges[c.backend].tested] if tested else []
        highest = f"highest rank of those tested on {request.device.arch}" if unproven else "highest rank"
        if unproven:
            others = [*[c for c in others if judges[c.backend].tested], *unproven]
        for c in others:
            yield c, highest

    def select(self, request: Request, lengths: Hashable, *, warn: bool = True) -> Selection:
        """See :func:`select`. ``lengths``: of the request."""
        if self._generation is not _generation:
            return select(request, self.policy, warn=warn)
        found = self._selections.get(lengths)
        if found is None:
            with _lock:
                # Another thread may have made the first selection meanwhile.
                kept = self if self._selections else _cache.get(self._key, self)
                found = kept._selections.get(lengths) or kept._new_selection(request, lengths, warn)
        return found

    def _new_selection(self, request: Request, lengths: Hashable, warn: bool) -> Selection:
        global _count
        found = self.decide(request, run_selfchecks=True)
        if not found.backend:
            raise UnsupportedError(
                request.op,
                "no backend can serve this call",
                {c.backend: c.reasons for c in found.candidates},
            )
        if not warn and (is_slow(found) or (self._strangers and _passed_over_unsaid(found))):
            return found
        if _count >= _MAX_CACHED:
            _forget()
            self._generation, self._selections = _generation, {}
        if self._generation is _generation:
            if not self._selections:
                _cache[self._key] = self
            self._selections[lengths] = found
            _count += 1
        if self._tells:
            for _ in REGISTRY.ask_each("kdacore_selected", request=request, selection=found):
                pass
        _warn_if_slow(found)
        if self._strangers:
            _warn_of_passed_over(found)
        return found


def family(request: Request, policy: Policy) -> Family:
    """The selections of calls like this one. ContractError where a backend of an unknown name was asked for."""
    key = policy, family_of(request)
    return _cache.get(key) or Family(request, policy, key=key)


def select(request: Request, policy: Policy, *, warn: bool = True) -> Selection:
    """The cached selection for a request.

    Args:
        request: the call.
        policy: what the caller asked for.
        warn: False where nothing is about to run. A selection that calls for a warning is not kept then, so that the
            first call that does run warns.

    Raises:
        UnsupportedError: the forced backend (or, for a traced call, every backend) cannot serve it.
        ContractError: a backend of an unknown name was asked for.
    """
    return family(request, policy).select(request, lengths_of(request), warn=warn)


def decide(request: Request, policy: Policy, *, run_selfchecks: bool, assumed: bool = False) -> Selection:
    """Ask every backend and choose. Runs nothing but, when allowed, the one-time self-checks; those that ran count."""
    return Family(request, policy, assumed).decide(request, run_selfchecks)


def auto_may_choose(name: str, request: Request) -> bool:
    """Whether a backend may be chosen that nobody asked for."""
    backend = REGISTRY.get(name).backend
    kinds, devices = backend.auto_kinds, backend.auto_device_types
    return (kinds is None or request.kind in kinds) and (devices is None or request.device.type in devices)


def passed_over(selection: Selection) -> tuple[str, ...]:
    """The backends of others that would have been chosen by rank, and were not since their cost is not known."""
    chosen = next((c for c in selection.candidates if c.backend == selection.backend), None)
    if chosen is None or chosen.cost is None or selection.why not in (_LOWEST, _ONLY_KNOWN):
        return ()
    return tuple(
        c.backend
        for c in selection.candidates
        if c.supported
        and c.cost is None
        and c.rank > chosen.rank
        and _is_strangers(c.backend, selection.request)
    )


def _is_strangers(name: str, request: Request) -> bool:
    return REGISTRY.get(name).distribution != OWN_DISTRIBUTION and auto_may_choose(name, request)


def _passed_over_unsaid(selection: Selection) -> list[str]:
    return [name for name in passed_over(selection) if (name, _PASSED_OVER) not in _warned]


def _warn_of_passed_over(selection: Selection) -> None:
    """Say once of each backend that it was passed over."""
    for name in _passed_over_unsaid(selection):
        _warned.add((name, _PASSED_OVER))
        text = f"{selection.request.op}: {passed_over_text(name, selection)}"
        warnings.warn(text, PerformanceWarning, stacklevel=4)


def passed_over_text(name: str, selection: Selection) -> str:
    """Why a backend was passed over, and what to do."""
    chosen = selection.candidate(selection.backend)
    tune = f"kdacore tune --device {selection.request.device.type}"
    return (
        f"backend {name!r} (rank {REGISTRY.get(name).backend.rank}) is passed over for {chosen.backend!r}, whose cost "
        f"is known: `{tune}` measures {name!r} too, and OpImpl.cost states a cost"
    )


def _cost_of(candidate: Candidate) -> float:
    return candidate.cost or 0.0


def _forced(request: Request, policy: Policy, candidates: tuple[Candidate, ...]) -> Selection:
    asked = next(c for c in candidates if c.backend == policy.forced)
    if not asked.supported:
        raise UnsupportedError(
            request.op, f"backend {policy.forced!r} cannot serve this call", {policy.forced: asked.reasons}
        )
    return Selection(request, policy.forced, "forced by backend=", candidates)


def _with_reason(candidate: Candidate, reason: Reason) -> Candidate:
    return dataclasses.replace(candidate, reasons=(*candidate.reasons, reason))


def is_slow(selection: Selection) -> bool:
    """The reference on an accelerator, unless it was forced: correct, and slow."""
    if selection.backend != "reference" or selection.request.device.type == "cpu":
        return False
    return not selection.why.startswith("forced")


def _warn_if_slow(selection: Selection) -> None:
    """Say what was missed where a call runs slowly, once for each reason."""
    if not is_slow(selection):
        return
    request = selection.request
    lines = []
    for c in selection.candidates:
        if c.backend == "reference" or any(r.code in ("array_kind", "device") for r in c.reasons):
            continue
        fresh = [r for r in c.reasons if (c.backend, r.code) not in _warned]
        _warned.update((c.backend, r.code) for r in fresh)
        lines += [f"  {c.backend}: {r}" for r in fresh]
    if lines:
        text = f"{request.op} runs on the slow reference backend on {request.device}:\n" + "\n".join(lines)
        warnings.warn(text, PerformanceWarning, stacklevel=4)
