"""Calls on arrays that plain ``jit`` splits over devices: rows of a batch and heads are independent, so
each device makes the call on its own part, and nothing is gathered. Rows split along their tokens are refused.

Rows are split where a call has no pack and no pool. Query/key heads are split together with their
value heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from kdacore.arrays.jax_meshes import partitioned
from kdacore.types import Request
from kdacore_cuda.jax.batching import SHARED, Arrays, Run, has_pools, resized

ROWS, HEADS, GROUP = "rows", "heads", "group"
"""Axes of a call: its batch, its query/key heads, the value heads of one of those."""
TOKENS, MOVED = "tokens", "movedtokens"
"""The tokens of arguments, whose splits have to arrive here to be refused, and those of results and
of gradients that are given. A split of the latter concerns no argument: XLA moves these arrays."""
_WORD = re.compile(r"[a-z]+")

Axes = tuple[str, ...]
"""Names of an array's axes. The same name is the same axis; ``(heads group)`` are value heads."""


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

    def axes(operands: Iterable[int], produced: Iterable[int]) -> tuple[list[Axes], list[Axes]]:
        """Those of all arrays and results, given their ranks."""
        given = [axes_of(request, name, rank) for name, rank in zip(names, operands, strict=True)]
        made = [axes_of(request, name, rank, True) for name, rank in zip(results, produced, strict=True)]
        return given, made

    def rule(mesh: Mesh, operands: Any, produced: Any) -> tuple[str, dict[str, Any]]:
        given, made = axes([t.rank for t in operands], [t.rank for t in produced])
        text = " -> ".join(", ".join(map(" ".join, x)) for x in (given, made))
        used = dict.fromkeys(_WORD.findall(text))  # in the order in which Shardy counts them
        free = {ROWS, HEADS, TOKENS} if groups == 1 else {HEADS, TOKENS}
        held = [axis for axis in used if axis not in free]
        sizes = {GROUP: request.HV // request.H} if f"{HEADS} {GROUP})" in text else {}
        return text, {"need_replication_factors": tuple(held), **sizes}

    def partition(mesh: Mesh, operands: Any, produced: Any) -> Any:
        mesh, known = partitioned(request.op, mesh, dict(zip(names, operands, strict=True)))
        split = _split(request, groups, known["v"].sharding)
        given, made = axes([len(x.shape) for x in operands], [len(x.shape) for x in produced])
        counts = {axis: math.prod(mesh.shape[a] for a in over) for axis, over in split.items()}

        def local(*given: Any) -> tuple[Any, ...]:
            mine = dict(zip(names, given, strict=True))
            found = run(_part_of(request, counts, mine), mine, groups)
            return tuple(
                jax.lax.psum(x, split[ROWS]) if name in SHARED and split[ROWS] else x
                for name, x in found.items()
            )

        placed = [tuple(_sharding(mesh, split, x) for x in some) for some in (made, given)]
        return mesh, local, *placed

    call.def_partition(partition=partition, sharding_rule=rule)
    found = call(*arrays.values())  # fills in the names
    return dict(zip(results, found, strict=True))


def axes_of(r: Request, name: str, rank: int, is_result: bool = False) -> Axes:
    """The axes of one of a call's arrays or results of ``rank`` axes."""
    if is_result and name in SHARED:  # a gradient, with an axis of groups in front
        return "groups", *axes_of(r, name, rank - 1)
    tokens = MOVED if is_result or name == "d_o" else TOKENS
    pools = has_pools(r)
    rows = "packs" if pools else ROWS
    heads = HEADS if r.HV == r.H else f"({HEADS} {GROUP})"
    if r.H == 1 < r.HV:  # XLA takes no product of axes of which one has size 1
        heads = GROUP
    states = (heads, "values", "keys") if r.state_v_first else (heads, "keys", "values")
    read = "pool" if pools else ROWS
    written = ("final" if pools else ROWS) if not r.inplace_state else "other" if r.write_pool_size else read
    known: dict[str, Axes] = {
        **dict.fromkeys(("q", "k"), (rows, tokens, HEADS, "keys")),
        **dict.fromkeys(("v", "o", "d_o"), (rows, tokens, heads, "values")),
        "g": (rows, tokens, heads, "keys")[:rank],
        "beta": (rows, tokens, heads),
        "A_log": (heads,),
        "dt_bias": (heads, "keys")[:rank],
        "initial_state": (read, *states),
        "write_pool": ("other", *states),
        "final_state": (written, *states),
        "d_ht": (written, *states),
        "checkpoints": (rows, "blocks", *states)[-rank:] if rank == 4 else (rows, "blocks", *states),
        "has_initial_state": (ROWS if not pools else "sequences",),
    }
    if name in known:
        return known[name]
    return tuple(f"{name.replace('_', '')}{'ab'[i]}" for i in range(rank))  # indices: [N] or [N, W]


def _split(r: Request, groups: int, v: NamedSharding) -> dict[str, tuple[str, ...]]:
    """Mesh axes over which rows and heads of a call can be split, given how its v is."""
    found: dict[str, tuple[str, ...]] = {ROWS: (), HEADS: ()}
    spec = (*v.spec, *(None,) * 4)
    for axis, at, size in ((ROWS, 0, r.B), (HEADS, 2, r.H)):
        over = spec[at] or ()
        over = over if isinstance(over, tuple) else (over,)
        count = math.prod(v.mesh.shape[a] for a in over)
        allowed = axis == HEADS or (groups == 1 and not has_pools(r))
        found[axis] = over if allowed and size % count == 0 else ()
    return found


def _sharding(mesh: Mesh, split: Mapping[str, tuple[str, ...]], axes: Axes) -> NamedSharding:
    over = [
        split.get(axis if axis in split else HEADS if axis.startswith(f"({HEADS}") else "", ())
        for axis in axes
    ]
    return NamedSharding(mesh, PartitionSpec(*(x or None for x in over)))


def _part_of(r: Request, counts: Mapping[str, int], arrays: Arrays) -> Request:
    """The request of one device's part."""
    rows, heads = counts[ROWS], counts[HEADS]
    sizes = {
        "B": r.B // rows,
        "N": r.N if has_pools(r) else r.N // rows,
        "H": r.H // heads,
        "HV": r.HV // heads,
    }
    return resized(r, arrays, **sizes)
