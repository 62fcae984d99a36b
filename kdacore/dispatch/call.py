"""A public call: one dictionary look-up, or one generated test, when a call like it has been made before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kdacore import contract, plugin_faults
from kdacore.arrays import Adapter, adapter_of, is_spec
from kdacore.arrays.base import ADAPTERS
from kdacore.dispatch import selection
from kdacore.dispatch.plan import (
    PREFERENCE,
    RECORDS,
    Plan,
    asked_of,
    cached_plan,
    current_policy,
    execute,
    plain_options,
    plan_for,
)
from kdacore.errors import ContractError, shown
from kdacore.ops import OPS, OpDef
from kdacore.registry import REGISTRY
from kdacore.types import Request, Selection

if TYPE_CHECKING:
    from kdacore.arrays.base import Outline
    from kdacore.dispatch.fast_path import FastPath


_new_tuple: Any = tuple.__new__
"""Makes the named tuple of an op's arrays in half the time of its constructor."""


@plugin_faults.guarded
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
    if torch is not None and torch.compiler.is_dynamo_compiling():
        from kdacore.dispatch import torch_operators

        return torch_operators.call(opdef, arrays, options, backend, eager_call=call)
    if backend is not None and type(backend) is not str:  # which may compare as it likes
        backend = current_policy(opdef, backend).forced
    first = arrays[0]
    adapter = ADAPTERS.get(type(first)) or adapter_of(first)
    if adapter is None:
        contract.build_request(opdef, opdef.inputs(*arrays), options)  # names the argument at fault
        raise ContractError(opdef.name, opdef.arrays[0], type(first).__name__, "an array")
    asked = (backend, PREFERENCE.get())
    fast_path: FastPath | None = adapter.fast_path
    seen = None
    if fast_path is not None:
        for kept in fast_path.calls.get(opdef.name, ()):
            if asked == kept.asked and kept.matches(arrays, options):
                seen = kept
                break
    if seen is not None and seen.fast_call is not None:
        try:
            outputs = seen.fast_call(arrays)
        except BaseException as error:
            seen.plan.failed("fast path", error)
            raise
        if outputs is not None:
            for records in RECORDS.get():
                records.append(seen.plan.selection)
            return outputs
    inputs = _new_tuple(opdef.inputs, arrays)
    if seen is not None:
        plan = seen.plan
        if plan.check is not None or not plan.results_checked:
            return execute(plan, inputs, seen.run)
        for records in RECORDS.get():
            records.append(plan.selection)
        return seen.run(plan, inputs)
    found = None if fast_path is None else fast_path.plan_of(opdef.name, arrays, options, asked)
    if fast_path is None or found is None:
        return _unrecognised(opdef, adapter, inputs, options, backend, asked)
    plan, run = found
    outlines = _checked(plan, inputs, adapter)
    fast_path.note(opdef.name, inputs, options, asked, plan)
    return execute(plan, inputs, run, outlines)


def _unrecognised(
    opdef: OpDef, adapter: Adapter, inputs: Any, options: tuple[Any, ...], backend: Any, asked: Any
) -> Any:
    """Run a call that no test recognises: look at its arrays, plan it, take note of it."""
    if adapter.immutable:  # JAX
        inputs = adapter.unwrapped(inputs)
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
        from kdacore.dispatch import torch_operators

        return torch_operators.outside_graph(opdef, inputs, plain_options(options), backend, call)
    plan = cached_plan(adapter, opdef, inputs, options, asked, _plan_of_call)
    outlines = _checked(plan, inputs, adapter)
    if adapter.fast_path is None or as_given:  # otherwise it would never recognise this call
        _take_note(opdef, adapter, inputs, options, asked, plan)
    return execute(plan, inputs, plan.run, outlines)


def _checked(plan: Plan, inputs: Any, adapter: Adapter) -> list[Outline] | None:
    """Check what a call writes or saves. Calls recognised as made before have the same strides in what they write."""
    if plan.writes:
        from kdacore.contract.aliasing import check_memory

        return check_memory(plan.request, inputs, adapter)
    if plan.request.needs_grad:
        adapter.check_saved(plan.request, inputs)
    return None


def _take_note(
    opdef: OpDef, adapter: Adapter, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan
) -> None:
    """Let calls like this one be recognised from now on, if they keep coming."""
    fast_path: FastPath | None = adapter.fast_path
    new = not plan.results_checked
    if fast_path is None:
        if adapter.array_test is None:
            return
        if new and adapter not in _called:  # a process that makes one call does without
            _called.add(adapter)
            return
        fast_path = _start_fast_path(adapter)
        if not new:  # a call like this one came before there was a memory
            fast_path.note(opdef.name, inputs, options, asked, plan)
    fast_path.note(opdef.name, inputs, options, asked, plan)
    if new:
        fast_path.note_new(opdef.name, inputs, options, asked, plan, current_policy(opdef, asked[0]))


_called: set[Adapter] = set()
"""Of the arrays of calls that were made before there was a memory of them."""


def _start_fast_path(adapter: Adapter) -> FastPath:
    """The memory of calls with arrays of this kind, made when it is first needed."""
    from kdacore.dispatch.fast_path import FastPath

    fast_path = FastPath(adapter)
    REGISTRY.on_change(fast_path.clear)
    adapter.fast_path = fast_path
    return fast_path


def _plan_of_call(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan:
    return plan_for(opdef, inputs, options, current_policy(opdef, asked[0]))


def explain(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object = None) -> Selection:
    """What dispatch would do with a call; nothing runs, a forced backend that cannot serve is reported, not raised."""
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
        raise ContractError("explain", "op", shown(op), f"one of {', '.join(OPS)}, or the public function")
    return OPS[name]
