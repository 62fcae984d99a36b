"""Calls with DTensors: every rank runs the op on its own rows of the batch, or on its own heads.

Rows and heads do not depend on one another, so nothing is communicated, and a call is an ordinary one between
``DTensor.to_local`` and ``DTensor.from_local``, which autograd and torch.compile know. What a placement means follows
from the axes of :data:`kdacore.ops.shapes.SHAPES`: one tensor, v where there is one, says for each dimension of the
mesh what is split over it, and all others have to agree. Nothing is redistributed: that would hide what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from kdacore.errors import ContractError
from kdacore.ops import OpDef
from kdacore.ops.shapes import SHAPES
from kdacore.types import CommitOutputs, Outputs

Obstacle = tuple[str, str, str]
"""An argument, what it is, and what it would have to be."""

_ROWS, _HEADS, _NOTHING = "rows", "heads", "nothing"
"""What is split over a dimension of the mesh."""
_HEAD_AXES = ("H", "HV", "norm_heads")
_OF_THE_WHOLE_BATCH = (
    "cu_seqlens",
    "state_indices",
    "write_indices",
    "write_pool",
    "conv_indices",
    "conv_windows",
)
"""Arguments whose entries are tokens or rows that the sequences of the whole batch share."""


def call(
    opdef: OpDef,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    backend: object,
    local_call: Callable[..., Any],
) -> Any:
    """A public call with DTensors whose placements :func:`obstacle_of` has nothing to say against.

    Args:
        local_call: runs the call on this rank's tensors: ``local_call(opdef, arrays, options, backend)``.
    """
    split = _split_of(opdef, arrays)
    found = local_call(opdef, _local(opdef, arrays, split), options, backend)
    given = dict(zip(opdef.arrays, arrays, strict=True))
    if opdef.family == "commit":
        return CommitOutputs(given["initial_state"], given["conv_state"])
    lead = given[_lead(opdef)]
    if opdef.family == "gate":
        return _placed(found, lead, lead.placements)
    o = given["out"] if given["out"] is not None else _placed(found[0], lead, lead.placements)
    state, checkpoints = found[1], found[2]
    if state is not None:
        # Written in place, it is the pool that was given.
        inplace = dict(zip(opdef.options, options, strict=True))["inplace_state"]
        pool = given["initial_state"] if given["write_pool"] is None else given["write_pool"]
        state = pool if inplace else _placed(state, lead, _placements(split, rows=0, heads=1))
    if checkpoints is not None:
        checkpoints = _placed(checkpoints, lead, _placements(split, rows=0, heads=2))
    return Outputs(o, state, checkpoints)


def local_arrays(opdef: OpDef, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of a call as this rank holds them.

    Raises:
        ContractError: as :func:`refuse`.
    """
    obstacle = obstacle_of(opdef, arrays)
    if obstacle is not None:
        refuse(opdef, obstacle)
    return _local(opdef, arrays, _split_of(opdef, arrays))


def refuse(opdef: OpDef, obstacle: Obstacle) -> NoReturn:
    """Raise the ContractError of a placement that cannot be served."""
    raise ContractError(opdef.name, *obstacle)


def obstacle_of(opdef: OpDef, arrays: tuple[Any, ...]) -> Obstacle | None:
    """The first argument whose placement cannot be served, what it is, and what it would have to be.

    Reads placements and shapes alone, and nothing that Dynamo cannot trace.
    """
    given = dict(zip(opdef.arrays, arrays, strict=True))
    name = _lead(opdef)
    lead = given[name]
    if not isinstance(lead, DTensor):
        return _beside_plain_lead(name, given)
    obstacle = _obstacle_of_lead(name, lead, given)
    if obstacle is not None:
        return obstacle
    split = _split_of(opdef, arrays)
    if _ROWS in split:
        for other in _OF_THE_WHOLE_BATCH:
            if given.get(other) is not None:
                want = f"None where {name} is placed {_shown(lead)}, or a call with to_local()"
                return other, "entries that count through the whole batch", want
    for argument in opdef.array_arguments:
        x = given[argument.name]
        if isinstance(x, DTensor):
            obstacle = _obstacle_beside(argument.name, x, name, lead, split, given)
            if obstacle is not None:
                return obstacle
        elif isinstance(x, torch.Tensor) and not (
            argument.host or ((argument.index or argument.mask) and _ROWS not in split)
        ):
            want = f"a DTensor placed {_wanted(argument.name, x, split, given)}, as {name} is one"
            return argument.name, "a plain tensor", want
    return None


def _lead(opdef: OpDef) -> str:
    """The argument that says how a call is split."""
    return "v" if "v" in opdef.arrays else opdef.arrays[0]


def _beside_plain_lead(lead: str, given: dict[str, Any]) -> Obstacle | None:
    for name, x in given.items():
        if isinstance(x, DTensor):
            return (
                name,
                f"a DTensor placed {_shown(x)}",
                f"a plain tensor, as {lead} is, or {lead} as a DTensor",
            )
    return None


def _obstacle_of_lead(name: str, lead: Any, given: dict[str, Any]) -> Obstacle | None:
    rows, heads = _dim(name, lead, _ROWS, given), _dim(name, lead, _HEADS, given)
    for placement in lead.placements:
        if type(placement) is Replicate:
            continue
        if type(placement) is Shard and placement.dim in (rows, heads):
            continue
        can = [f"Shard({d}) ({what})" for d, what in ((rows, _ROWS), (heads, _HEADS)) if d is not None]
        want = " or ".join(["Replicate()", *can]) + " on each dimension of the mesh"
        return name, f"a DTensor placed {_shown(lead)}", want + _hint(name, placement)
    return None


def _obstacle_beside(
    name: str, x: Any, lead_name: str, lead: Any, split: tuple[str, ...], given: dict[str, Any]
) -> Obstacle | None:
    """What speaks against an argument that is a DTensor."""
    if x.device_mesh != lead.device_mesh:
        return name, "a DTensor on another mesh", f"one on the mesh of {lead_name}"
    if _HEADS in split and "channels" in SHAPES[name]:
        want = f"no heads split over ranks (those of {lead_name} are): its channels are those of q, k and v"
        return name, "channels of all heads", want
    for placement, part in zip(x.placements, split, strict=True):
        dim = _dim(name, x, part, given)
        if type(placement) is Replicate if dim is None else type(placement) is Shard and placement.dim == dim:
            continue
        want = f"{_wanted(name, x, split, given)}, as {lead_name} is placed {_shown(lead)}"
        return name, f"a DTensor placed {_shown(x)}", want + _hint(name, placement)
    for part in (_ROWS, _HEADS):
        dim, ranks = _dim(name, x, part, given), 1
        for i, of_mesh in enumerate(split):
            ranks *= x.device_mesh.size(i) if of_mesh == part else 1
        if dim is not None and dim < x.dim() and x.shape[dim] % ranks:
            whole = ": each rank computes whole groups of value heads" if part == _HEADS else ""
            want = f"a multiple of {ranks} in dimension {dim}{whole}"
            return name, f"{int(x.shape[dim])} {part} over {ranks} ranks", want
    return None


def _hint(name: str, placement: Any) -> str:
    """What to do instead, of a placement that no argument may have."""
    if type(placement) is not Shard:
        return "" if type(placement) is Replicate else "; redistribute it first"
    axes = SHAPES[name]
    of_tokens = placement.dim < len(axes) and axes[placement.dim] == "T"
    return "; for tokens split over ranks call with to_local() and cp=" if of_tokens else ""


def _split_of(opdef: OpDef, arrays: tuple[Any, ...]) -> tuple[str, ...]:
    """What is split over each dimension of the mesh."""
    given = dict(zip(opdef.arrays, arrays, strict=True))
    name = _lead(opdef)
    rows = _dim(name, given[name], _ROWS, given)
    found = []
    for placement in given[name].placements:
        if type(placement) is Replicate:
            found.append(_NOTHING)
        else:
            found.append(_ROWS if placement.dim == rows else _HEADS)
    return tuple(found)


def _dim(name: str, x: Any, part: str, given: dict[str, Any]) -> int | None:
    """The dimension of an argument that holds its rows or its heads; None where it has none."""
    if part == _NOTHING or (name == "norm_weight" and x.dim() == 1):
        return None
    wanted: tuple[str, ...] = _HEAD_AXES
    if part == _ROWS:
        wanted = ("B", "N")
        if given.get("state_indices") is None:  # there is no pool: a state for each row
            wanted = ("B", "N", "rows", "conv_rows")
    for i, axis in enumerate(SHAPES[name]):
        if axis in wanted:
            return i
    return None


def _local(opdef: OpDef, arrays: tuple[Any, ...], split: tuple[str, ...]) -> tuple[Any, ...]:
    """This rank's tensors. The gradient of what ranks hold in common is a sum over them."""
    given = dict(zip(opdef.arrays, arrays, strict=True))
    found = []
    for name, x in given.items():
        if isinstance(x, DTensor):
            grads = []
            for placement, part in zip(x.placements, split, strict=True):
                shared = part != _NOTHING and _dim(name, x, part, given) is None
                grads.append(Partial() if shared else placement)
            x = x.to_local(grad_placements=tuple(grads))
        found.append(x)
    return tuple(found)


def _placements(split: tuple[str, ...], *, rows: int, heads: int) -> tuple[Any, ...]:
    """The placements of a result with rows and heads in these dimensions."""
    by_part: dict[str, Any] = {_ROWS: Shard(rows), _HEADS: Shard(heads), _NOTHING: Replicate()}
    return tuple([by_part[part] for part in split])


def _placed(x: Any, lead: Any, placements: tuple[Any, ...]) -> Any:
    return DTensor.from_local(x, lead.device_mesh, placements, run_check=False)


def _wanted(name: str, x: Any, split: tuple[str, ...], given: dict[str, Any]) -> str:
    """The placements that an argument has to have."""
    dims = [_dim(name, x, part, given) for part in split]
    return f"({', '.join(['Replicate()' if d is None else f'Shard({d})' for d in dims])})"


def _shown(x: Any) -> str:
    """The placements of a DTensor, as one would write them. ``int``: Dynamo writes no symbolic numbers."""
    found = [f"Shard({int(p.dim)})" if type(p) is Shard else f"{type(p).__name__}()" for p in x.placements]
    return f"({', '.join(found)})"
