"""JAX arrays. Backends that can be traced are joined by ``custom_vjp``; the others run on eager arrays."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from kdacore import device as probes
from kdacore.arrays import jax_meshes
from kdacore.errors import ContractError
from kdacore.ops import OPS, OpDef
from kdacore.types import ArrayKind, Device, GateInputs, OutputGrads, Outputs, Request, TensorSpec

if TYPE_CHECKING:
    from kdacore.arrays.base import Extent, Plan, Run


_PLAIN: set[type] = {type(None)}
"""Types of arrays met so far that stand for no other array."""


def _array_of(x: Any) -> Any:
    """The array that an object with JAX's method ``__jax_array__`` stands for; anything else as it is."""
    if isinstance(x, jax.Array):  # tracers too, which have that method
        _PLAIN.add(type(x))
        return x
    return x.__jax_array__() if hasattr(type(x), "__jax_array__") else x


class _JaxAdapter:
    kind: ArrayKind = "jax"
    immutable = True
    knows_grad = False
    recognisable = False
    seen_calls: Any = None

    def runner(self, plan: Plan, inputs: Any) -> Run:
        return self.run

    def refuse(self, op: str, arrays: tuple[Any, ...]) -> None:
        for name, x in zip(OPS[op].arrays, arrays, strict=True):
            if x is None:
                continue
            if isinstance(x, jax.ShapeDtypeStruct):  # of this kind too, so that explain takes it
                raise ContractError(
                    op, name, "a jax.ShapeDtypeStruct", "an array; kdacore.explain takes shapes"
                )
            if (problem := self.unreadable(x)) is not None:
                raise ContractError(op, name, *problem)

    def admit(
        self, opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[bool, tuple[Any, ...]]:
        self.refuse(opdef.name, arrays)
        return False, arrays

    def unreadable(self, x: Any) -> tuple[str, str] | None:
        if self.placed(x) and x.is_deleted():
            return "a deleted or donated array", "an array that is still there"
        return None

    def unwritable(self, x: Any) -> tuple[str, str] | None:
        return None

    def check_saved(self, request: Request, inputs: Any) -> None:
        return

    def unwrapped(self, arrays: Any) -> Any:
        for x in arrays:
            if type(x) not in _PLAIN:
                return type(arrays)._make([_array_of(x) for x in arrays])
        return arrays

    def key(self, inputs: tuple[Any, ...]) -> Hashable | None:
        parts: list[Any] = [get_abstract_mesh()]  # which decides about arrays on a mesh
        for x in inputs:
            if x is None:
                parts.append(None)
            elif not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
                return None  # a tracer is met once per trace
            else:
                parts.append((x.shape, x.dtype, x.sharding))
        return tuple(parts)

    def spec(self, x: Any) -> TensorSpec:
        # Not by way of np.dtype, which does not know all of them: those of random keys.
        return TensorSpec(tuple(x.shape), x.dtype.name)

    def device(self, x: Any) -> Device:
        if not self.placed(x):
            return _expected_device()
        devices = sorted(x.devices(), key=lambda d: d.id)
        return probes.jax_device(devices[0])

    def placed(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)

    def obstacle(self, op: str, x: Any) -> tuple[str, str] | None:
        family = OPS[op].family
        if family == "gate":  # element by element: neither sizes nor how an array is split matter
            return None
        fixed = (
            x.shape[2:] if family in ("recurrent", "decode") else x.shape
        )  # chunks are counted, steps need not be
        if not all(isinstance(size, int) for size in fixed):
            return f"symbolic sizes {[*x.shape]}", "sizes known while tracing"
        return jax_meshes.obstacle(x) if isinstance(x, jax.Array) else None

    def is_traced(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        # Whether a traced call will be differentiated is not known yet, so its backward must exist.
        return any(isinstance(x, jax.core.Tracer) for x in inputs)

    def host_values(self, x: Any) -> Any:
        host = np.asarray(x)
        return host.astype(np.float64) if host.dtype.kind not in "iub" else host

    def memory(self, x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
        return None

    def extent(self, x: Any) -> Extent | None:
        return None

    def run(self, plan: Plan, inputs: Any) -> Any:
        if not plan.backend.traceable:
            # The caller may be tracing something else: then JAX would stage whatever is done to arrays with values.
            with jax.ensure_compile_time_eval():
                return plan.forward(plan.request, inputs)
        eager = not (plan.request.traced or plan.request.needs_grad)
        if eager and plan.impl.compiles:
            return plan.forward(plan.request, inputs)
        if plan.request.traced:
            plan = _met.setdefault(_made_of(plan), plan)
        joined = plan.joined
        if joined is None:
            joined = plan.joined = _join(plan, inputs)
            _keep(plan)
        result = joined(*inputs)
        joins_gradients = plan.request.needs_grad or plan.differentiated is not None
        return Outputs(*result) if joins_gradients and not isinstance(inputs, GateInputs) else result


JAX = _JaxAdapter()

KEPT = 64
"""Plans whose compiled programs are kept; the oldest goes first. On a CPU a program takes hundreds of memory maps,
and a Linux process may have 65530: callers whose lengths keep changing would end in a crash of the compiler."""
_kept: deque[Plan] = deque()
_met: dict[Hashable, Plan] = {}
"""The first plans of traced calls. An eager ``grad`` traces each time: with a function of its own it would compile."""


def _made_of(plan: Plan) -> Hashable:
    """What the function of a traced call depends on."""
    return plan.request, plan.forward, plan.impl.backward, plan.differentiated


def _keep(plan: Plan) -> None:
    _kept.append(plan)
    if len(_kept) > KEPT:
        oldest = _kept.popleft()
        oldest.joined = None
        _met.pop(_made_of(oldest), None)


def _expected_device() -> Device:
    """Where what is traced will run: on the devices of the mesh around it, which need not be of this host, or on the
    default device."""
    # Absent outside a mesh, and of meshes that were made without devices.
    abstract = getattr(get_abstract_mesh(), "abstract_device", None)
    found = None if abstract is None else probes.jax_mesh_device(abstract)
    local = _default_device()  # which also has the number that it has here
    return local if found is None or (found.type, found.arch) == (local.type, local.arch) else found


def _default_device() -> Device:
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]  # the first of all may be another process's
    return probes.jax_device(chosen)


def _join(plan: Plan, inputs: Any) -> Any:
    if plan.differentiated is not None:
        return _join_vjp(
            lambda *arrays: tuple(plan.forward(plan.request, plan.inputs(*arrays))[:3]),
            plan.differentiated.plan,
        )
    if not plan.request.needs_grad:  # eager, or an op for inference: JAX differentiates the latter's own code
        return jax.jit(lambda *arrays: plan.forward(plan.request, plan.inputs(*arrays)))
    return _join_gate(plan) if isinstance(inputs, GateInputs) else _join_whole(plan)


def _join_whole(plan: Plan) -> Any:
    """The four whole ops as a ``custom_vjp`` function of their arrays (absent ones None)."""
    undifferentiated = dataclasses.replace(plan.request, needs_grad=False)

    def op(*arrays: Any) -> Any:  # traced when nobody differentiates, else op_forward is
        return tuple(plan.forward(undifferentiated, plan.inputs(*arrays))[:3])

    return _join_vjp(op, lambda: plan)


def _join_vjp(primal: Callable[..., Any], plan_of_gradients: Callable[[], Plan]) -> Any:
    """``primal``, differentiated by a plan that is asked for then."""
    op = jax.custom_vjp(primal)
    found: list[Plan] = []

    def op_forward(*arrays: Any) -> Any:
        found[:] = found or [plan_of_gradients()]
        (plan,) = found
        outputs = plan.forward(plan.request, plan.inputs(*arrays))
        return tuple(outputs[:3]), (arrays, outputs.saved)

    def op_backward(residuals: Any, cotangents: Any) -> Any:
        arrays, saved = residuals
        (plan,) = found
        inputs = plan.inputs(*arrays)
        grads = plan.backward(inputs, saved, OutputGrads(cotangents[0], cotangents[1]))
        return _cotangents(arrays, grads)

    op.defvjp(op_forward, op_backward)
    return jax.jit(op)  # an eager caller would otherwise dispatch, and compile, every primitive by itself


def _join_gate(plan: Plan) -> Any:
    request, forward = plan.request, plan.forward

    @jax.custom_vjp
    def op(*arrays: Any) -> Any:
        return forward(request, plan.inputs(*arrays))

    def op_forward(*arrays: Any) -> Any:
        return forward(request, plan.inputs(*arrays)), arrays

    def op_backward(arrays: Any, dlog: Any) -> Any:
        return _cotangents(arrays, plan.backward(plan.inputs(*arrays), dlog))

    op.defvjp(op_forward, op_backward)
    return jax.jit(op)  # an eager caller would otherwise dispatch, and compile, every primitive by itself


def _cotangents(arrays: Any, grads: Any) -> tuple[Any, ...]:
    """One cotangent for each array: the backend's, or the zero of an integer (``float0``) or unused input."""
    given = [*grads, *([None] * (len(arrays) - len(grads)))]
    found = []
    for x, grad in zip(arrays, given, strict=True):
        if x is None or grad is not None:
            found.append(grad if x is not None else None)
        elif jax.numpy.issubdtype(x.dtype, jax.numpy.integer):
            found.append(np.zeros(x.shape, jax.dtypes.float0))
        else:
            found.append(jax.numpy.zeros_like(x))
    return tuple(found)
