"""A public call: recognise it as one like an earlier call, or plan it; then run it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kdacore import contract, plugin_faults
from kdacore.arrays import Adapter, adapter_of, has_dtensor, is_spec
from kdacore.arrays.base import ADAPTERS
from kdacore.dispatch import selection
from kdacore.dispatch.plan import (
    PREFERENCE,
    Plan,
    asked_of,
    cached_plan,
    current_policy,
    execute,
    plain_options,
    plan_for,
)
from kdacore.errors import ContractError, did_you_mean, shown
from kdacore.ops import OPS, OpDef
from kdacore.registry import REGISTRY
from kdacore.types import Request, Selection

_new_tuple: Any = tuple.__new__
"""Makes the named tuple of an op's arrays in half the time of its constructor."""


@plugin_faults.guarded
def call(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: object = None) -> Any:
    """Run one public call. Returns what the backend's forward returns, or the beginning of it that callers see.

    ``arrays``: as in the op's inputs, but a plain tuple, since a call that is recognised needs no more.

    Raises:
        ContractError: the call breaks the contract.
        ConfigError: ``KDACORE_BACKEND`` names no backend.
        UnsupportedError: the forced backend, or every backend for a traced call, cannot serve it.
    """
    torch = sys.modules.get("torch")
    # Asked first: nothing that a traced graph would have to guard may come before.
    if torch is not None and torch.compiler.is_dynamo_compiling():
        from kdacore.dispatch import torch_operators

        return torch_operators.call(opdef, arrays, options, backend, eager_call=call)
    if backend is not None and type(backend) is not str:  # which may compare as it likes
        backend = current_policy(opdef, backend).forced
    adapter = ADAPTERS.get(type(arrays[0])) or _adapter(opdef, arrays, options)
    asked = (backend, PREFERENCE.get())
    seen_calls = adapter.seen_calls
    run = None if seen_calls is None else seen_calls.recognise(opdef.name, arrays, options, asked)
    if run is None:
        run = _plan(opdef, adapter, arrays, options, asked)
    return run(arrays)


def _adapter(opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Adapter:
    """The adapter of a call's arrays."""
    adapter = adapter_of(arrays[0])
    if adapter is None:
        contract.build_request(opdef, opdef.inputs(*arrays), options)  # names the argument at fault
        raise ContractError(opdef.name, opdef.arrays[0], type(arrays[0]).__name__, "an array")
    return adapter


def _plan(
    opdef: OpDef, adapter: Adapter, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: Any
) -> Callable[[tuple[Any, ...]], Any]:
    """Look at the arrays of a call that was not recognised, and plan it. What is returned runs it."""
    inputs = _new_tuple(opdef.inputs, arrays)
    if adapter.immutable:  # JAX
        inputs = adapter.unwrapped(inputs)
    if opdef.family != "stage" and has_dtensor(arrays):
        return functools.partial(_run_with_dtensors, opdef, options, asked)
    torch = sys.modules.get("torch")
    # A call that is recognised is neither traced nor inside a transformation: the array test excludes that.
    by_operators = exporting = torch is not None and torch.compiler.is_compiling()
    readable = inputs
    if not exporting:
        by_operators, readable = adapter.admit(opdef, inputs, options)
    as_given = readable is inputs
    if not as_given:
        inputs = _new_tuple(opdef.inputs, readable)
    if by_operators:
        return functools.partial(_run_by_operators, opdef, inputs, options, asked)
    plan = cached_plan(adapter, opdef, inputs, options, asked, _plan_of_call)
    note = functools.partial(_take_note, opdef, adapter, inputs, options, asked, plan)
    return functools.partial(
        _run, plan, inputs, note if as_given else None
    )  # others would never be recognised


def _run(plan: Plan, inputs: Any, note: Callable[[], None] | None, arrays: tuple[Any, ...]) -> Any:
    """Run a planned call. ``inputs`` stand for ``arrays``, the caller's, as backends may read them."""
    outlines, adapter = None, plan.adapter
    if plan.writes:
        from kdacore.contract.aliasing import check_memory

        outlines = check_memory(plan.request, inputs, adapter)
    elif plan.request.needs_grad:
        adapter.check_saved(plan.request, inputs)
    if note is not None:
        note()
    return execute(plan, inputs, plan.run, outlines)


_called: set[Adapter] = set()
"""Of the arrays of calls that were made while there was no memory of calls."""


def _take_note(
    opdef: OpDef, adapter: Adapter, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan
) -> None:
    """Let calls like this one be recognised from now on, if they keep coming."""
    if adapter.seen_calls is None:
        if not adapter.recognisable:
            return
        if not plan.results_checked and adapter not in _called:  # a process that makes one call does without
            _called.add(adapter)
            return
    from kdacore.dispatch import recognition  # here, for the same reason

    recognition.note(opdef, adapter, inputs, options, asked, plan)


def _run_by_operators(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any, arrays: tuple[Any, ...]
) -> Any:
    """Run a call of tensor subclasses, or one that is exported, through the ``torch.library`` operators."""
    from kdacore.dispatch import torch_operators

    return torch_operators.outside_graph(opdef, inputs, plain_options(options), asked[0], call)


def _run_with_dtensors(opdef: OpDef, options: tuple[Any, ...], asked: Any, arrays: tuple[Any, ...]) -> Any:
    """Run a call on this rank's rows or heads."""
    from kdacore.dispatch import torch_dtensors

    obstacle = torch_dtensors.obstacle_of(opdef, arrays)
    if obstacle is not None:
        torch_dtensors.refuse(opdef, obstacle)
    return torch_dtensors.call(opdef, arrays, options, asked[0], call)


def _plan_of_call(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan:
    return plan_for(opdef, inputs, options, current_policy(opdef, asked[0]))


def explain(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object = None) -> Selection:
    """What dispatch would do with a call; nothing runs, a forced backend that cannot serve is reported, not raised."""
    if opdef.family != "stage" and has_dtensor(inputs):
        from kdacore.dispatch import torch_dtensors

        inputs = opdef.inputs(*torch_dtensors.local_arrays(opdef, tuple(inputs)))
    for x in inputs:
        adapter = None if x is None or is_spec(x) else adapter_of(x)
        if adapter is not None and adapter.immutable:  # JAX
            inputs = adapter.unwrapped(inputs)
            break
    request, _ = contract.build_request(opdef, inputs, options)
    return explain_request(request, current_policy(opdef, backend), assumed=any(is_spec(x) for x in inputs))


def explain_request(request: Request, policy: selection.Policy, assumed: bool) -> Selection:
    """What dispatch would do with a request. ``assumed``: its hardware need not be here."""
    from kdacore.dispatch.forms import with_forms  # here: `import kdacore` stays light

    request = asked_of(request, policy)
    if policy.forced:
        REGISTRY.get(policy.forced, request.op)
        judged = tuple([selection.judge(r, request, assumed) for r in REGISTRY.backends().values()])
        candidates = selection.with_costs(request, judged)
        able = next(c for c in candidates if c.backend == policy.forced).supported
        why = (
            "forced by backend="
            if able
            else f"backend {policy.forced!r} was forced and cannot serve this call"
        )
        found = Selection(request, policy.forced if able else "", why, candidates)
    else:
        found = selection.decide(request, policy, run_selfchecks=False, assumed=assumed)
    return with_forms(found)


def opdef_of(op: object) -> OpDef:
    """An op by name or by its public function."""
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if name not in OPS:
        known = f"one of {', '.join(OPS)}, or the public function"
        raise ContractError("explain", "op", shown(op), known + did_you_mean(name, OPS))
    return OPS[name]
