"""JAX arrays on a mesh: which the backends cannot take, and the axes that an array varies over inside ``shard_map``.

On a mesh with Explicit axes every operation has to say how its result is split. Those of the backends do not: they are
written for one device, or for arrays that XLA or the caller splits. Only what is whole on every device, inside
``jax.set_mesh``, needs no word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from kdacore.errors import ContractError

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


def on_known_mesh(mesh: Mesh, operands: Mapping[str, Any]) -> tuple[Mesh, dict[str, Any]]:
    """The mesh and the operands of a call that XLA partitions under plain ``jit``.

    JAX may know no mesh (arrays without a sharding in a program for several devices, inside ``jax.set_mesh``). Then
    the mesh here has one axis, over which nothing is split: every device computes the whole call.

    Args:
        mesh: the mesh that JAX knows, or an empty one.
        operands: what XLA partitions, by the name of the argument: anything with a shape, a dtype and a sharding.

    Returns:
        A mesh, and operands whose shardings are each a ``NamedSharding`` on it.
    """
    if not mesh.empty:
        return mesh, dict(operands)
    devices = sorted(next(iter(operands.values())).sharding.device_set, key=lambda device: device.id)
    numbered = Mesh(np.asarray(devices), ("devices",))
    whole = NamedSharding(numbered, PartitionSpec())
    return numbered, {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for n, x in operands.items()}


def partitioned(op: str, mesh: Mesh, operands: Mapping[str, Any]) -> tuple[Mesh, dict[str, Any]]:
    """:func:`on_known_mesh`, for a backend that takes whole rows only.

    Raises:
        ContractError: q, k, v, g or beta of ``op`` has its axis of tokens, the second, on several devices: each would
            need the tokens before its own.
    """
    mesh, known = on_known_mesh(mesh, operands)
    for name in ("q", "k", "v", "g", "beta"):
        if name in known:
            _refuse_split_tokens(op, name, known[name].sharding)
    return mesh, known


def _refuse_split_tokens(op: str, name: str, where: NamedSharding) -> None:
    over = (*where.spec, None, None)[1] or ()
    if math.prod(where.mesh.shape[a] for a in ((over,) if isinstance(over, str) else over)) > 1:
        raise ContractError(
            op,
            name,
            f"an array split along its tokens, over mesh axes {over!r}",
            "whole rows, by jax.lax.with_sharding_constraint before the call; or, "
            "inside jax.shard_map, cp= computes rows that are split over a mesh axis",
        )


def mesh_axes(*arrays: Any) -> frozenset[str]:
    """Axes of a ``shard_map`` mesh over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        if x is not None:
            kind = jax.typeof(x)
            # jax 0.10 calls it manual_axis_type.varying, releases before it vma.
            manual = getattr(kind, "manual_axis_type", None)
            axes |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return axes


def out_struct(shape: tuple[int, ...], dtype: Any, *arrays: Any) -> jax.ShapeDtypeStruct:
    """Shape of a kernel's output, varying over the mesh axes that any of its inputs varies over."""
    kind = getattr(jax.typeof(arrays[0]), "manual_axis_type", None)
    if kind is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=type(kind)(varying=mesh_axes(*arrays)))


def varying(x: Any, axes: frozenset[str]) -> Any:
    """``x`` marked as varying over ``axes``, so that a scan may carry it together with sharded values."""
    missing = tuple(sorted(axes - mesh_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def summed_like(grad: Any, primal: Any) -> Any:
    """``grad`` in the dtype of ``primal``, summed over the mesh axes along which ``primal`` is replicated."""
    extra = tuple(sorted(mesh_axes(grad) - mesh_axes(primal)))
    if extra:
        grad = lax.psum(grad, extra)
    return grad.astype(primal.dtype)
