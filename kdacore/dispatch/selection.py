"""Choosing a backend for a request: *can* (every verifier, every reason) apart from *should* (cost, then rank)."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdacore import config, plugin_faults
from kdacore.errors import PerformanceWarning, UnsupportedError, list_names
from kdacore.registry import REGISTRY, Registered, missing
from kdacore.types import Candidate, OpImpl, Reason, Request, Selection, Verifier

if TYPE_CHECKING:
    from kdacore.dispatch.cost import Prediction

PORTABLE = "*"


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller asked for: ``backend=`` forces; otherwise a preference order, possibly empty (auto)."""

    forced: str = ""
    preferred: tuple[str, ...] = ()
    source: str = "auto"
    batch_invariant: bool = False


_cache: dict[tuple[Request, Policy], Selection] = {}
_lock = threading.RLock()
_warned: set[tuple[str, str]] = set()
_MAX_CACHED = 8192


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


config.renew_in_child(_renew_lock)


def clear() -> None:
    """Forget every selection (the set of backends or the configuration changed)."""
    with _lock:
        _cache.clear()
        _warned.clear()
        plugin_faults.clear()


REGISTRY.on_change(clear)


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
    key = (request, policy)
    found = _cache.get(key)
    if found is None:
        with _lock:
            found = _cache.get(key)
            if found is None:
                found = decide(request, policy, run_selfchecks=True)
                if not found.backend:
                    raise UnsupportedError(
                        request.op,
                        "no backend can serve this call",
                        {c.backend: c.reasons for c in found.candidates},
                    )
                if not warn and is_slow(found):
                    return found
                if len(_cache) >= _MAX_CACHED:
                    _cache.clear()
                _cache[key] = found
                for _ in REGISTRY.ask_each("kdacore_selected", request=request, selection=found):
                    pass
                _warn_if_slow(found)
    return found


def decide(request: Request, policy: Policy, *, run_selfchecks: bool, assumed: bool = False) -> Selection:
    """Ask every backend and choose. Runs nothing but, when allowed, the one-time self-checks; those that ran count."""
    for name in filter(None, (policy.forced, *policy.preferred)):
        REGISTRY.get(name, request.op, "backend" if policy.forced else policy.source)
    candidates = tuple([judge(r, request, assumed) for r in REGISTRY.backends().values()])
    if policy.forced:
        return _forced(request, policy, candidates)
    choices = sum(c.supported and auto_may_choose(c.backend, request) for c in candidates)
    if choices > 1 or not run_selfchecks:  # a call that leaves no choice needs no costs
        candidates = with_costs(request, candidates)
    able = {c.backend: c for c in candidates if c.supported}
    for name in policy.preferred:
        if name in able:
            return Selection(request, name, f"preferred by {policy.source}", candidates)
    eligible = [c for name, c in able.items() if auto_may_choose(name, request)]
    for name, why in _ranked(request, eligible):
        if not able[name].verified:
            from kdacore.selfcheck import check as selfcheck  # here and below: `import kdacore` stays light

            problem = selfcheck.problem(REGISTRY.get(name), request, run=run_selfchecks)
            if problem is not None:
                candidates = tuple(_with_reason(c, problem) if c.backend == name else c for c in candidates)
                continue
        if policy.preferred:
            why += f"; {policy.source} preferred {list_names(policy.preferred)}, which cannot serve this call"
        return Selection(request, name, why, candidates)
    return Selection(request, "", "no backend can serve this call", candidates)


def judge(registered: Registered, request: Request, assumed: bool = False) -> Candidate:
    """Every reason one backend has against a request.

    Args:
        registered: the backend.
        request: the call.
        assumed: the request is of hardware that need not be here: what is missing is no reason then, neither hardware
            nor packages. With a traced call whose program is compiled for another machine hardware is none.
    """
    backend = registered.backend
    elsewhere = False
    if not assumed and request.kind == "jax" and request.traced:
        from kdacore import device  # here: other first calls load no more than they need

        elsewhere = device.compiled_for_elsewhere(request)
    impl = backend.ops.get(request.op)
    gone = missing(backend, hardware=False) if assumed or elsewhere else missing(backend)
    lacking: tuple[str, ...] = ()
    if assumed or elsewhere:
        lacking = tuple(what for _, what, _ in missing(backend, hardware=True))
    if assumed:
        lacking += tuple(f"{what}; to get it: {remedy}" for _, what, remedy in gone)
        gone = []
    reasons = list(_general_reasons(registered, request, impl, gone))
    if impl is None:
        return Candidate(backend.name, tuple(reasons), None, backend.rank, False)
    # jax.export's symbolic sizes do not compare as numbers do: only who can be traced has to know about them.
    known = backend.traceable or request.kind != "jax" or isinstance(request.B * request.T * request.N, int)
    # Verifiers are asked about arrays and devices of the backend's own only.
    foreign = any(reason.code in ("array_kind", "device") for reason in reasons)
    for verifier in impl.verifiers if known and not foreign else ():
        reason = _ask(registered, verifier, request)
        if reason is not None and assumed and reason.code == "unavailable":
            lacking += (str(reason).removeprefix("[unavailable] "),)
        elif reason is not None:
            reasons.append(reason)
    archs = impl.verified_archs
    verified = PORTABLE in archs or request.device.arch in archs
    return Candidate(backend.name, tuple(reasons), None, backend.rank, verified, lacking)


def with_costs(request: Request, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates, those that can serve the call with their predicted costs.

    None are predicted where a sequence's bits must not depend on what else is in the batch: costs depend on that, and
    backends do not give the same bits.
    """
    if request.batch_invariant:
        return candidates
    return tuple([_with_cost(c, request) if c.supported else c for c in candidates])


def _with_cost(candidate: Candidate, request: Request) -> Candidate:
    found = _cost(REGISTRY.get(candidate.backend), request)
    if found is None:
        return candidate
    return dataclasses.replace(candidate, cost=found.seconds, cost_source=found.source)


def _ask(registered: Registered, verifier: Verifier, request: Request) -> Reason | None:
    """A verifier that raises or answers nonsense is a bug of its plugin: it rejects the call and says so, loudly."""
    answer, error = plugin_faults.attempt(verifier, request)
    if error is None and answer is None:
        return None
    if error is None and isinstance(answer, Reason):
        texts = (answer.code, answer.message, answer.got, answer.want)
        if all(isinstance(text, str) for text in texts):
            return answer if type(answer) is Reason else Reason(*texts)
    name, where = plugin_faults.name_of(verifier), f"backend {registered.backend.name}"
    if error is None:
        said = detail = f"answered {plugin_faults.shown(answer)}, neither None nor a Reason of texts"
        kind = type(answer).__name__
    else:  # the traceback travels in a warning, the error in the reason
        said, kind = f"raised {plugin_faults.shown(error)}", type(error).__name__
        detail = f"raised:\n{plugin_faults.traceback_of(error)}"
    plugin_faults.warn_once(where, f"verifier {name}", kind, f"verifier {name} {detail}")
    return Reason("verifier_error", f"verifier {name} {said}")


def _general_reasons(
    registered: Registered, request: Request, impl: OpImpl | None, gone: list[tuple[str, str, str]]
) -> list[Reason]:
    """The reasons the registry can give without asking the backend's own verifiers."""
    backend = registered.backend
    reasons = [
        Reason("unavailable", f"{what}; to get it: {remedy}", "not installed or not usable", name)
        for name, what, remedy in gone
    ]
    if request.kind not in backend.kinds:
        reasons.append(
            Reason("array_kind", "does not take these arrays", request.kind, " or ".join(backend.kinds))
        )
    if "*" not in backend.device_types and request.device.type not in backend.device_types:
        reasons.append(
            Reason("device", "does not run there", str(request.device), " or ".join(backend.device_types))
        )
    if impl is None:
        reasons.append(Reason("op", f"does not implement {request.op}", request.op, list_names(backend.ops)))
    elif unserved := request.features - impl.serves:
        reasons.append(
            Reason(
                "option",
                f"does not serve {list_names(sorted(unserved))}",
                list_names(sorted(unserved)),
                f"no features but {list_names(sorted(impl.serves))}",
            )
        )
    if impl is not None and request.batch_invariant and not impl.batch_invariant:
        reasons.append(
            Reason(
                "batch_invariance",
                "a sequence's bits may depend on what else is in the batch",
                "a call under batch_invariant()",
                "OpImpl.batch_invariant",
            )
        )
    if impl is not None and request.needs_grad and impl.backward is None:
        reasons.append(
            Reason("gradients", "has no backward for this op", "inputs that require grad", "no gradients")
        )
    if request.traced and request.kind == "jax" and not backend.traceable:
        reasons.append(Reason("traced", "cannot run under jax tracing", "tracers", "arrays with values"))
    return reasons


def _cost(registered: Registered, request: Request) -> Prediction | None:
    from kdacore.dispatch import cost  # not with `import kdacore`

    impl = registered.backend.ops[request.op]
    if impl.cost is not None:
        seconds, error = plugin_faults.attempt(impl.cost, request)
        if error is None and not cost.is_cost(seconds):
            error = ValueError(
                f"a cost is seconds, a finite number of 0 or more, or None; got {plugin_faults.shown(seconds)}"
            )
        if error is not None:  # a backend of unknown speed is still a backend
            plugin_faults.report(f"backend {registered.backend.name}", f"cost of {request.op}", error)
            return None
        return None if seconds is None else cost.Prediction(float(seconds), "estimated by the backend itself")
    return cost.predict(registered.backend.name, request)


def auto_may_choose(name: str, request: Request) -> bool:
    """Whether a backend may be chosen that nobody asked for."""
    backend = REGISTRY.get(name).backend
    kinds, devices = backend.auto_kinds, backend.auto_device_types
    return (kinds is None or request.kind in kinds) and (devices is None or request.device.type in devices)


def _ranked(request: Request, able: list[Candidate]) -> list[tuple[str, str]]:
    """Capable backends, best first, each with the reason for its place."""
    if not able:
        return []
    answers = REGISTRY.ask_each("kdacore_choose", request=request, candidates=tuple(able))
    chosen = next((answer for answer in answers if answer is not None), None)
    unproven = _unproven(request, able)
    by_rank = sorted(able, key=lambda c: (c.backend in unproven, -c.rank))
    highest = f"highest rank of those tested on {request.device.arch}" if unproven else "highest rank"
    # Backends whose cost is known come first, by cost; the others follow by rank.
    by_cost = sorted([c for c in by_rank if c.cost is not None], key=lambda c: c.cost or 0.0)
    why_first = "lowest cost" if len(by_cost) > 1 else "the only one of known cost"
    order = [(c.backend, why_first) for c in by_cost]
    order += [(c.backend, highest) for c in by_rank if c.cost is None]
    if len(able) == 1:
        order = [(able[0].backend, "the only one that can")]
    if chosen is not None:
        # A str first: other objects may compare equal to anything.
        if not isinstance(chosen, str) or chosen not in [c.backend for c in able]:
            asked = REGISTRY.hooks().kdacore_choose.get_hookimpls()
            where = f"plugin {list_names(i.plugin_name for i in asked)}"
            named = plugin_faults.shown(chosen)
            plugin_faults.complain(
                where, "kdacore_choose", named, f"named {named}, which cannot serve the call"
            )
        else:
            order = [(chosen, "chosen by the kdacore_choose hook")] + [o for o in order if o[0] != chosen]
    return order


def _unproven(request: Request, able: list[Candidate]) -> set[str]:
    """Where some backend has been tested on this architecture: those neither tested there nor of known speed."""
    arch = request.device.arch
    impls = {c.backend: REGISTRY.get(c.backend).backend.ops[request.op] for c in able}
    tested = {n for n, impl in impls.items() if arch and arch in impl.verified_archs}
    return {c.backend for c in able if tested and c.cost is None and c.backend not in tested}


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
