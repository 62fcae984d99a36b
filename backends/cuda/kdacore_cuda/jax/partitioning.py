"""Calls on arrays that plain ``jit`` splits over devices: rows of a batch and heads are independent, so
each device makes the call on its own part, and nothing is gathered. Rows split along their tokens are refused.

Rows are split where a call has no pack and no pool. Query/key heads are split together with their
value heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, get_abstract_mesh

from kdacore.arrays.jax_meshes import partitioned
from kdacore.arrays.jax_placement import part_of, place_of, spec_of
from kdacore.types import Request
from kdacore_cuda.jax.batching import SHARED, Arrays, Run, has_pools, resized

TOKENS, MOVED = "t", "moved"
"""The tokens of arguments, whose splits have to arrive here to be refused, and those of results and
of gradients that are given. A split of the latter concerns no argument: XLA moves these arrays."""


def run_partitioned(run: Run, request: Request, arrays: Arrays, groups: int) -> Arrays:
    """``run`` on these arrays, so that XLA can split it over devices."""
    if get_abstract_mesh().manual_axes:  # inside shard_map, whose arrays are one device's
        return run(request, arrays, groups)
    names = tuple(arrays)
    results: list[str] = []

    @custom_partitioning
    def call(*given: Any) -> tuple[Any, ...]:
        made = run(request, dict(zip(names, given, strict=True)), groups)
        results[:] = made
        return tuple(made.values())

    def axes(operands: Iterable[int], produced: Iterable[int]) -> tuple[list[str], list[str]]:
        """Those of all arrays and results, given their ranks."""
        given = [axes_of(request, name, rank) for name, rank in zip(names, operands, strict=True)]
        made = [axes_of(request, name, rank, True) for name, rank in zip(results, produced, strict=True)]
        return given, made

    def rule(mesh: Mesh, operands: Any, produced: Any) -> tuple[str, dict[str, Any]]:
        given, made = axes([x.rank for x in operands], [x.rank for x in produced])
        text = f"{', '.join(given)} -> {', '.join(made)}"
        used = dict.fromkeys(re.findall("[a-z]+", text))  # in the order in which Shardy counts them
        free = ("b", "h", TOKENS) if groups == 1 else ("h", TOKENS)
        sizes = {"r": request.HV // request.H} if "(h r)" in text else {}
        return text, {"need_replication_factors": tuple(x for x in used if x not in free), **sizes}

    def partition(mesh: Mesh, operands: Any, produced: Any) -> Any:
        mesh, known = partitioned(request.op, mesh, dict(zip(names, operands, strict=True)))
        batch_is_whole = groups > 1 or has_pools(request)
        place = place_of(known["v"].sharding, request.B, request.H, batch_is_whole=batch_is_whole)
        part = part_of(request, place.rows, place.parts)

        def local(*given: Any) -> tuple[Any, ...]:
            mine = dict(zip(names, given, strict=True))
            found = run(resized(part, mine), mine, groups)
            return tuple(
                jax.lax.psum(x, place.batch) if name in SHARED and place.batch else x
                for name, x in found.items()
            )

        given, made = axes([len(x.shape) for x in operands], [len(x.shape) for x in produced])
        placed = [tuple(NamedSharding(mesh, spec_of(x, place)) for x in some) for some in (made, given)]
        return mesh, local, *placed

    call.def_partition(partition=partition, sharding_rule=rule)
    found = call(*arrays.values())  # fills in the names
    return dict(zip(results, found, strict=True))


def axes_of(r: Request, name: str, rank: int, is_result: bool = False) -> str:
    """The axes of one of a call's arrays or results of ``rank`` axes, as words: ``b`` rows, ``h`` query/key heads,
    ``r`` value heads of one of those, ``(h r)`` all value heads. The same word is the same axis."""
    if is_result and name in SHARED:  # a gradient, with an axis of groups in front
        return f"groups {axes_of(r, name, rank - 1)}"
    tokens = MOVED if is_result or name == "d_o" else TOKENS
    pools = has_pools(r)
    rows = "packs" if pools else "b"
    heads = "h" if r.HV == r.H else "(h r)"
    if r.H == 1 < r.HV:  # XLA takes no product of axes of which one has size 1
        heads = "r"
    states = f"{heads} values keys" if r.state_v_first else f"{heads} keys values"
    read = "pool" if pools else "b"
    written = ("final" if pools else "b") if not r.inplace_state else "other" if r.write_pool_size else read
    known = {
        **dict.fromkeys(("q", "k"), f"{rows} {tokens} h keys"),
        **dict.fromkeys(("v", "o", "d_o"), f"{rows} {tokens} {heads} values"),
        "g": f"{rows} {tokens} {heads}" + " keys" * (rank == 4),
        "beta": f"{rows} {tokens} {heads}",
        "A_log": heads,
        "dt_bias": heads + " keys" * (rank == 2),
        "initial_state": f"{read} {states}",
        "write_pool": f"other {states}",
        **dict.fromkeys(("final_state", "d_ht"), f"{written} {states}"),
        "checkpoints": f"blocks {states}" if rank == 4 else f"{rows} blocks {states}",
        "has_initial_state": "sequences" if pools else "b",
    }
    if name in known:
        return known[name]
    return " ".join(f"{name.replace('_', '')}{'ab'[i]}" for i in range(rank))  # indices: [N] or [N, W]
