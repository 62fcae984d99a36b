"""``cp="axis"``: the chunk ops on rows whose tokens are split over an axis of a JAX mesh, inside ``jax.shard_map``.

The whole is one ``custom_vjp``. Final states are summed over the ranks outside it, where JAX itself knows what the
gradient of a sum is, with checked and with unchecked replication.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax

from kdacore import contract
from kdacore.arrays import Adapter, jax_meshes
from kdacore.dispatch import call as dispatch
from kdacore.dispatch import selection
from kdacore.dispatch.plan import Plan, asked_of, current_policy, execute
from kdacore.errors import ContractError, UnsupportedError, shown
from kdacore.ops import OpDef
from kdacore.parallel import jax_slices
from kdacore.parallel.jax_exchange import Across, SliceCall, final_states
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, OpImpl, Outputs, Request, Selection, TensorSpec

_POOL_ARRAYS = (
    "state_indices",
    "has_initial_state",
    "write_indices",
    "write_pool",
    "checkpoint_offsets",
    "checkpoint_indices",
    "out",
)


def call(
    opdef: OpDef, inputs: ChunkInputs, options: tuple[Any, ...], axis: object, backend: object
) -> Outputs:
    """Run one public call on this rank's rows.

    Args:
        opdef: the op.
        inputs: its arrays; ``cu_seqlens`` and ``initial_state`` those of the whole row.
        options: its options, ``cp`` among them.
        axis: the name of the mesh axis.
        backend: as in every call.

    Raises:
        ContractError: the call breaks the contract, ``axis`` names no axis here, or ``cp`` does not go with
            something else that was asked for.
        UnsupportedError: no backend can serve it.
    """
    across = Across(str(axis), ranks_of(opdef, axis))
    values = dict(zip(opdef.options, options, strict=True))
    alone = tuple([None if name == "cp" else value for name, value in values.items()])
    request, adapter = contract.build_request(opdef, inputs, alone, needs_grad=True)
    _refuse(request, inputs, across.axis)
    if across.ranks == 1:
        out: Outputs = dispatch.call(opdef, inputs, alone, backend)
        final = out.final_state
        return out if final is None else out._replace(final_state=across.summed(final))
    plan = _plan(opdef, request, adapter, across, backend)
    out = execute(plan, inputs, plan.run)
    if out.final_state is None:
        return out
    return out._replace(final_state=final_states(plan.request, inputs, across, out.final_state))


# --- what is refused --------------------------------------------------------------------------------------------------


def ranks_of(opdef: OpDef, axis: object) -> int:
    """The number of ranks along a mesh axis. ContractError where that is none."""
    want = "the name of one axis of the mesh of the jax.shard_map around the call"
    if not isinstance(axis, str):
        raise ContractError(opdef.name, "cp", shown(axis), want)
    try:
        return int(lax.axis_size(axis))
    except NameError:  # what JAX raises for an unbound axis
        raise ContractError(opdef.name, "cp", f"{axis!r}, no axis that is bound here", want) from None


def _refuse(request: Request, inputs: ChunkInputs, axis: str) -> None:
    def fail(name: str, got: str, want: str) -> ContractError:
        return ContractError(request.op, name, got, f"{want} with cp={axis!r}")

    for name in _POOL_ARRAYS:
        if getattr(inputs, name) is not None:
            raise fail(name, "an array", "None: pools and out are not served")
    if request.inplace_state:
        raise fail("inplace_state", "True", "False: pools are not served")
    every = request.checkpoint_every
    if every and request.packed:
        want = "None for a pack, as blocks would cross the borders between ranks,"
        raise fail("checkpoint_every", str(every), want)
    if every and request.T % every:
        want = (
            f"a divisor of a rank's T={request.T} tokens, as blocks may not cross the borders between ranks,"
        )
        raise fail("checkpoint_every", str(every), want)
    if axis not in jax_meshes.varying_axes(lax.axis_index(axis)):
        return  # replication is not tracked: under check_vma=False, and vmap
    if inputs.cu_seqlens is not None and axis in jax_meshes.varying_axes(inputs.cu_seqlens):
        want = "the offsets of the whole row, the same on every rank (in_specs P()),"
        raise fail("cu_seqlens", f"an array that differs along {axis!r}", want)
    if not any(axis in jax_meshes.varying_axes(x) for x in inputs[:5]):
        want = f"each rank's own rows (in_specs with {axis!r} at axis 1)"
        raise fail("q", f"the same array on every rank of {axis!r}", want)


# --- the plan ---------------------------------------------------------------------------------------------------------


def _plan(opdef: OpDef, request: Request, adapter: Adapter, across: Across, backend: object) -> SlicePlan:
    """Select a backend that can serve all calls that a slice of this call makes."""
    policy = current_policy(opdef, backend)
    request = asked_of(dataclasses.replace(request, traced=True), policy)
    own = slice_request(request)
    chosen = selection.select(jax_slices.whole_request(own), policy)
    registered = REGISTRY.get(chosen.backend)
    impl: OpImpl = registered.backend.ops[opdef.name]

    def serves(call: Request) -> bool:
        return selection.judge(registered, call).supported

    slices = None if impl.slices is None else impl.slices(own)
    if slices is None:
        square = selection.judge(registered, jax_slices.map_request(own, own.K))
        if not square.supported:
            raise UnsupportedError(
                opdef.name,
                f"backend {chosen.backend!r} cannot compute the transition of a slice, which cp={across.axis!r} needs",
                {chosen.backend: square.reasons},
            )
        slices = jax_slices.composed(own, impl, serves)
    return SlicePlan(opdef, request, chosen, adapter, SliceCall(own, across, chosen.backend, slices))


def slice_request(request: Request) -> Request:
    """The call of a slice: float32 states, K-first, which come and go apart."""
    tensors = tuple((n, spec) for n, spec in request.tensors if n not in ("initial_state", "cu_seqlens_cpu"))
    features = request.features - {"initial_state", "state_v_first"}
    if request.packed:
        at = TensorSpec(request.spec("cu_seqlens").shape, "int32")
        tensors = tuple((n, at if n == "cu_seqlens" else spec) for n, spec in tensors)
    return jax_slices.started(
        dataclasses.replace(
            request, state_dtype="float32", state_v_first=False, tensors=tensors, features=features
        )
    )


class SlicePlan(Plan):
    """The plan of a rank's call."""

    __slots__ = ("slice_call",)

    def __init__(
        self, opdef: OpDef, request: Request, chosen: Selection, adapter: Adapter, slice_call: SliceCall
    ) -> None:
        super().__init__(opdef, request, chosen, adapter)
        self.slice_call = slice_call
        self.forward = slice_call
        self.fast_path = None

    def gradients(self, inputs: Any, *rest: Any) -> Any:
        return self.slice_call.backward(self.request, inputs, *rest)
