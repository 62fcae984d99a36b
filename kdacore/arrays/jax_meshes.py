"""JAX arrays on a mesh.

With Explicit axes every operation has to say how its result is split. The backends' do not: they are
written for one device, or for arrays that XLA or the caller splits. Only what is whole on every device, inside
``jax.set_mesh``, needs no word.

Inside ``jax.shard_map`` JAX keeps track of the axes that a value varies over, unless it is told ``check_vma=False``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
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


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` mesh that any of the arrays (None: no array) is known to vary over."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        if x is not None:
            kind = jax.typeof(x)
            # jax 0.10 calls it manual_axis_type.varying, releases before it vma.
            manual = getattr(kind, "manual_axis_type", None)
            axes |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return axes


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """``x`` marked as varying over ``axes``, as a scan's carry has to be from the start."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def summed_like(grad: Any, primal: Any) -> Any:
    """A gradient summed over the axes that it varies over and what it belongs to does not."""
    extra = tuple(sorted(varying_axes(grad) - varying_axes(primal)))
    return lax.psum(grad, extra) if extra else grad
