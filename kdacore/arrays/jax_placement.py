"""How a JAX call is divided over the devices of a mesh under plain ``jit``, and the part that each computes.

Sequences and heads are independent: where a call is split along batch or heads, each device makes it on what it holds,
and communicates nothing; only the gradients of :data:`SHARED` are summed over devices that hold other sequences.

An array's axes are words in one string: ``b`` batch, ``t`` tokens, ``h`` q/k heads, ``r`` value heads of each, ``k``
and ``w`` channels of keys and of values; ``(h r)`` is one axis of both. The same word is the same axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdacore.types import Request

SHARED = ("A_log", "dt_bias")
"""Arguments that all sequences have in common, and the results that are their gradients."""


class Place(NamedTuple):
    """Over which mesh axes a call is split; None where it is not."""

    batch: Any
    heads: Any
    rows: int
    """Equal parts of the batch."""
    parts: int
    """Equal parts of the heads."""


def place_of(tokens: NamedSharding, B: int, H: int, *, batch_is_whole: bool) -> Place:
    """How a call with B sequences and H q/k heads is split, from the sharding of its q or v."""
    spec = (*tokens.spec, None, None, None)
    batch = None if batch_is_whole else _dividing(tokens, spec[0], B)
    heads = _dividing(tokens, spec[2], H)
    return Place(batch, heads, _count(tokens, batch), _count(tokens, heads))


def part_of(request: Request, rows: int, parts: int) -> Request:
    """The call on one of ``rows`` equal parts of the batch and ``parts`` of the q/k heads."""
    return replace(
        request,
        B=request.B // rows,
        N=request.N // rows,
        H=request.H // parts,
        HV=request.HV // parts,
    )


def axes_of(request: Request, name: str, ndim: int, *, batch_is_whole: bool) -> str:
    """The axes of one of a call's arrays. Those that have nothing in common with other arrays' are named after it."""
    heads = _value_heads(request)
    rows, batch = (f"{name}_rows", "batch") if batch_is_whole else ("b", "b")
    states = f"{heads} w k" if request.state_v_first else f"{heads} k w"
    bias = f"({heads.strip('()')} k)" if ndim == 1 else f"{heads} k"
    known = {
        **dict.fromkeys(("q", "k"), f"{batch} t h k"),
        **dict.fromkeys(("v", "o", "d_o"), f"{batch} t {heads} w"),
        "g": f"{batch} t {heads}" if ndim == 3 else f"{batch} t {heads} k",
        "beta": f"{batch} t {heads}",
        "A_log": heads,
        "dt_bias": heads if request.scalar_gate else bias,
        **dict.fromkeys(("initial_state", "write_pool", "final_state", "d_final_state"), f"{rows} {states}"),
        "record_update": f"{name}_rows {name}_n {heads} w",
        "record_key": f"{name}_rows {name}_n h k",
        "record_decay": f"{name}_rows {name}_n {heads}" + " k" * (ndim == 4),
        "checkpoints": f"{name}_rows {states}" if ndim == 4 else f"{batch} {name}_rows {states}",
        **({} if batch_is_whole else dict.fromkeys(("state_indices", "has_initial_state"), "b")),
    }
    return known.get(name) or " ".join(f"{name}_{n}" for n in range(ndim))


def _value_heads(request: Request) -> str:
    """The axis of value heads. XLA takes no product of axes of which one has size 1."""
    if request.HV == request.H:
        return "h"
    return "r" if request.H == 1 else "(h r)"


def moved(axes: str) -> str:
    """These axes, the tokens ``t`` by another name: of results, and of gradients that are given. A split of their
    tokens concerns no argument: XLA moves these arrays."""
    return " ".join("moved_t" if axis == "t" else axis for axis in axes.split(" "))


def spec_of(axes: str, place: Place) -> PartitionSpec:
    """The spec of an array with these axes."""
    return PartitionSpec(*({"b": place.batch, "h": place.heads}.get(axis) for axis in first_of_each(axes)))


def first_of_each(axes: str) -> list[str]:
    """The axes' words. Of a product of several in one axis, ``(h r)``, the first: that is the one to split."""
    return re.sub(r"\((\w+)[^)]*\)", r"\1", axes).split()


def _count(where: NamedSharding, axes: Any) -> int:
    """The number of devices along mesh axes: a name, several, or None."""
    return math.prod(where.mesh.shape[n] for n in ((axes,) if isinstance(axes, str) else axes or ()))


def _dividing(where: NamedSharding, axes: Any, size: int) -> Any:
    """The axes, or None where they do not divide a size evenly."""
    return axes if axes and size % _count(where, axes) == 0 else None


Results = tuple[Any, ...]
Part = Callable[[Mesh, dict[str, Any], Sequence[Any]], tuple[Mesh, Place, Callable[..., Results]]]
"""What one device computes, given the mesh, the operands by name and the results: the mesh that is known, how the call
is split over it, and the call on a device's arrays."""


def divided(
    request: Request,
    whole: Callable[..., Results],
    names: Sequence[str],
    results: Sequence[str],
    axes: Callable[[str, int, bool], str],
    free: Collection[str],
    part: Part,
) -> Callable[..., Results]:
    """``whole`` as one operation that XLA may partition.

    Args:
        request: the call.
        whole: the call on all of its arrays.
        names: of the arrays, in order.
        results: names of the results, in order; they may be known only when ``whole`` has been traced.
        axes: ``axes(name, ndim, is_result)``: those of an array or result.
        free: axes of which XLA may keep a split; it gathers the others.
        part: what each device computes.
    """

    def all_axes(operands: Sequence[int], made: Sequence[int]) -> tuple[list[str], list[str]]:
        """Those of arrays and of results, given their dimensions."""
        given = [axes(name, ndim, False) for name, ndim in zip(names, operands, strict=True)]
        return given, [axes(name, ndim, True) for name, ndim in zip(results, made, strict=True)]

    def rule(mesh: Mesh, operands: Sequence[Any], made: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        given, found = all_axes([x.rank for x in operands], [x.rank for x in made])
        text = f"{', '.join(given)} -> {', '.join(found)}"
        factors = dict.fromkeys(re.findall(r"\w+", text))  # XLA wants them in this order
        sizes = {"r": request.HV // request.H} if "(h r)" in text else {}
        return text, {"need_replication_factors": tuple(f for f in factors if f not in free)} | sizes

    def partition(mesh: Mesh, operands: Sequence[Any], made: Sequence[Any]) -> Any:
        mesh, place, local = part(mesh, dict(zip(names, operands, strict=True)), made)

        def summed(*values: Any) -> Results:
            found = zip(results, local(*values), strict=True)
            return tuple(
                lax.psum(x, place.batch) if place.batch and name in SHARED else x for name, x in found
            )

        given, found = all_axes([len(x.shape) for x in operands], [len(x.shape) for x in made])
        into, out = (tuple(NamedSharding(mesh, spec_of(a, place)) for a in some) for some in (given, found))
        return mesh, summed, out, into

    operation = custom_partitioning(whole)
    operation.def_partition(partition=partition, sharding_rule=rule)
    return operation  # type: ignore[no-any-return]
