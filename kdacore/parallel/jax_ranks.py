"""``cp="axis"``: the chunk ops on rows whose tokens are split over an axis of a JAX mesh, inside ``jax.shard_map``.

The whole is one ``custom_vjp``. Final states are summed over the ranks outside it, where JAX itself knows what the
gradient of a sum is, with checked and with unchecked replication.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore import contract
from kdacore.arrays import Adapter, adapter_of, jax_meshes
from kdacore.dispatch import call as dispatch
from kdacore.dispatch.plan import Plan, asked_of, current_policy, execute
from kdacore.errors import ContractError, shown
from kdacore.ops import OpDef
from kdacore.parallel.jax_exchange import Across, SliceCall, final_states
from kdacore.parallel.local_call import check_arguments, check_request, choose, slice_request, without_cp
from kdacore.parallel.offsets import check_copies, check_offsets
from kdacore.types import ChunkInputs, Outputs, Request, Selection, TensorSpec


def call(
    opdef: OpDef, arrays: tuple[Any, ...], options: tuple[Any, ...], axis: object, backend: object
) -> Outputs:
    """Run one public call on this rank's rows.

    Args:
        opdef: the op.
        arrays: its arrays; ``cu_seqlens`` and ``initial_state`` those of the whole row.
        options: its options, ``cp`` among them.
        axis: the name of the mesh axis.
        backend: as in every call.

    Raises:
        ContractError: the call breaks the contract, ``axis`` names no axis here, or something else that was asked for
            has no meaning on several ranks.
        UnsupportedError: no backend can serve it.
    """
    across = Across(str(axis), axis_size(opdef, axis))
    inputs = unwrapped(opdef.inputs(*arrays))
    _, alone = without_cp(opdef, options)
    request, adapter = contract.build_request(opdef, inputs, alone, needs_grad=True)
    check_arguments(opdef, inputs, alone)
    check_request(request)
    check_replication(request, inputs, across.axis)
    check_known_offsets(request, inputs, across)
    if across.ranks == 1:
        out: Outputs = dispatch.call(opdef, inputs, alone, backend)
        final = out.final_state
        return out if final is None else out._replace(final_state=across.summed(final))
    inputs = inputs._replace(cu_seqlens=same_offsets(inputs.cu_seqlens, across))
    plan = _plan(opdef, request, adapter, across, backend)
    out = execute(plan, inputs, plan.run)
    if out.final_state is None:
        return out
    return out._replace(final_state=final_states(request, inputs, across, out.final_state))


def unwrapped(inputs: ChunkInputs) -> ChunkInputs:
    """An op's arrays in place of objects that stand for them."""
    adapter = adapter_of(inputs.q)
    return inputs if adapter is None else adapter.unwrapped(inputs)


def axis_size(opdef: OpDef, axis: object) -> int:
    """The number of ranks along a mesh axis. ContractError where that is none."""
    want = "the name of one axis of the mesh of the jax.shard_map around the call"
    if not isinstance(axis, str):
        raise ContractError(opdef.name, "cp", shown(axis), want)
    try:
        return int(lax.axis_size(axis))
    except NameError:  # what JAX raises for an unbound axis
        raise ContractError(opdef.name, "cp", f"{axis!r}, no axis that is bound here", want) from None


def check_replication(request: Request, inputs: ChunkInputs, axis: str) -> None:
    """Refuse rows that are the same on every rank and offsets that are not, where JAX keeps track of that.

    It does not under ``check_vma=False``, nor for the axis of a ``vmap``.

    Raises:
        ContractError: naming the argument.
    """
    if not tracked(axis):
        return
    if inputs.cu_seqlens is not None and axis in jax_meshes.mesh_axes(inputs.cu_seqlens):
        got, want = (
            f"an array that differs along {axis!r}",
            "the whole row's, the same on every rank: in_specs P()",
        )
        raise ContractError(request.op, "cu_seqlens", got, want)
    if not any(axis in jax_meshes.mesh_axes(x) for x in inputs[:5]):
        got, want = (
            f"the same array on every rank of {axis!r}",
            f"each rank's rows: in_specs P(None, {axis!r})",
        )
        raise ContractError(request.op, "q", got, want)


def tracked(axis: str) -> bool:
    """Does JAX keep track of what is the same along an axis?"""
    return axis in jax_meshes.mesh_axes(lax.axis_index(axis))


def check_known_offsets(request: Request, inputs: ChunkInputs, across: Across) -> None:
    """Check the values of offsets that are no tracers.

    Raises:
        ContractError: they are no offsets of the whole row, or ``cu_seqlens_cpu`` are others.
    """
    known = {}
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        x = getattr(inputs, name)
        own: Any = None if x is None else adapter_of(x)
        if own is not None and not own.is_traced(x):
            known[name] = own.host_values(x)
            check_offsets(request.op, name, known[name], across.ranks * request.T)
    if len(known) > 1:
        check_copies(request.op, *known.values())


def same_offsets(cu_seqlens: Any, across: Across) -> Any:
    """The offsets; where they are not the same on every rank, some that are valid nowhere.

    Where JAX keeps track of what is the same on all, it has been checked already, and nothing is exchanged.
    """
    if cu_seqlens is None or tracked(across.axis):
        return cu_seqlens
    alike = (across.gathered(cu_seqlens) == cu_seqlens).all()
    return jnp.where(alike, cu_seqlens, -1)


def _plan(opdef: OpDef, request: Request, adapter: Adapter, across: Across, backend: object) -> SlicePlan:
    """Select a backend that can serve all calls that a slice of this call makes."""
    policy = current_policy(opdef, backend)
    # Arrays with values too are traced here: inside shard_map, and with gradients that may be asked for later.
    request = asked_of(dataclasses.replace(request, traced=True), policy)
    own = _own_request(request)
    chosen, functions = choose(own, policy)
    slice_call = SliceCall(chosen.request, across, chosen.backend, functions)
    return SlicePlan(opdef, request, chosen, adapter, slice_call)


def _own_request(request: Request) -> Request:
    """The request of the slice. Its offsets are computed on the device, as int32."""
    own = slice_request(request)
    specs = {name: spec for name, spec in own.tensors if name != "cu_seqlens_cpu"}
    if request.packed:
        specs["cu_seqlens"] = TensorSpec(specs["cu_seqlens"].shape, "int32")
    return dataclasses.replace(own, tensors=tuple(specs.items()))


class SlicePlan(Plan):
    """The plan of a rank's call."""

    __slots__ = ("slice_call",)

    def __init__(
        self, opdef: OpDef, request: Request, chosen: Selection, adapter: Adapter, slice_call: SliceCall
    ) -> None:
        super().__init__(opdef, request, chosen, adapter)
        self.slice_call = slice_call
        self.forward = slice_call

    def gradients(self, inputs: Any, *rest: Any) -> Any:
        return self.slice_call.backward(self.request, inputs, *rest)
