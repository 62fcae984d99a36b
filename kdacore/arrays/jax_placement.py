"""How a JAX call is divided over the devices of a mesh under plain ``jit``, and the part that each computes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from kdacore.types import Request


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


def spec_of(axes: str, place: Place) -> PartitionSpec:
    """The spec of an array whose axes these words name: ``b`` the batch, ``h`` q/k heads."""
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
