"""The plan of a call: everything that validation and selection decide, cached by what they read.

They read only what :meth:`Adapter.key` returns (shapes, dtypes, devices, gradient needs), the options and the policy.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdacore import config, contract, plugin_faults
from kdacore.arrays import Adapter
from kdacore.arrays.base import Outline
from kdacore.dispatch import results, selection
from kdacore.errors import ConfigError, ContractError, shown
from kdacore.ops import OpDef
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Reason, Request, Selection


class Plan:
    """A validated, selected call: what runs, and on which request."""

    __slots__ = (
        "adapter",
        "backend",
        "check",
        "differentiated",
        "forward",
        "gradients_checked",
        "impl",
        "inputs",
        "joined",
        "request",
        "results_checked",
        "run",
        "selection",
        "validate",
        "writes",
    )

    def __init__(
        self,
        opdef: OpDef,
        request: Request,
        chosen: Selection,
        adapter: Adapter,
        differentiated: Differentiated | None = None,
    ) -> None:
        registered = REGISTRY.get(chosen.backend)
        self.inputs = opdef.inputs
        self.request = request
        self.selection = chosen
        self.adapter = adapter
        self.backend: Backend = registered.backend
        self.impl: OpImpl = registered.backend.ops[request.op]
        self.forward = results.typed_forward(chosen.backend, request.op)
        self.run: Callable[[Plan, Any], Any] = adapter.run
        self.validate = config.get().validate_values
        self.check = _check_of(request, self.validate)
        """``check(request, inputs, adapter)``: reads values at every call and raises ContractError. None where none
        are read."""
        self.writes = not adapter.immutable and (request.inplace_state or request.has("out"))
        self.joined: Any = None
        """For an adapter: what it built for this plan (a ``custom_vjp`` function)."""
        self.differentiated = differentiated
        """Where the call may be differentiated, and its own backend has no backward for it: what serves it
        then."""
        self.results_checked = self.gradients_checked = False

    def record(self) -> None:
        """Note the selection in every :func:`record_selections` around."""
        for records in RECORDS.get():
            records.append(self.selection)

    def backward(self, inputs: Any, *rest: Any) -> Any:
        """The gradients from the backend, held to the request the first time."""
        grads = self.gradients(inputs, *rest)
        if not self.gradients_checked:
            results.check_gradients(self, inputs, grads)
            self.gradients_checked = True
        return grads

    @plugin_faults.guarded
    def gradients(self, inputs: Any, *rest: Any) -> Any:
        """The gradients from the backend."""
        try:
            return self.impl.backward(self.request, inputs, *rest)  # type: ignore[misc]
        except BaseException as error:
            self.failed("backward", error)
            raise

    def failed(self, function: str, error: BaseException) -> None:
        """See :func:`kdacore.dispatch.results.failed`, of a function of the plan's backend."""
        results.failed(self.backend.name, function, self.request, error)

    def check_gradients(self, inputs: Any, grads: Any, wanted: tuple[bool, ...]) -> None:
        """Hold gradients of another origin than :meth:`backward` to the request. PluginError."""
        results.check_gradients(self, inputs, grads, wanted)


Check = Callable[[Request, Any, Adapter], None]


def _check_of(request: Request, validate: bool) -> Check | None:
    """What reads values of a call: all of them where asked to, else offsets that are in host memory."""
    if validate and not request.traced:
        from kdacore.contract.values import check_values

        return check_values
    if request.packed and request.traced:
        from kdacore.contract.values import check_known_offsets

        return check_known_offsets
    if request.packed and request.device.type == "cpu":
        from kdacore.contract.values import check_host_offsets

        return check_host_offsets
    return None


REGISTRY.on_change(results.typed_forward.cache_clear)

_AUTO = selection.Policy()
PREFERENCE: contextvars.ContextVar[selection.Policy | None] = contextvars.ContextVar(
    "kdacore_policy", default=None
)
"""What the innermost :func:`use_backend` prefers."""
RECORDS: contextvars.ContextVar[tuple[list[Selection], ...]] = contextvars.ContextVar(
    "kdacore_records", default=()
)
"""Lists that selections are recorded in, one for each enclosing :func:`record_selections`."""
_plans: dict[Any, Plan] = {}
_lock = threading.Lock()
_MAX_PLANS = 8192


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


config.renew_in_child(_renew_lock)


def clear() -> None:
    """Forget every plan."""
    global _default_policy
    with _lock:
        _plans.clear()
        _default_policy = None


_default_policy: selection.Policy | None = None
REGISTRY.on_change(clear)


def _environment_policy() -> selection.Policy:
    global _default_policy
    if _default_policy is None:
        names = config.get().backend
        for name in names:
            try:
                REGISTRY.get(name)
            except ContractError as error:  # no caller passed it: the environment variable is wrong
                raise ConfigError("KDACORE_BACKEND", name, error.want) from None
        source = "KDACORE_BACKEND" if names else _AUTO.source
        _default_policy = selection.Policy("", names, source, config.get().batch_invariant)
    return _default_policy


def current_policy(opdef: OpDef, backend: object) -> selection.Policy:
    """``backend=`` over ``use_backend`` over ``KDACORE_BACKEND`` over auto."""
    if backend is None:
        return PREFERENCE.get() or _environment_policy()
    if not isinstance(backend, str) or not backend:
        raise ContractError(opdef.name, "backend", shown(backend), "None or the name of a backend")
    return selection.Policy(str.__str__(backend), (), "backend=", _asks_batch_invariance())


def _asks_batch_invariance() -> bool:
    """What the innermost block asks, else the environment. Reads no other variable: those may be wrong."""
    around = PREFERENCE.get()
    return config.get().batch_invariant if around is None else around.batch_invariant


def plan_for(
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    policy: selection.Policy,
    needs_grad: bool | None = None,
) -> Plan:
    """Validate and select, whatever it costs."""
    request, adapter = contract.build_request(opdef, inputs, options, needs_grad=needs_grad)
    request = asked_of(request, policy)
    if request.needs_grad and not adapter.knows_grad:
        return _plan_of_trace(opdef, request, policy, adapter)
    return Plan(opdef, request, selection.select(request, policy), adapter)


def _plan_of_trace(opdef: OpDef, request: Request, policy: selection.Policy, adapter: Adapter) -> Plan:
    """The plan of a call of which it is not known yet whether it will be differentiated.

    A backend that lacks nothing but a backward may serve it for as long as it is not.
    """
    backends = REGISTRY.backends().values()
    lacking = {r.backend.name for r in backends if lacks_backward_only(selection.judge(r, request).reasons)}
    if lacking and opdef.family != "gate":
        plain = dataclasses.replace(request, needs_grad=False)
        chosen = selection.select(plain, policy)
        if chosen.backend in lacking:
            return Plan(opdef, plain, chosen, adapter, Differentiated(opdef, request, policy, adapter))
    return Plan(opdef, request, selection.select(request, policy), adapter)


@dataclasses.dataclass(frozen=True)
class Differentiated:
    """A call once it is known that it is differentiated."""

    opdef: OpDef
    request: Request
    policy: selection.Policy
    adapter: Adapter

    def plan(self) -> Plan:
        """Its plan, which is recorded. UnsupportedError where no backend serves it."""
        chosen = selection.select(self.request, self.policy)
        plan = Plan(self.opdef, self.request, chosen, self.adapter)
        plan.record()
        return plan


def lacks_backward_only(reasons: Iterable[Reason]) -> bool:
    """Whether a backward is all that is missing: the backend can run the call, but not differentiate it."""
    return {reason.code for reason in reasons} == {"gradients"}


def key_of(adapter: Adapter, opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Any:
    """All that the plan of a call depends on. None when the call must not be cached."""
    types = tuple(map(type, options))
    if not _PLAIN.issuperset(types):
        options = plain_options(options)
        types = tuple(map(type, options))
        if not _PLAIN.issuperset(types):
            return None
    array_key = adapter.key(inputs)
    if array_key is None:
        return None
    # Types too: True == 1 == 1.0 as dictionary keys, but not as arguments.
    return (opdef.name, array_key, options, types, asked)


_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of options that are compared with those of other calls. A class of the caller's may compare as it likes."""


def plain_options(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options with Python's own numbers in place of NumPy's and of subclasses of theirs; others as they are."""
    return tuple(map(_plain_option, options))


def _plain_option(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if issubclass(kind, int):
        return int.__add__(x, 0)
    if issubclass(kind, float):
        return float.__mul__(x, 1.0)
    if kind.__module__ == "numpy" and issubclass(kind, numbers.Real):
        number = x.item()
        return number if type(number) in _PLAIN else x
    return x


def is_plain(option: Any) -> bool:
    """Is it a number, a flag or None whose literal has the same value? Not-a-number and infinity have none."""
    return type(option) in _PLAIN and (type(option) is not float or math.isfinite(option))


def asked_of(request: Request, policy: selection.Policy) -> Request:
    """The request with what the policy asks of every implementation."""
    return dataclasses.replace(request, batch_invariant=True) if policy.batch_invariant else request


Make = Callable[[OpDef, Any, tuple[Any, ...], Any], Plan]


def cached_plan(
    adapter: Adapter, opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any, make: Make
) -> Plan:
    """The plan of a call of this shape; the first time from ``make(opdef, inputs, options, asked)``.

    ``asked``: what was asked of dispatch, in whatever form ``make`` takes it.
    """
    key = key_of(adapter, opdef, inputs, options, asked)
    if key is None:
        return make(opdef, inputs, options, asked)
    found = _plans.get(key)
    if found is None:
        found = make(opdef, inputs, options, asked)
        if len(_plans) >= _MAX_PLANS:
            clear()
        _plans[key] = found
    return found


def execute(
    plan: Plan, inputs: Any, run: Callable[[Plan, Any], Any], given: list[Outline] | None = None
) -> Any:
    """Run a plan: check the values that are read, record it, and go. ``given``: outlines of the arrays, if known."""
    if plan.check is not None:
        plan.check(plan.request, inputs, plan.adapter)
    plan.record()
    if plan.results_checked:
        return run(plan, inputs)
    outputs = run(plan, inputs)
    results.check_results(plan, inputs, outputs, given=given)
    plan.results_checked = True
    return outputs


@contextlib.contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Prefer these backends, in this order, for the calls made inside the ``with`` block (this thread or task).

    The first that can serve a call runs it; when none can, dispatch is automatic again and ``explain`` says so.
    Use ``backend=`` on a call to force one backend or get an error.

    Args:
        names: names of backends, best first.

    Raises:
        ContractError: no name, or a name that no backend has.

    Examples:
        >>> import kdacore
        >>> with kdacore.use_backend("reference"):
        ...     pass
    """
    if not names:
        raise ContractError("use_backend", "names", "no name", "at least one name of a backend")
    for name in names:
        if not isinstance(name, str):
            several = isinstance(name, (list, tuple))
            wanted = "names of backends, one argument each" if several else "names of backends"
            raise ContractError("use_backend", "names", shown(name), wanted)
        REGISTRY.get(name, "use_backend", "names")
    token = PREFERENCE.set(selection.Policy("", tuple(names), "use_backend", _asks_batch_invariance()))
    try:
        yield
    finally:
        PREFERENCE.reset(token)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """A sequence gives the same bits alone, in a batch and in a pack, for the calls made inside the ``with`` block.

    Results and gradients of a sequence then do not depend on what it is computed with. Implementations that do not
    promise that are declined, reason code ``batch_invariance``; the others may run more slowly than otherwise.
    ``KDACORE_BATCH_INVARIANT=1`` asks for it everywhere. Gradients of what sequences share (``A_log``, ``dt_bias``) are
    sums over them and depend on all.

    Examples:
        >>> import kdacore
        >>> with kdacore.batch_invariant():
        ...     pass
    """
    around = PREFERENCE.get() or _environment_policy()
    token = PREFERENCE.set(dataclasses.replace(around, batch_invariant=True))
    try:
        yield
    finally:
        PREFERENCE.reset(token)


@contextlib.contextmanager
def record_selections() -> Iterator[list[Selection]]:
    """Collect what really ran, in order: one :class:`~kdacore.types.Selection` for each call inside the block.

    The chosen backend's candidate has the form that served the call (:attr:`kdacore.types.Candidate.form`).

    A second one follows where JAX differentiates a call that another backend serves then.

    Examples:
        >>> import kdacore
        >>> with kdacore.record_selections() as ran:
        ...     pass
        >>> ran
        []
    """
    from kdacore.dispatch.forms import Recorded  # here: `import kdacore` stays light

    records = Recorded()
    token = RECORDS.set((*RECORDS.get(), records))  # blocks outside this one see its calls too
    try:
        yield records
    finally:
        RECORDS.reset(token)
