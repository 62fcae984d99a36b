"""Calls on arrays that plain ``jit`` splits over devices: rows of a batch and heads are independent, so
each device makes the call on its own part, and nothing is gathered. Rows split along their tokens are refused.

Rows are split where a call has no pack and no pool. Query/key heads are split together with their
value heads.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, get_abstract_mesh

from kdacore.arrays import jax_placement
from kdacore.arrays.jax_meshes import partitioned
from kdacore.arrays.jax_placement import SHARED, Place, divided, moved, part_of, place_of
from kdacore.types import Request
from kdacore_cuda.jax.batching import NEW, Arrays, Run, has_pools, resized


def run_partitioned(run: Run, request: Request, arrays: Arrays, groups: int) -> Arrays:
    """``run`` on these arrays, so that XLA can split it over devices."""
    if get_abstract_mesh().manual_axes:  # inside shard_map, whose arrays are one device's
        return run(request, arrays, groups)
    names, results = tuple(arrays), list[str]()
    batch_is_whole = groups > 1 or has_pools(request)

    def whole(*given: Any) -> tuple[Any, ...]:
        made = run(request, dict(zip(names, given, strict=True)), groups)
        results[:] = made
        return tuple(made.values())

    def axes(name: str, ndim: int, is_result: bool) -> str:
        if is_result and name in SHARED:  # a gradient, with an axis of groups in front
            return f"groups {axes(name, ndim - 1, False)}"
        like = "final_state" if name == "d_ht" else name.removeprefix(NEW)
        found = jax_placement.axes_of(request, like, ndim, batch_is_whole=batch_is_whole)
        return moved(found) if is_result or name == "d_o" else found

    def part(mesh: Mesh, operands: Arrays, made: Any) -> tuple[Mesh, Place, Any]:
        mesh, known = partitioned(request.op, mesh, operands)
        tokens = known["v" if "v" in known else "record_update"]  # heads are their third axis
        place = place_of(tokens.sharding, request.B, request.H, batch_is_whole=batch_is_whole)
        own = part_of(request, place.rows, place.parts)

        def local(*given: Any) -> tuple[Any, ...]:
            mine = dict(zip(names, given, strict=True))
            return tuple(run(resized(own, mine), mine, groups).values())

        return mesh, place, local

    free = ("h", "t") if batch_is_whole else ("b", "h", "t")
    found = divided(request, whole, names, results, axes, free, part)(*arrays.values())  # fills in results
    return dict(zip(results, found, strict=True))
