"""From a public call to a backend's function: one dictionary look-up when the call's shape has been seen before.

A :class:`Plan` is everything validation and selection decide. Both read only what :meth:`Adapter.key` returns
(shapes, dtypes, devices, gradient needs), the options and the policy, so a plan may be cached on those.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kdacore import config
from kdacore.arrays import Adapter, ShapeDtype, adapter_of
from kdacore.arrays import _by_type as _adapters
from kdacore.dispatch import selection, validate
from kdacore.errors import ConfigError, ContractError, PluginError
from kdacore.ops import OPS, OpDef
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Request, Selection


class Plan:
    """A validated, selected call: what runs, and on which request."""

    __slots__ = (
        "adapter",
        "backend",
        "fast_path",
        "forward",
        "impl",
        "inputs",
        "joined",
        "request",
        "run",
        "selection",
        "validate",
        "writes",
    )

    def __init__(self, opdef: OpDef, request: Request, chosen: Selection, adapter: Adapter) -> None:
        registered = REGISTRY.get(chosen.backend)
        self.inputs = opdef.inputs
        self.request = request
        self.selection = chosen
        self.adapter = adapter
        self.backend: Backend = registered.backend
        self.impl: OpImpl = registered.backend.ops[request.op]
        self.forward = _answering(chosen.backend, request.op)
        self.run: Callable[[Plan, Any], Any] = adapter.run
        self.validate = config.get().validate_values
        self.fast_path = None if request.needs_grad or self.validate else self.impl.fast_path
        self.writes = not adapter.immutable and (request.inplace_state or request.has("out"))
        self.joined: Any = None
        """Where an adapter keeps what it built for this plan (a ``custom_vjp`` function)."""


@functools.cache
def _answering(backend: str, op: str) -> Callable[..., Any]:
    """A backend's forward, held to what the op returns: anything else would go wrong far from the backend.

    One function for all plans, as adapters keep what they compiled by it.
    """
    forward, wanted = REGISTRY.get(backend).backend.ops[op].forward, OPS[op].outputs

    def whole(request: Request, inputs: Any) -> Any:
        results = forward(request, inputs)
        if not isinstance(results, wanted):  # type: ignore[arg-type]
            raise _nonsense(backend, op, results, f"kdacore.types.{wanted.__name__}")  # type: ignore[union-attr]
        return results

    def array(request: Request, inputs: Any) -> Any:
        result = forward(request, inputs)
        if type(result) not in _adapters and adapter_of(result) is None:
            raise _nonsense(backend, op, result, "an array")
        return result

    return array if wanted is None else whole


def _nonsense(backend: str, op: str, got: Any, want: str) -> PluginError:
    return PluginError(f"backend {backend!r}: forward of {op} returned {type(got).__name__}; wanted {want}")


REGISTRY.on_change(_answering.cache_clear)

_AUTO = selection.Policy()
_policy: contextvars.ContextVar[selection.Policy | None] = contextvars.ContextVar(
    "kdacore_policy", default=None
)
_records: contextvars.ContextVar[tuple[list[Selection], ...]] = contextvars.ContextVar(
    "kdacore_records", default=()
)
_plans: dict[Any, Plan] = {}
_lock = threading.Lock()
_MAX_PLANS = 8192


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
            except ContractError as error:  # nobody passed it: it is the environment that is wrong
                raise ConfigError("KDACORE_BACKEND", name, error.want) from None
        _default_policy = selection.Policy("", names, "KDACORE_BACKEND") if names else _AUTO
    return _default_policy


def current_policy(opdef: OpDef, backend: object) -> selection.Policy:
    """``backend=`` over ``use_backend`` over ``KDACORE_BACKEND`` over auto."""
    if backend is None:
        return _policy.get() or _environment_policy()
    if not isinstance(backend, str) or not backend:
        raise ContractError(opdef.name, "backend", repr(backend), "None or the name of a backend")
    return selection.Policy(backend, (), "backend=")


def plan_for(
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    policy: selection.Policy,
    needs_grad: bool | None = None,
) -> Plan:
    """Validate and select, whatever it costs."""
    request, adapter = validate.build_request(opdef, inputs, options, needs_grad=needs_grad)
    return Plan(opdef, request, selection.select(request, policy), adapter)


Make = Callable[[OpDef, Any, tuple[Any, ...], Any], Plan]


def cached_plan(
    adapter: Adapter, opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any, make: Make
) -> Plan:
    """The plan of a call of this shape; the first time from ``make(opdef, inputs, options, asked)``.

    ``asked``: what was asked of dispatch, in whatever form ``make`` takes it.
    """
    array_key = adapter.key(inputs)
    if array_key is None:
        return make(opdef, inputs, options, asked)
    # Types too: True == 1 == 1.0 as dictionary keys, but not as arguments.
    key = (opdef.name, array_key, options, tuple(map(type, options)), asked)
    try:
        found = _plans.get(key)
    except TypeError:  # an unhashable option: validation names it
        return make(opdef, inputs, options, asked)
    if found is None:
        found = make(opdef, inputs, options, asked)
        if len(_plans) >= _MAX_PLANS:
            clear()
        _plans[key] = found
    return found


def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object = None) -> Any:
    """Run one public call. Returns what the backend's forward returns, or the beginning of it that callers see.

    ``arrays``: as in the op's inputs, but a plain tuple, since a call seen before needs no more.

    Raises:
        ContractError: the call breaks the contract.
        ConfigError: ``KDACORE_BACKEND`` names no backend.
        UnsupportedError: the forced backend, or every backend for a traced call, cannot serve it.
    """
    torch = sys.modules.get("torch")
    if (
        torch is not None and torch.compiler.is_compiling()
    ):  # before anything a traced graph would have to guard
        from kdacore.arrays.torch.eager import TORCH

        return TORCH.call_compiled(opdef, arrays, options, backend)
    first = arrays[0]
    adapter = _adapters.get(type(first)) or adapter_of(first)
    asked = (backend, _policy.get())
    recent = None if adapter is None else adapter.recent
    known = None if recent is None else recent.find(opdef.name, arrays, options, asked)
    if known is not None and known.step is not None:
        results = known.step(arrays)
        if results is not None:
            for records in _records.get():
                records.append(known.plan.selection)
            return results
    inputs = opdef.inputs(*arrays)
    if adapter is None:
        validate.build_request(opdef, inputs, options)  # names the argument at fault
        raise ContractError(opdef.name, opdef.arrays[0], type(first).__name__, "an array")
    if known is None:  # a call that is recognised is inside nothing: the array library's test sees to that
        adapter.refuse(opdef.name, arrays)
    if adapter.through_operators:
        return adapter.call_compiled(opdef, inputs, options, backend)
    if known is not None:
        return execute(known.plan, inputs, known.run)
    plan = cached_plan(adapter, opdef, inputs, options, asked, _plan_of_call)
    if plan.writes:  # a call recognised as this one lays what it writes out alike, if elsewhere
        from kdacore.dispatch.aliasing import check_memory

        check_memory(plan.request, inputs, adapter)
    if recent is not None:
        recent.note(opdef.name, inputs, options, asked, plan)
    return execute(plan, inputs, plan.run)


def _plan_of_call(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan:
    return plan_for(opdef, inputs, options, current_policy(opdef, asked[0]))


def execute(plan: Plan, inputs: Any, run: Callable[[Plan, Any], Any]) -> Any:
    """Run a plan: check values when asked to, record it, and go."""
    if plan.validate:
        from kdacore.dispatch.values import check_values

        check_values(plan.request, inputs, plan.adapter)
    for records in _records.get():
        records.append(plan.selection)
    return run(plan, inputs)


def explain(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object = None) -> Selection:
    """What dispatch would do with a call; nothing runs, a forced backend that cannot serve is reported, not raised."""
    request, _ = validate.build_request(opdef, inputs, options)
    policy = current_policy(opdef, backend)
    assumed = any(isinstance(x, ShapeDtype) for x in inputs)
    if policy.forced:
        REGISTRY.get(policy.forced, opdef.name)
        candidates = tuple(selection.judge(r, request, assumed) for r in REGISTRY.backends().values())
        able = next(c for c in candidates if c.backend == policy.forced).supported
        why = (
            "forced by backend="
            if able
            else f"backend {policy.forced!r} was forced and cannot serve this call"
        )
        return Selection(request, policy.forced if able else "", why, candidates)
    return selection.decide(request, policy, run_selfchecks=False, assumed=assumed)


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
            raise ContractError("use_backend", "names", repr(name), "names of backends")
        REGISTRY.get(name, "use_backend", "names")
    token = _policy.set(selection.Policy("", tuple(names), "use_backend"))
    try:
        yield
    finally:
        _policy.reset(token)


@contextlib.contextmanager
def record_selections() -> Iterator[list[Selection]]:
    """Collect what really ran, in order: one :class:`~kdacore.types.Selection` for each call inside the block.

    Examples:
        >>> import kdacore
        >>> with kdacore.record_selections() as ran:
        ...     pass
        >>> ran
        []
    """
    records: list[Selection] = []
    token = _records.set((*_records.get(), records))  # blocks outside this one see its calls too
    try:
        yield records
    finally:
        _records.reset(token)


def opdef_of(op: object) -> OpDef:
    """An op by name or by its public function."""
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if name not in OPS:
        raise ContractError("explain", "op", repr(op), f"one of {', '.join(OPS)}, or the public function")
    return OPS[name]
