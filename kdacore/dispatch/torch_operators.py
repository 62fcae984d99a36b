"""The ops as ``torch.library`` operators, for ``torch.compile``, ``torch.export`` and tensor subclasses.

A compiled graph runs below autograd, so whether a gradient is needed and what was asked of dispatch travel as
arguments: the backward then selects by the very request the forward did, and the pairing cannot change in
between. Residuals beyond the inputs are not kept: their shapes would depend on the backend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kdacore import contract
from kdacore.arrays.torch.autograd import double_backward_error
from kdacore.arrays.torch.eager import TORCH
from kdacore.arrays.torch.modes import as_given, refuse_tangents
from kdacore.arrays.torch.tensor_views import REFUSED_SUBCLASSES, as_plain, first_subclass
from kdacore.contract.aliasing import check_memory, written_arguments
from kdacore.dispatch import selection
from kdacore.dispatch.plan import Plan, cached_plan, current_policy, execute, plan_for
from kdacore.errors import ContractError, UnsupportedError, contract_text
from kdacore.ops import HOST_ARGUMENTS, OPS, OpDef, Option
from kdacore.types import CommitOutputs, GateInputs, InputGrads, OutputGrads, Outputs

_FAMILIES = {
    "chunk": OPS["chunk_kda"],
    "recurrent": OPS["fused_recurrent_kda"],
    "decode": OPS["fused_decode_kda"],
    "commit": OPS["commit_records"],
    "gate": OPS["kda_gate"],
}
"""An op of each family: all ops of a family take the same arguments."""
_ARRAYS = {family: opdef.arrays for family, opdef in _FAMILIES.items()}
_OPTIONS = {
    family: tuple([o for o in opdef.option_arguments if o.kind != "ranks"])
    for family, opdef in _FAMILIES.items()
}
_SCHEMA_TYPES = {"flag": "bool", "number": "float?", "count": "int?", "choice": "str"}
_NUMBERS: dict[str, type] = {"number": float, "count": int}
_WHOLE_GRADS = InputGrads._fields
_WRITABLE = {
    family: tuple([a.name for a in opdef.array_arguments if a.writable])
    for family, opdef in _FAMILIES.items()
}
"""Arrays that an operator which writes says it may write. It takes those that there are once more, as ``given``: a
graph may hand it copies in their places, and write them back itself."""
_ASKED = "bool needs_grad, str forced, str preferred, str source, bool batch_invariant"

_library = torch.library.Library("kdacore", "DEF")


def schema(family: str, *, mutable: bool = False) -> str:
    parts = ["str op"]
    aliases = iter("abcdefghijklmnopqrstuvwxyz")
    for array in _FAMILIES[family].array_arguments:
        alias = f"({next(aliases)}!)" if mutable and array.writable else ""
        kind = f"Tensor{alias}" if array.required else f"Tensor{alias}?"
        parts.append(f"{kind} {array.name}")
    parts += [f"{_SCHEMA_TYPES[option.kind]} {option.name}" for option in _OPTIONS[family]]
    return ", ".join([*parts, _ASKED])


_library.define(f"chunk({schema('chunk')}) -> (Tensor, Tensor, Tensor)")
_library.define(f"chunk_({schema('chunk', mutable=True)}, Tensor[] given) -> (Tensor, Tensor, Tensor)")
_library.define(f"recurrent({schema('recurrent')}) -> (Tensor, Tensor)")
_library.define(f"recurrent_({schema('recurrent', mutable=True)}, Tensor[] given) -> (Tensor, Tensor)")
_library.define(f"decode({schema('decode')}) -> (Tensor, Tensor)")
_library.define(f"decode_({schema('decode', mutable=True)}, Tensor[] given) -> (Tensor, Tensor)")
_library.define(f"commit_({schema('commit', mutable=True)}, Tensor[] given) -> ()")
_library.define(f"gate({schema('gate')}) -> Tensor")
_library.define(f"chunk_backward({schema('chunk')}, Tensor? do, Tensor? dstate) -> Tensor[]")
_library.define(f"recurrent_backward({schema('recurrent')}, Tensor? do, Tensor? dstate) -> Tensor[]")
_library.define(f"gate_backward({schema('gate')}, Tensor dlog) -> Tensor[]")


class Bound:
    """The flat arguments of an operator, taken apart again."""

    __slots__ = ("inputs", "needs_grad", "opdef", "options", "policy", "rest")

    def __init__(self, family: str, args: tuple[Any, ...]) -> None:
        arrays, options = _ARRAYS[family], _OPTIONS[family]
        self.opdef: OpDef = OPS[args[0]]
        at = 1 + len(arrays)
        self.inputs = self.opdef.inputs(*args[1:at])
        values = dict(zip([o.name for o in options], args[at : at + len(options)], strict=True))
        if "disable_recompute" in values:  # a graph has no place for what a forward may keep
            values["disable_recompute"] = False
        self.options = tuple([values.get(name) for name in self.opdef.options])
        at += len(options)
        self.needs_grad, forced, preferred, source, invariant = args[at : at + 5]
        self.policy = selection.Policy(forced, tuple(filter(None, preferred.split(","))), source, invariant)
        self.rest = args[at + 5 :]

    @classmethod
    def with_values(cls, family: str, args: tuple[Any, ...]) -> Bound:
        """Of a real call. Subclasses that come this far have memory: as plain tensors they are checked as such."""
        return cls(family, tuple([as_plain(x) if isinstance(x, torch.Tensor) else x for x in args]))

    def plan(self) -> Plan:
        """The plan of a real call (tensors with values)."""
        refuse_tangents(self.opdef.name, self.inputs)
        return cached_plan(
            TORCH,
            self.opdef,
            self.inputs,
            self.options,
            (self.policy, self.needs_grad),
            _plan_of_operator,
        )

    def request(self) -> Any:
        """The request of a call on fake tensors: validated, nothing selected."""
        return contract.build_request(self.opdef, self.inputs, self.options, needs_grad=self.needs_grad)[0]


def _plan_of_operator(opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan:
    policy, needs_grad = asked
    return plan_for(opdef, inputs, options, policy, needs_grad)


@torch.compiler.assume_constant_result
def asked_of_dispatch(op: str, backend: str | None) -> tuple[str, str, str, bool]:
    """What was asked of dispatch while the graph was traced; it becomes part of the graph."""
    policy = current_policy(OPS[op], backend)
    return policy.forced, ",".join(policy.preferred), policy.source, policy.batch_invariant


def check_asked(bound: Bound) -> None:
    """A graph keeps the preference it was traced under; running it under another must not pass unnoticed."""
    now = current_policy(bound.opdef, bound.policy.forced or None)
    if now.batch_invariant != bound.policy.batch_invariant:
        was, given = ("inside" if p.batch_invariant else "outside" for p in (bound.policy, now))
        raise UnsupportedError(
            bound.opdef.name,
            f"this compiled graph was traced {was} batch_invariant() and is run {given}; compile it where it is run",
            {},
        )
    if now != bound.policy:
        raise UnsupportedError(
            bound.opdef.name,
            f"this compiled graph was traced with backends preferred as {bound.policy.preferred or 'auto'} and is "
            f"run with {now.preferred or 'auto'}; compile it inside use_backend, or pass backend=",
            {},
        )


def _fail(op: str, argument: str, got: str, want: str) -> None:
    """Raise a ContractError. Dynamo cannot trace that: it leaves the graph first, or says this where it may not."""
    torch._dynamo.graph_break(msg=contract_text(op, argument, got, want))
    raise ContractError(op, argument, got, want)


def obstacle_of(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object
) -> tuple[str, str, str] | None:
    """An argument that no graph can hold, what it is and what it would have to be.

    Looked for before the operator is called, whose schema takes 1 for True and refuses others without their name.
    """
    for name, x in zip(opdef.arrays, inputs, strict=True):
        if x is None:
            if name in opdef.required:
                return name, "None", "an array"
        elif not isinstance(x, (torch.Tensor, np.ndarray) if name in HOST_ARGUMENTS else torch.Tensor):
            return name, type(x).__name__, "a torch.Tensor, as every array of a compiled call"
        elif type(x).__name__ in REFUSED_SUBCLASSES:
            return name, type(x).__name__, "a plain tensor"
    for option, value in zip(opdef.option_arguments, options, strict=True):
        want = _wanted_instead(option, value)
        if want is not None:
            return option.name, type(value).__name__, want
    if backend is not None and not (isinstance(backend, str) and backend):
        return "backend", type(backend).__name__, "None or the name of a backend"
    return None


def _wanted_instead(option: Option, value: Any) -> str | None:
    """What an option would have to be; None when it is."""
    if option.kind == "flag":
        return None if isinstance(value, bool) else "True or False"
    if option.kind == "choice":
        return None if type(value) is str else " or ".join([repr(c) for c in option.choices])
    if value is None:
        return None
    if option.kind == "ranks":
        return "None"
    if isinstance(value, bool) or not isinstance(value, (int, _NUMBERS[option.kind])):
        return "a Python number: torch.compile makes an array of NumPy's"
    return None


def leave_graph(
    eager_call: Callable[..., Any],
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    backend: object,
    obstacle: tuple[str, str, str],
) -> Any:
    """An eager call serves it or says what is wrong; where a graph may not break, Dynamo says this instead."""
    torch._dynamo.graph_break(msg=contract_text(opdef.name, *obstacle))
    return _outside_graph(eager_call, opdef, tuple(inputs), options, backend)


@torch.compiler.disable
def _outside_graph(
    eager_call: Callable[..., Any],
    opdef: OpDef,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    backend: object,
) -> Any:
    # A NumPy scalar that Dynamo has traced over comes out of the graph as an array without axes.
    options = tuple([x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in options])
    return eager_call(opdef, arrays, options, backend)


def as_numbers(opdef: OpDef, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """With the numbers of other libraries as Python's: the schemas know no other."""
    return tuple(
        [
            x if x is None or option.kind not in _NUMBERS else _NUMBERS[option.kind](x)
            for option, x in zip(opdef.option_arguments, options, strict=True)
        ]
    )


def call(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object, eager_call: Callable[..., Any]
) -> Any:
    """Serve a public call through the operators; by ``eager_call`` where no graph can hold it."""
    if opdef.family == "stage":
        _fail(opdef.name, opdef.arrays[0], "a tensor being compiled", "an eager call: stages are eager")
    if torch.compiler.is_dynamo_compiling():
        if any(type(x).__name__ == "DTensor" for x in inputs):
            return _call_with_dtensors(opdef, tuple(inputs), options, backend, eager_call)
        obstacle = obstacle_of(opdef, inputs, options, backend)
        if obstacle is not None:
            return leave_graph(eager_call, opdef, inputs, options, backend, obstacle)
    else:
        request, _ = contract.build_request(opdef, opdef.inputs(*inputs), options)
        if request.needs_grad:
            TORCH.check_saved(request, opdef.inputs(*inputs))
        options = as_numbers(opdef, options)
    flat = flat_arguments(opdef, inputs, options, backend)
    arrays = dict(zip(opdef.arrays, flat[1:], strict=False))
    given = dict(zip(opdef.options, options, strict=True))
    if opdef.family == "gate":
        return torch.ops.kdacore.gate(*flat)
    if opdef.family == "commit":
        torch.ops.kdacore.commit_(*flat, [arrays[n] for n in _WRITABLE["commit"] if arrays[n] is not None])
        return CommitOutputs(arrays["initial_state"], arrays["conv_state"])
    wants_state = given["output_final_state"]
    operators = torch.ops.kdacore
    writes = given["inplace_state"] or arrays["out"] is not None
    if writes:
        flat = (*flat, [arrays[n] for n in _WRITABLE[opdef.family] if arrays[n] is not None])
    checkpoints = None
    if opdef.family == "chunk":
        o, state, checkpoints = (operators.chunk_ if writes else operators.chunk)(*flat)
    else:
        name = f"{opdef.family}_" if writes else opdef.family
        o, state = getattr(operators, name)(*flat)
    o = o if arrays["out"] is None else arrays["out"]
    if given["inplace_state"]:
        state = arrays["initial_state"] if arrays["write_pool"] is None else arrays["write_pool"]
    wants_checkpoints = given.get("checkpoint_every") is not None
    return Outputs(o, state if wants_state else None, checkpoints if wants_checkpoints else None)


def _call_with_dtensors(
    opdef: OpDef,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    backend: object,
    eager_call: Callable[..., Any],
) -> Any:
    """Serve a call that Dynamo traces on this rank's rows or heads."""
    from kdacore.dispatch import torch_dtensors

    obstacle = torch_dtensors.obstacle_of(opdef, arrays)
    if obstacle is not None:
        return leave_graph(eager_call, opdef, arrays, options, backend, obstacle)
    local_call = functools.partial(call, eager_call=eager_call)
    return torch_dtensors.call(opdef, arrays, options, backend, local_call)


def outside_graph(
    opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object, eager_call: Callable[..., Any]
) -> Any:
    """Serve a call with tensor subclasses, or one that is being exported.

    Raises:
        ContractError: a subclass that serves no operators but those it knows.
    """
    with subclasses_named(opdef, inputs):
        return call(opdef, inputs, options, backend, eager_call)


@contextlib.contextmanager
def subclasses_named(opdef: OpDef, inputs: Any) -> Iterator[None]:
    """Raises :func:`refused_subclass` in place of torch's error."""
    try:
        yield
    except TypeError as error:
        refusal = refused_subclass(opdef, inputs, error)
        if refusal is None:
            raise
        raise refusal from error


def refused_subclass(opdef: OpDef, inputs: Any, error: TypeError) -> ContractError | None:
    """What to raise where a subclass serves no operators but those it knows; None for other errors."""
    subclass = first_subclass(opdef.arrays, inputs)
    if subclass is None or "handlers returned NotImplemented" not in str(error):
        return None
    name, kind = subclass
    return ContractError(
        opdef.name, name, f"a {kind}", "a plain tensor, or a subclass that serves any operator"
    )


def flat_arguments(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object) -> tuple[Any, ...]:
    """The arguments of an operator: the op's name, its arrays, its options, and what was asked of dispatch."""
    arrays = [
        torch.as_tensor(x) if n in HOST_ARGUMENTS and x is not None else x
        for n, x in zip(opdef.arrays, inputs, strict=True)
    ]
    given = dict(zip(opdef.options, options, strict=True))
    needs_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in arrays)
    return (
        opdef.name,
        *arrays,
        *[given[option.name] for option in _OPTIONS[opdef.family]],
        needs_grad,
        *asked_of_dispatch(opdef.name, backend),
    )


def _forward(plan: Plan, inputs: Any) -> Any:
    with as_given(inputs[0]):
        return plan.forward(plan.request, inputs)


def as_result(x: Any, like: torch.Tensor) -> torch.Tensor:
    """Contiguous, as the fake tensors below promise: a backend may return views."""
    return like.new_empty(0) if x is None else x.contiguous()


def _whole(family: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    bound = Bound.with_values(family, args)
    check_asked(bound)
    plan = bound.plan()
    if plan.writes:
        _check_writable(family, plan, bound)
        check_memory(plan.request, bound.inputs, TORCH)
    elif bound.needs_grad:
        TORCH.check_saved(plan.request, bound.inputs)
    out = execute(plan, bound.inputs, _forward)
    v = bound.inputs[0]
    # An operator must not return what it was given: call() puts arrays that were written in these places.
    o = as_result(None if bound.inputs.out is not None else out.o, v)
    state = as_result(None if plan.request.inplace_state else out.final_state, v)
    return (o, state, as_result(out.checkpoints, v)) if family == "chunk" else (o, state)


def _commit(*args: Any) -> None:
    bound = Bound.with_values("commit", args)
    check_asked(bound)
    plan = bound.plan()
    _check_writable("commit", plan, bound)
    check_memory(plan.request, bound.inputs, TORCH)
    execute(plan, bound.inputs, _forward)


def _fake_commit(*args: Any) -> None:
    Bound("commit", args).request()


def _check_writable(family: str, plan: Plan, bound: Bound) -> None:
    """Refuse what torch would refuse when the graph writes its copies back, which is behind the operator.

    Raises:
        ContractError: a tensor made in inference mode.
    """
    written = written_arguments(plan.request)
    own = [(name, x) for name in _WRITABLE[family] if (x := getattr(bound.inputs, name)) is not None]
    for (name, x), given in zip(own, bound.rest[0], strict=True):
        is_copy = x.data_ptr() != given.data_ptr()  # and is written back whether it has changed or not
        if (is_copy or name in written) and (problem := TORCH.unwritable(given)) is not None:
            raise ContractError(bound.opdef.name, name, *problem)


def _gate(*args: Any) -> Any:
    bound = Bound.with_values("gate", args)
    check_asked(bound)
    plan = bound.plan()
    if bound.needs_grad:
        TORCH.check_saved(plan.request, bound.inputs)
    return as_result(execute(plan, bound.inputs, _forward), bound.inputs.g)


def _whole_backward(family: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    bound = Bound.with_values(family, args)
    plan = bound.plan()
    if plan.impl.backward is None:
        raise RuntimeError(f"{plan.selection.backend} was selected for a gradient it cannot compute")
    with as_given(bound.inputs.q):
        grads = plan.backward(bound.inputs, (), OutputGrads(*bound.rest))
    return [as_result(g, bound.inputs.q) for g in grads]


def _gate_backward(*args: Any) -> list[torch.Tensor]:
    bound = Bound.with_values("gate", args)
    plan = bound.plan()
    if plan.impl.backward is None:
        raise RuntimeError(f"{plan.selection.backend} was selected for a gradient it cannot compute")
    with as_given(bound.inputs.g):
        grads = plan.backward(bound.inputs, *bound.rest)
    return [as_result(g, bound.inputs.g) for g in grads]


# --- shapes and dtypes, for fake tensors ---------------------------------------------------------------------------


def _fake_whole(family: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    bound = Bound(family, args)
    request, v = bound.request(), bound.inputs[0]
    shape = bound.inputs.v.shape if family != "decode" else (request.B, request.T, request.HV, request.V)
    o = v.new_empty(0) if bound.inputs.out is not None else v.new_empty(shape)
    state_dtype = getattr(torch, request.state_dtype)
    state = v.new_empty(0)
    if request.output_final_state and not request.inplace_state:
        state = v.new_empty(request.state_shape, dtype=state_dtype)
    if family != "chunk":
        return o, state
    checkpoints = v.new_empty(0)
    if request.checkpoint_every:
        checkpoints = v.new_empty(request.checkpoint_shape, dtype=state_dtype)
    return o, state, checkpoints


def _fake_gate(*args: Any) -> torch.Tensor:
    bound = Bound("gate", args)
    bound.request()
    g = bound.inputs.g
    return g.new_empty(g.shape, dtype=torch.float64 if g.dtype == torch.float64 else torch.float32)


def _fake_grads(family: str, names: tuple[str, ...], args: tuple[Any, ...]) -> list[torch.Tensor]:
    bound = Bound(family, args)
    first = bound.inputs[0]
    given = (getattr(bound.inputs, name) for name in names)
    return [first.new_empty(0) if x is None else x.new_empty(x.shape) for x in given]


# --- gradients -----------------------------------------------------------------------------------------------------


def _setup(family: str) -> Any:
    arrays = _ARRAYS[family]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1 : 1 + len(arrays)])
        ctx.op, ctx.rest = inputs[0], inputs[1 + len(arrays) :]
        if family != "gate":
            ctx.set_materialize_grads(False)
        if family == "chunk":
            ctx.mark_non_differentiable(output[2])

    return setup


def _join(family: str, names: tuple[str, ...]) -> Any:
    operator = getattr(torch.ops.kdacore, f"{family}_backward")
    arrays = _ARRAYS[family]

    def backward(ctx: Any, *grads: Any) -> Any:
        found = operator(ctx.op, *ctx.saved_tensors, *ctx.rest, *(grads if family == "gate" else grads[:2]))
        by_name = dict(zip(names, found, strict=True))
        needed = ctx.needs_input_grad[1 : 1 + len(arrays)]
        out = [by_name.get(n) if need else None for n, need in zip(arrays, needed, strict=True)]
        return None, *out, *([None] * len(ctx.rest))

    return backward


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise double_backward_error()


def _register() -> None:
    for family in ("chunk", "recurrent", "decode"):
        for name in (family, f"{family}_"):
            _library.impl(name, lambda *a, f=family: _whole(f, a), "CompositeExplicitAutograd")
    _library.impl("commit_", _commit, "CompositeExplicitAutograd")
    _library.impl("gate", _gate, "CompositeExplicitAutograd")
    _library.impl("chunk_backward", lambda *a: _whole_backward("chunk", a), "CompositeExplicitAutograd")
    _library.impl(
        "recurrent_backward", lambda *a: _whole_backward("recurrent", a), "CompositeExplicitAutograd"
    )
    _library.impl("gate_backward", _gate_backward, "CompositeExplicitAutograd")

    fake = torch.library.register_fake
    for family in ("chunk", "recurrent", "decode"):
        for name in (family, f"{family}_"):
            fake(f"kdacore::{name}", lambda *a, f=family: _fake_whole(f, a), lib=_library)
    fake("kdacore::commit_", _fake_commit, lib=_library)
    fake("kdacore::gate", _fake_gate, lib=_library)
    for family, names in (("chunk", _WHOLE_GRADS), ("recurrent", _WHOLE_GRADS), ("gate", GateInputs._fields)):
        fake(f"kdacore::{family}_backward", lambda *a, f=family, n=names: _fake_grads(f, n, a), lib=_library)
        torch.library.register_autograd(
            f"kdacore::{family}", _join(family, names), setup_context=_setup(family), lib=_library
        )
        torch.library.register_autograd(
            f"kdacore::{family}_backward",
            _refuse,
            setup_context=lambda ctx, inputs, output: None,
            lib=_library,
        )


_register()
