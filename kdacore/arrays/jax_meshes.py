"""JAX arrays on a mesh with Explicit axes, where every operation has to say how its result is split.

The backends' do not: they are written for one device, or for arrays that XLA or the caller splits. Only what is whole
on every device, inside ``jax.set_mesh``, needs no word.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, get_abstract_mesh

WANTED = (
    "an array inside jax.shard_map or jax.sharding.auto_axes over these axes, "
    "or on a mesh made with axis_types=(AxisType.Auto,) * its number of axes"
)


def obstacle(x: Any) -> tuple[str, str] | None:
    """What an array is that the backends cannot take, and what was wanted."""
    where = jax.typeof(x).sharding
    kinds = zip(where.mesh.axis_names, where.mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]
    if not explicit:
        return None
    axes = ", ".join(map(repr, explicit))
    if any(
        name in explicit for part in where.spec for name in (part if isinstance(part, tuple) else (part,))
    ):
        return f"an array split over a mesh with Explicit axes {axes}", WANTED
    if where.mesh != get_abstract_mesh():
        return f"an array on a mesh with Explicit axes {axes}, outside jax.set_mesh", WANTED
    return None
