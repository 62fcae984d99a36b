"""Calls on several ranks as ``torch.library`` operators, for ``torch.compile`` and tensor subclasses.

The exchange between ranks happens inside the operator, so a compiler sees one node and cannot move its parts apart.
Every rank has to compile the same graph. The group travels by its name. As for plain calls, what a backend keeps for
its backward stays out of the graph; the states of slices and the transitions, whose shapes are known, are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from kdacore.arrays.torch.autograd import double_backward_error
from kdacore.arrays.torch.modes import as_given
from kdacore.dispatch import torch_operators as plain
from kdacore.dispatch.call import call as plain_call
from kdacore.dispatch.plan import RECORDS
from kdacore.errors import contract_text
from kdacore.ops import OPS, OpDef
from kdacore.parallel.call_marks import MARKS
from kdacore.parallel.exchange import Residuals
from kdacore.parallel.local_call import without_cp
from kdacore.parallel.progress import Turn
from kdacore.parallel.torch_ranks import WANTED, TorchRanks, ranks_of_name
from kdacore.parallel.torch_slice import SliceCall, begun, slice_call
from kdacore.types import InputGrads, Outputs

_library = torch.library.Library("kdacore", "FRAGMENT")
_GRADS = InputGrads._fields
_ARRAYS = OPS["chunk_kda"].arrays

_library.define(
    f"ranks_chunk({plain.schema('chunk')}, str ranks) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"ranks_chunk_backward({plain.schema('chunk')}, str ranks, Tensor start, Tensor transitions, "
    "Tensor marks, Tensor? do, Tensor? dstate) -> Tensor[]"
)


def traced_call(
    opdef: OpDef,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    backend: object,
    eager_call: Callable[..., Any],
) -> Any:
    """A public call that Dynamo traces; served by ``eager_call`` where no graph can hold it."""
    cp, given = without_cp(opdef, options)
    # Dynamo knows these two by a few attributes each, and fails at the question whether they have others.
    group = cp
    if isinstance(cp, DeviceMesh) and cp.ndim == 1:
        group = cp.get_group()
    if not isinstance(group, ProcessGroup):
        text = contract_text(opdef.name, "cp", type(cp).__name__, WANTED)
        torch._dynamo.graph_break(msg=text)
        return _outside_graph(eager_call, opdef, arrays, options, backend)
    name, size = group.group_name, group.size()
    if size == 1:
        return plain.call(opdef, arrays, given, backend, eager_call=plain_call)
    obstacle = plain.obstacle_of(opdef, arrays, given, backend)
    if obstacle is not None:
        torch._dynamo.graph_break(msg=contract_text(opdef.name, *obstacle))
        return _outside_graph(eager_call, opdef, arrays, options, backend)
    return _run(opdef, arrays, given, backend, name)


@torch.compiler.disable
def _outside_graph(eager_call: Callable[..., Any], *call: Any) -> Any:
    """An eager call serves it, or says what is wrong."""
    return eager_call(*call)


def call(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object, ranks: TorchRanks) -> Any:
    """A valid call with tensor subclasses, or while a graph is exported. ``options``: without ``cp``."""
    return _run(opdef, inputs, plain.as_numbers(opdef, options), backend, ranks.name)


refused_subclass, subclasses_named = plain.refused_subclass, plain.subclasses_named


def _run(opdef: OpDef, inputs: Any, options: tuple[Any, ...], backend: object, name: str) -> Outputs:
    given = dict(zip(opdef.options, options, strict=True))
    flat = plain.flat_arguments(opdef, inputs, options, backend)
    o, state, checkpoints, *_ = torch.ops.kdacore.ranks_chunk(*flat, name)
    wants_checkpoints = given["checkpoint_every"] is not None
    return Outputs(
        o, state if given["output_final_state"] else None, checkpoints if wants_checkpoints else None
    )


def _call_of(bound: plain.Bound) -> SliceCall:
    ranks = ranks_of_name(bound.opdef.name, bound.rest[0])
    return slice_call(bound.opdef, bound.inputs, bound.options, bound.policy, ranks, bound.needs_grad)


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    bound = plain.Bound.with_values("chunk", args)
    plain.check_asked(bound)
    v, ranks = bound.inputs.v, ranks_of_name(bound.opdef.name, bound.rest[0])
    with Turn(ranks.progress) as alone:
        found, number, code = begun(bound.opdef, bound.inputs, ranks, alone, lambda: _call_of(bound))
        for records in RECORDS.get():
            records.append(found.plan.selection)
        with torch.no_grad(), as_given(v):
            outputs, residuals, _ = found.forward(bound.inputs, number, code)
    start = transitions = marks = None
    if bound.needs_grad:
        start, transitions, marks = residuals[:3]
        given = bound.inputs.initial_state
        if given is not None and start.data_ptr() == given.data_ptr():
            start = start.clone()  # an operator must not return what it was given
    return tuple([plain.as_result(x, v) for x in (*outputs[:3], start, transitions, marks)])


def _backward(*args: Any) -> list[torch.Tensor]:
    bound = plain.Bound.with_values("chunk", args)
    found = _call_of(bound)
    _, start, transitions, marks, do, dstate = bound.rest
    with torch.no_grad(), as_given(bound.inputs.q):
        grads = found.backward(bound.inputs, Residuals(start, transitions, marks), do, dstate)
    return [plain.as_result(g, bound.inputs.q) for g in grads]


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    bound = plain.Bound("chunk", args)
    request, v = bound.request(), bound.inputs.v
    ranks = ranks_of_name(bound.opdef.name, bound.rest[0])
    none, state_dtype = v.new_empty(0), getattr(torch, request.state_dtype)
    state = v.new_empty(request.state_shape, dtype=state_dtype) if request.output_final_state else none
    checkpoints = none
    if request.checkpoint_every:
        checkpoints = v.new_empty(request.checkpoint_shape, dtype=state_dtype)
    start = transitions = marks = v.new_empty(0)
    if bound.needs_grad:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        N, HV, K, V = request.N, request.HV, request.K, request.V
        G = 1 if request.packed else N
        start = v.new_empty((G, HV, K, V), dtype=dtype)
        transitions = v.new_empty((ranks.size - 1 - ranks.rank, G, HV, K, K), dtype=dtype)
        marks = v.new_empty((MARKS,), dtype=dtype)
    return v.new_empty(v.shape), state, checkpoints, start, transitions, marks


def _fake_backward(*args: Any) -> list[torch.Tensor]:
    inputs = plain.Bound("chunk", args).inputs
    given = (getattr(inputs, name) for name in _GRADS)
    return [inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1 : 1 + len(_ARRAYS)], *output[3:])
    ctx.op, ctx.rest = inputs[0], inputs[1 + len(_ARRAYS) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _join(ctx: Any, *grads: Any) -> Any:
    arrays, kept = ctx.saved_tensors[: len(_ARRAYS)], ctx.saved_tensors[len(_ARRAYS) :]
    found = torch.ops.kdacore.ranks_chunk_backward(ctx.op, *arrays, *ctx.rest, *kept, *grads[:2])
    by_name = dict(zip(_GRADS, found, strict=True))
    needed = ctx.needs_input_grad[1 : 1 + len(_ARRAYS)]
    out = [by_name.get(n) if need else None for n, need in zip(_ARRAYS, needed, strict=True)]
    return None, *out, *([None] * len(ctx.rest))


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise double_backward_error()


def _register() -> None:
    for name, function, fake in (
        ("ranks_chunk", _forward, _fake),
        ("ranks_chunk_backward", _backward, _fake_backward),
    ):
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kdacore::{name}", fake, lib=_library)
    register = torch.library.register_autograd
    register("kdacore::ranks_chunk", _join, setup_context=_setup, lib=_library)
    register(
        "kdacore::ranks_chunk_backward",
        _refuse,
        setup_context=lambda ctx, inputs, output: None,
        lib=_library,
    )


_register()
