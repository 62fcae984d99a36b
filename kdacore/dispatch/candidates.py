"""What one backend answers to a call: its reasons against it, and its predicted cost.

Verifiers and costs may read anything of a request, so they are asked for every new call. A server's calls differ in
lengths alone, and most of what is asked does not depend on those: a :class:`Judge` answers for all calls of a family
(:func:`kdacore.types.family_of`), and asks once what stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kdacore import plugin_faults
from kdacore.errors import list_names
from kdacore.registry import REGISTRY, Registered, all_answered, missing
from kdacore.types import Candidate, OpImpl, Reason, Request, Verifier

if TYPE_CHECKING:
    from kdacore.dispatch.cost import Prediction

PORTABLE = "*"
_MARK = "reads_no_lengths"
"""What :func:`kdacore.verifiers.reads_no_lengths` sets."""
_new: Any = tuple.__new__


Predict = Callable[[Request], "Prediction | None"]
"""Predicts the cost of a call; None where it is not known."""


class Judge:
    """How one backend answers the calls of a family.

    Args:
        registered: the backend.
        request: a call of the family.
        assumed: the request is of hardware that need not be here: what is missing is no reason then, neither hardware
            nor packages. With a traced call whose program is compiled for another machine hardware is none.
    """

    __slots__ = (
        "_able",
        "_assumed",
        "_general",
        "_lacking",
        "_places",
        "_predict",
        "_reasons",
        "_remedies",
        "_sizes_are_numbers",
        "_verified",
        "always",
        "checks",
        "impl",
        "lasts",
        "registered",
        "tested",
    )

    def __init__(self, registered: Registered, request: Request, assumed: bool = False) -> None:
        backend = registered.backend
        elsewhere = False
        if not assumed and request.kind == "jax" and request.traced:
            from kdacore import device  # here: other first calls load no more than they need

            elsewhere = device.compiled_for_elsewhere(request)
        self.registered = registered
        self.impl = impl = backend.ops.get(request.op)
        gone = missing(backend, hardware=False) if assumed or elsewhere else missing(backend)
        self._assumed, self._lacking, self._remedies = assumed, tuple[str, ...](), tuple[str, ...]()
        if assumed or elsewhere:
            self._lacking = tuple(what for _, what, _ in missing(backend, hardware=True))
        if assumed:
            self._lacking += tuple(f"{what}; to get it: {remedy}" for _, what, remedy in gone)
            packages = [r.remedy for r in backend.requirements if not r.hardware]
            self._remedies = tuple(dict.fromkeys(packages)) if self._lacking else ()
            gone = []
        self.lasts = all_answered(backend)
        """Whether it may answer for further calls. A probe that failed is asked again."""
        self._general = _general_reasons(registered, request, impl, gone)
        archs = frozenset[str]() if impl is None else impl.verified_archs
        self.tested = bool(request.device.arch) and request.device.arch in archs
        """Whether the op has been tested on the device's architecture."""
        self._verified = PORTABLE in archs or request.device.arch in archs
        # jax.export's symbolic sizes do not compare as numbers do: only who can be traced has to know about them.
        self._sizes_are_numbers = request.kind != "jax" or backend.traceable
        self.always: Candidate | None = None
        """The answer to every call of the family, where none of it depends on lengths."""
        self.checks: tuple[Verifier, ...] | None = None
        """The verifiers that are asked at every call. None before the first call."""
        self._places: tuple[int, ...] = ()
        """Theirs among all verifiers."""
        self._reasons: tuple[tuple[int, Reason], ...] = ()
        """The reasons of the other verifiers, with their places."""
        self._able: Candidate | None = None
        """The answer where no verifier objects, made at the first such call."""
        self._predict: Predict | None = None
        # Verifiers are asked about arrays and devices of the backend's own only.
        if impl is None:
            self.always = Candidate(backend.name, tuple(self._general), None, backend.rank, False)
        elif any(reason.code in ("array_kind", "device") for reason in self._general):
            self.always = self._candidate(tuple(self._general))

    def _candidate(self, reasons: tuple[Reason, ...]) -> Candidate:
        backend, lacking, remedies = self.registered.backend, self._lacking, self._remedies
        if self._assumed:
            gone = [r for r in reasons if r.code == "unavailable"]
            lacking += tuple(str(reason).removeprefix("[unavailable] ") for reason in gone)
            remedies += tuple(r.want for r in gone if r.want.startswith("pip install "))
            reasons = tuple(r for r in reasons if r not in gone)
        fields = backend.name, reasons, None, backend.rank, self._verified, lacking
        return Candidate(*fields, remedies=remedies)

    def candidate(self, request: Request) -> Candidate:
        """Every reason against one call of the family. Its cost is not predicted yet."""
        if self.always is not None:
            return self.always
        if not self._sizes_are_numbers and not isinstance(request.B * request.T * request.N, int):
            return self._candidate(tuple(self._general))
        if self.checks is None:
            return self._first(request)
        i, answer, error = plugin_faults.first_answer(self.checks, 0, request)
        if i == len(self.checks) and not self._reasons:
            return self.unopposed()
        found = list(self._reasons)
        while i < len(self.checks):
            verifier = self.checks[i]
            found.append(
                (self._places[i], _usable(answer) or _fault(self.registered, verifier, answer, error))
            )
            i, answer, error = plugin_faults.first_answer(self.checks, i + 1, request)
        found.sort(key=_place)
        return self._candidate((*self._general, *[reason for _, reason in found]))

    @property
    def objects_by_checks_alone(self) -> bool:
        """Whether the answer to every call is :meth:`unopposed` unless one of ``checks`` objects."""
        return self.checks is not None and not self._reasons and self._sizes_are_numbers

    def unopposed(self) -> Candidate:
        """The answer where no verifier objects."""
        if self._able is None:
            self._able = self._candidate(tuple(self._general))
        return self._able

    def _first(self, request: Request) -> Candidate:
        """The answer to the first call of the family, after which it is known which verifiers read lengths."""
        from kdacore.lazy import resolved  # by now the plugins have imported it

        reasons: list[Reason] = []
        always: list[tuple[int, Reason]] = []
        checks: list[tuple[int, Verifier]] = []
        for place, verifier in enumerate([] if self.impl is None else self.impl.verifiers):
            answer, error = plugin_faults.attempt(verifier, request)
            usable = _usable(answer)
            faulty = usable is None and (answer is not None or error is not None)
            if faulty:
                reasons.append(_fault(self.registered, verifier, answer, error))
            elif usable is not None:
                reasons.append(usable)
            if faulty or not _is_marked(verifier):
                checks.append((place, resolved(verifier)))
            elif usable is not None:
                always.append((place, usable))
        self._reasons = tuple(always)
        self._places = tuple([place for place, _ in checks])
        self.checks = tuple([verifier for _, verifier in checks])
        candidate = self._candidate((*self._general, *reasons))
        if not checks:
            self.always = candidate
        return candidate

    @property
    def predict(self) -> Predict:
        """Predicts the cost of a call that the backend can serve."""
        if self._predict is None:
            self._predict = _predictor(self.registered, self.impl)
        return self._predict


_OWN_ESTIMATE = "estimated by the backend itself"


def _predictor(registered: Registered, impl: OpImpl | None) -> Predict:
    """What predicts the costs of calls that a backend can serve."""
    from kdacore.dispatch import cost  # not with `import kdacore`

    name, own = registered.backend.name, None if impl is None else impl.cost
    if own is None:
        return cost.Predictor(name).predict

    def estimate(request: Request) -> Prediction | None:
        seconds, error = plugin_faults.attempt(own, request)
        if error is None and not cost.is_cost(seconds):
            error = ValueError(
                f"a cost is seconds, a finite number of 0 or more, or None; got {plugin_faults.shown(seconds)}"
            )
        if error is not None:  # a backend of unknown speed is still a backend
            plugin_faults.report(f"backend {name}", f"cost of {request.op}", error)
            return None
        return None if seconds is None else cost.Prediction(float(seconds), _OWN_ESTIMATE)

    return estimate


def priced(c: Candidate, found: Prediction | None) -> Candidate:
    """The candidate with its predicted cost, if there is a prediction."""
    if found is None:
        return c
    fields = (
        c.backend,
        c.reasons,
        found.seconds,
        c.rank,
        c.verified,
        c.lacking,
        found.source,
        c.form,
        c.remedies,
    )
    priced: Candidate = _new(Candidate, fields)
    return priced


def judge(registered: Registered, request: Request, assumed: bool = False) -> Candidate:
    """Every reason that one backend has against a request; the arguments are those of :class:`Judge`."""
    return Judge(registered, request, assumed).candidate(request)


def with_costs(request: Request, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates, those that can serve the call with their predicted costs.

    None are predicted where a sequence's bits must not depend on what else is in the batch: costs depend on that, and
    backends do not give the same bits.
    """
    if request.batch_invariant:
        return candidates
    return tuple([_with_cost(c, request) if c.supported else c for c in candidates])


def _with_cost(candidate: Candidate, request: Request) -> Candidate:
    registered = REGISTRY.get(candidate.backend)
    predict = _predictor(registered, registered.backend.ops.get(request.op))
    return priced(candidate, predict(request))


def _place(found: tuple[int, Reason]) -> int:
    return found[0]


def _is_marked(verifier: Verifier) -> bool:
    """Whether a verifier declares that it reads no lengths. Runs no code of the plugin's."""
    return type(verifier) is FunctionType and verifier.__dict__.get(_MARK) is True


def _usable(answer: object) -> Reason | None:
    """A verifier's answer as a reason of texts; None where it is no such thing."""
    if not isinstance(answer, Reason):
        return None
    texts = (answer.code, answer.message, answer.got, answer.want)
    if not all(isinstance(text, str) for text in texts):
        return None
    return answer if type(answer) is Reason else Reason(*texts)


def _fault(registered: Registered, verifier: Verifier, answer: object, error: BaseException | None) -> Reason:
    """A verifier that raises or answers nonsense is a bug of its plugin: it rejects the call and says so, loudly."""
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
    reasons = [Reason("unavailable", f"{what}; to get it: {remedy}") for _, what, remedy in gone]
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
