"""From a public call to a backend's function: one dictionary look-up when the call's shape has been seen before.

A :class:`Plan` is everything validation and selection decide. Both read only what :meth:`Adapter.key` returns
(shapes, dtypes, devices, gradient needs), the options and the policy, so a plan may be cached on those.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kdacore import config
from kdacore.arrays import Adapter, ShapeDtype, adapter_of
from kdacore.arrays import _by_type as _adapters
from kdacore.dispatch import results, selection, validate
from kdacore.errors import ConfigError, ContractError
from kdacore.ops import OPS, OpDef
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Request, Selection

if TYPE_CHECKING:
    from kdacore.dispatch.fast_path import FastPath


class Plan:
    """A validated, selected call: what runs, and on which request."""

    __slots__ = (
        "_grads_checked",
        "adapter",
        "backend",
        "fast_path",
        "forward",
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

    def __init__(self, opdef: OpDef, request: Request, chosen: Selection, adapter: Adapter) -> None:
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
        self.fast_path = None if request.needs_grad or self.validate else self.impl.fast_path
        self.writes = not adapter.immutable and (request.inplace_state or request.has("out"))
        self.joined: Any = None
        """For an adapter: what it built for this plan (a ``custom_vjp`` function)."""
        self.results_checked = False
        self._grads_checked = False

    def backward(self, inputs: Any, *rest: Any) -> Any:
        """The gradients from the backend, held to the request the first time."""
        grads = self.impl.backward(self.request, inputs, *rest)  # type: ignore[misc]
        if not self._grads_checked:
            results.check_gradients(self, inputs, grads)
            self._grads_checked = True
        return grads


REGISTRY.on_change(results.typed_forward.cache_clear)

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
    # Asked first: nothing that a traced graph would have to guard may come before.
    if torch is not None and torch.compiler.is_compiling():
        from kdacore.dispatch import torch_operators

        return torch_operators.call(opdef, arrays, options, backend)
    first = arrays[0]
    adapter = _adapters.get(type(first)) or adapter_of(first)
    if adapter is None:
        validate.build_request(opdef, opdef.inputs(*arrays), options)  # names the argument at fault
        raise ContractError(opdef.name, opdef.arrays[0], type(first).__name__, "an array")
    asked = (backend, _policy.get())
    fast_path = adapter.fast_path or _fast_path_of(adapter)
    seen = None if fast_path is None else fast_path.find(opdef.name, arrays, options, asked)
    if seen is not None and seen.fast_call is not None:
        outputs = seen.fast_call(arrays)
        if outputs is not None:
            for records in _records.get():
                records.append(seen.plan.selection)
            return outputs
    inputs = opdef.inputs(*arrays)
    if seen is None:  # a call that is recognised is not inside a transformation: the array test excludes that
        adapter.refuse(opdef.name, arrays)
    if adapter.through_operators:
        from kdacore.dispatch import torch_operators

        return torch_operators.call(opdef, inputs, options, backend)
    if seen is not None:
        return execute(seen.plan, inputs, seen.run)
    plan = cached_plan(adapter, opdef, inputs, options, asked, _plan_of_call)
    if plan.writes:  # calls recognised as this one have the same strides in what they write
        from kdacore.dispatch.aliasing import check_memory

        check_memory(plan.request, inputs, adapter)
    if fast_path is not None:
        fast_path.note(opdef.name, inputs, options, asked, plan)
    return execute(plan, inputs, plan.run)


def _fast_path_of(adapter: Adapter) -> FastPath | None:
    """The memory of calls with arrays of this kind; None where the library cannot recognise them."""
    if adapter.fast_path is None and adapter.array_test is not None:
        from kdacore.dispatch.fast_path import FastPath

        fast_path = FastPath(adapter.array_test, adapter.grad_enabled, adapter.runner)
        REGISTRY.on_change(fast_path.clear)
        adapter.fast_path = fast_path
    made: FastPath | None = adapter.fast_path
    return made


def _plan_of_call(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan:
    return plan_for(opdef, inputs, options, current_policy(opdef, asked[0]))


def execute(plan: Plan, inputs: Any, run: Callable[[Plan, Any], Any]) -> Any:
    """Run a plan: check values when asked to, record it, and go."""
    if plan.validate:
        from kdacore.dispatch.values import check_values

        check_values(plan.request, inputs, plan.adapter)
    for records in _records.get():
        records.append(plan.selection)
    if plan.results_checked:
        return run(plan, inputs)
    outputs = run(plan, inputs)
    results.check_results(plan, inputs, outputs)
    plan.results_checked = True
    return outputs


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

    Example:
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

    Example:
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
