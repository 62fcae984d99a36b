"""``cp="axis"``: the chunk ops on rows whose tokens are split over an axis of a JAX mesh, inside ``jax.shard_map``.

Forward, each rank computes the map of its slice (``M``, ``C``), all maps are gathered at once, and each rank folds them
to the state it starts from. Backward, each rank computes the gradient that its slice gives to the state before it, these
are gathered, and each rank folds them with the maps of the forward to the gradient behind it. What is exchanged does not
depend on the number of tokens.

No gradient is taken through ``M`` and ``C``: the whole is one ``custom_vjp``. Final states are summed over the ranks
outside it, where JAX itself knows what the gradient of a sum is, with checked and with unchecked replication.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore import contract
from kdacore.arrays import Adapter, jax_meshes
from kdacore.dispatch import selection
from kdacore.dispatch.plan import Plan, asked_of, current_policy, execute
from kdacore.errors import ContractError, UnsupportedError, shown
from kdacore.ops import OpDef
from kdacore.parallel import jax_fold, jax_slices
from kdacore.parallel.jax_layout import (
    Borders,
    Part,
    borders_of_pack,
    borders_of_rows,
    part_of_pack,
    rank_of,
)
from kdacore.registry import REGISTRY
from kdacore.types import (
    ChunkInputs,
    InputGrads,
    OpImpl,
    OutputGrads,
    Outputs,
    Request,
    Selection,
    SliceFunctions,
    TensorSpec,
)

Array = Any

_POOL_ARRAYS = (
    "state_indices",
    "has_initial_state",
    "write_indices",
    "write_pool",
    "checkpoint_offsets",
    "checkpoint_indices",
    "out",
)
_POOL_OPTIONS = ("inplace_state", "null_index")


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
    ranks = ranks_of(opdef, axis)
    values = dict(zip(opdef.options, options, strict=True))
    alone = tuple([None if name == "cp" else value for name, value in values.items()])
    if ranks == 1:
        from kdacore.dispatch.call import call as dispatch_call

        return dispatch_call(opdef, inputs, alone, backend)  # type: ignore[no-any-return]
    _refuse(opdef, inputs, values, str(axis))
    plan = plan_of(opdef, inputs, alone, Across(str(axis), ranks), backend)
    out: Outputs = execute(plan, inputs, plan.run)
    if out.final_state is None:
        return out
    return out._replace(final_state=_of_all_ranks(plan.request, inputs, plan.across, out.final_state))


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


def _refuse(opdef: OpDef, inputs: ChunkInputs, options: dict[str, Any], axis: str) -> None:
    def fail(name: str, got: str, want: str) -> ContractError:
        return ContractError(opdef.name, name, got, f"{want} with cp={axis!r}")

    for name in _POOL_ARRAYS:
        if getattr(inputs, name) is not None:
            raise fail(name, "an array", "None: pools and out are not served")
    for name in _POOL_OPTIONS:
        if options[name] not in (None, False):
            raise fail(name, shown(options[name]), "its default: pools are not served")
    every = options["checkpoint_every"]
    if every is not None and inputs.cu_seqlens is not None:
        raise fail(
            "checkpoint_every",
            shown(every),
            "None for a pack, as blocks would cross the borders between ranks,",
        )
    T = inputs.q.shape[1]
    if isinstance(every, int) and every > 0 and T % every:
        want = f"a divisor of the T={T} tokens of a rank, as blocks may not cross the borders between ranks,"
        raise fail("checkpoint_every", shown(every), want)
    if axis not in jax_meshes.varying_axes(lax.axis_index(axis)):
        return  # replication is not tracked: under check_vma=False, and vmap
    if inputs.cu_seqlens is not None and axis in jax_meshes.varying_axes(inputs.cu_seqlens):
        want = "the offsets of the whole row, the same on every rank (in_specs P()),"
        raise fail("cu_seqlens", f"an array that differs along {axis!r}", want)
    if not any(axis in jax_meshes.varying_axes(x) for x in inputs[:5]):
        want = f"each rank's own rows (in_specs with {axis!r} at axis 1)"
        raise fail("q", f"the same array on every rank of {axis!r}", want)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan_of(
    opdef: OpDef, inputs: ChunkInputs, options: tuple[Any, ...], across: Across, backend: object
) -> SlicePlan:
    """Validate this rank's call, and select a backend that can serve all calls that a slice makes."""
    request, adapter = contract.build_request(opdef, inputs, options, needs_grad=True)
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
        slices = jax_slices.composed(own, impl.forward, impl.backward, serves)
    return SlicePlan(opdef, request, chosen, adapter, across, SliceCall(own, across, chosen.backend, slices))


def slice_request(request: Request) -> Request:
    """The call of a slice: float32 states, K-first, which come and go apart."""
    tensors = tuple((n, spec) for n, spec in request.tensors if n not in ("initial_state", "cu_seqlens_cpu"))
    features = request.features - {"initial_state", "state_v_first"}
    if request.packed:
        at = TensorSpec(request.spec("cu_seqlens").shape, "int32")
        tensors = tuple((n, at if n == "cu_seqlens" else spec) for n, spec in tensors)
    return dataclasses.replace(
        request, state_dtype="float32", state_v_first=False, tensors=tensors, features=features
    )


# --- a slice's forward and backward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Across:
    """A mesh axis whose ranks share a row."""

    axis: str
    ranks: int

    def gathered(self, x: Array) -> Array:
        """``[R, ...]``: ``x`` of every rank."""
        return lax.all_gather(x, self.axis)

    def place(self, T: int, cu_seqlens: Array | None) -> Place:
        """Where this rank lies in the row, from the offsets of the whole row."""
        rank = rank_of(self.axis)
        if cu_seqlens is None:
            return Place(rank, borders_of_rows(self.ranks), None)
        return Place(rank, borders_of_pack(cu_seqlens, T, self.ranks), part_of_pack(cu_seqlens, T, rank))


class Place(NamedTuple):
    """Where a rank lies in the row."""

    rank: Array
    """int32."""
    borders: Borders
    part: Part | None
    """None for rows that are one sequence each."""

    def entering(self) -> Array:
        """``[N]`` (or one for all rows): the sequences that began on a rank before."""
        return self.rank > 0 if self.part is None else _of_states(self.part.entering)

    def begins(self) -> Array:
        """The same: those whose first token is here."""
        return self.rank == 0 if self.part is None else _of_states(self.part.begins)

    def ends(self) -> Array:
        """The same: those whose last token is here."""
        last = self.borders.passes.shape[0] - 1
        return self.rank == last if self.part is None else _of_states(self.part.ends)

    def leaves(self) -> Array:
        """The same: those that go on on the next rank."""
        continues = self.borders.continues[self.rank]
        if self.part is None:
            return continues
        N = self.part.begins.shape[0]
        return _of_states(continues & (jnp.arange(N, dtype=jnp.int32) == self.part.last))


def _of_states(of_sequences: Array) -> Array:
    """``[N]`` so that it broadcasts against states."""
    return of_sequences[:, None, None, None]


@dataclass(frozen=True)
class SliceCall:
    """A rank's forward and backward, in the caller's terms. Equal ones do the same: compiled programs are kept by it."""

    own: Request
    """The slice's own call."""
    across: Across
    backend: str
    slices: SliceFunctions = field(compare=False)

    def __call__(self, request: Request, inputs: ChunkInputs) -> Outputs:
        """The forward. ``final_state`` is that of the local parts; of all ranks' only those that end here count."""
        own = dataclasses.replace(self.own, needs_grad=request.needs_grad)
        place = self.across.place(request.T, inputs.cu_seqlens)
        local = _local(inputs, place)
        part = self.slices.begin(own, local, None if place.part is None else place.part.last)
        maps = self.across.gathered(jnp.concatenate([part.M, part.C], -1))
        M, C = maps[..., : request.K], maps[..., request.K :]
        initial = _inside(request, inputs.initial_state)
        before = jax_fold.state_before(place.rank, place.borders, M, C, initial)
        if initial is None:
            initial = jnp.zeros(own.state_shape, before.dtype)
        starts = jnp.where(place.entering(), before, initial)
        out = self.slices.finish(own, local, part.pending, starts)
        final = _outside(request, out.final_state)
        return Outputs(out.o, final, _outside(request, out.checkpoints), (starts, M, out.saved))

    def backward(self, request: Request, inputs: ChunkInputs, saved: Any, grads: OutputGrads) -> InputGrads:
        """The gradients; of what all ranks hold, this rank's share."""
        starts, M, kept = saved
        place = self.across.place(request.T, inputs.cu_seqlens)
        local, first = _local(inputs, place), None if place.part is None else place.part.first
        grads = OutputGrads(grads.o, _inside(request, grads.final_state))
        before, pending = self.slices.backward_begin(self.own, local, kept, grads, starts, first)
        behind = jax_fold.gradient_behind(place.rank, place.borders, M, self.across.gathered(before))
        here = jnp.zeros_like(starts) if grads.final_state is None else grads.final_state
        ends = jnp.where(place.leaves(), behind, here)
        d = self.slices.backward_finish(self.own, local, kept, pending, grads, starts, ends)
        if inputs.initial_state is None:
            return d._replace(initial_state=None)
        share = _outside(request, jnp.where(place.begins(), d.initial_state, 0.0))
        return d._replace(initial_state=jax_meshes.summed_like(share, inputs.initial_state))


class SlicePlan(Plan):
    """The plan of a rank's call."""

    __slots__ = ("across", "slice_call")

    def __init__(
        self,
        opdef: OpDef,
        request: Request,
        chosen: Selection,
        adapter: Adapter,
        across: Across,
        slice_call: SliceCall,
    ) -> None:
        super().__init__(opdef, request, chosen, adapter)
        self.across = across
        self.slice_call = slice_call
        self.forward = slice_call
        self.fast_path = None

    def gradients(self, inputs: Any, *rest: Any) -> Any:
        return self.slice_call.backward(self.request, inputs, *rest)


def _local(inputs: ChunkInputs, place: Place) -> ChunkInputs:
    """The arrays of the slice's own call."""
    inputs = inputs._replace(initial_state=None, cu_seqlens_cpu=None)
    return inputs if place.part is None else inputs._replace(cu_seqlens=place.part.offsets)


def _inside(request: Request, states: Array | None) -> Array | None:
    """Callers' states as float32, K-first."""
    if states is None:
        return None
    return (jnp.swapaxes(states, -1, -2) if request.state_v_first else states).astype(jnp.float32)


def _outside(request: Request, states: Array | None) -> Array | None:
    """The reverse of :func:`_inside`."""
    if states is None:
        return None
    return (jnp.swapaxes(states, -1, -2) if request.state_v_first else states).astype(request.state_dtype)


def _of_all_ranks(request: Request, inputs: ChunkInputs, across: Across, final: Array) -> Array:
    """``final_state`` on every rank: of each sequence from the rank that holds its last token."""
    place = across.place(request.T, inputs.cu_seqlens)
    own = jnp.where(place.ends(), final, jnp.zeros_like(final))
    if inputs.initial_state is not None and inputs.cu_seqlens is not None:
        empty = _of_states(inputs.cu_seqlens[1:] == inputs.cu_seqlens[:-1])
        own = jnp.where(empty & (place.rank == 0), inputs.initial_state, own)
    return lax.psum(own, across.axis)
