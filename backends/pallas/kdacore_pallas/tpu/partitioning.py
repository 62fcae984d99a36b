"""How XLA splits a call of the kernels over the devices of a mesh, under plain ``jit``.

XLA cannot see into a kernel, and by itself refuses to partition one. Sequences and heads are independent: a call whose
arrays are split along batch or heads runs on each device on what that holds, and communicates nothing; only the
gradients of ``A_log`` and ``dt_bias`` are summed over devices that hold other sequences. A row that is split along its
tokens is refused. Inside ``shard_map`` the caller has split the arrays already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, get_abstract_mesh

from kdacore.arrays.jax_meshes import partitioned
from kdacore.arrays.jax_placement import axes_of, divided, moved, part_of, place_of
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request

Array = Any
Run = Callable[[Request, dict[str, Array]], dict[str, Array]]
"""A call on arrays by name, with results by name."""

_STARTS = "starts"
"""``[B, NC, HV, V, K]``: the states that chunks start from, of a forward that keeps them."""


def split_forward(
    run: Callable[..., Outputs],
    request: Request,
    inputs: ChunkInputs | RecurrentInputs,
    keep_starts: bool = False,
) -> Outputs:
    """``run(request, inputs)``, split over devices as its arrays are. ``keep_starts``: what it saves is the chunks'
    start states; else what it saves is dropped."""
    wanted = ["o"]
    if request.output_final_state or request.inplace_state:
        wanted.append("final_state")
    if keep_starts:
        wanted.append(_STARTS)

    def call(request: Request, arrays: dict[str, Array]) -> dict[str, Array]:
        out = run(request, type(inputs)(**arrays))
        found = {n: x for n, x in out._asdict().items() if n in wanted}
        return found | ({_STARTS: out.saved[0]} if keep_starts else {})

    arrays = {n: x for n, x in inputs._asdict().items() if x is not None}
    found = _split(call, request, arrays, wanted)
    return Outputs(found["o"], found.get("final_state"), saved=(found[_STARTS],) if keep_starts else ())


def split_backward(
    run: Callable[..., InputGrads],
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
) -> InputGrads:
    """``run(request, inputs, saved, grads)``, split over devices as its arrays are. ``saved``: the chunks' start
    states, or nothing."""
    arrays = {n: x for n, x in inputs._asdict().items() if x is not None}
    given = {n: x for n, x in grads._asdict().items() if x is not None}
    given |= {_STARTS: saved[0]} if saved else {}
    wanted = [n for n in InputGrads._fields if n in arrays]

    def call(request: Request, arrays: dict[str, Array]) -> dict[str, Array]:
        own = OutputGrads(*(arrays.get(n) for n in OutputGrads._fields))
        kept = tuple(arrays[n] for n in (_STARTS,) if n in arrays)
        found = run(request, ChunkInputs(**{n: arrays[n] for n in arrays if n not in given}), kept, own)
        return {n: getattr(found, n) for n in wanted}

    return InputGrads(**_split(call, request, arrays | given, wanted))


def _split(run: Run, request: Request, arrays: dict[str, Array], results: list[str]) -> dict[str, Array]:
    """``run(request, arrays)`` as one operation that XLA may partition. ``results``: their names."""
    if AxisType.Manual in get_abstract_mesh().axis_types:
        return run(request, arrays)
    names = tuple(arrays)

    def whole(*values: Array) -> tuple[Array, ...]:
        found = run(request, dict(zip(names, values, strict=True)))
        return tuple(found[n] for n in results)

    def axes(name: str, ndim: int, is_result: bool) -> str:
        if name == _STARTS:
            return f"b chunks {axes('A_log', 1, False)} w k"
        found = axes_of(request, name, ndim, batch_is_whole=request.packed or _pooled(request))
        return moved(found) if is_result or name in OutputGrads._fields else found

    def part(mesh: Any, operands: dict[str, Array], made: Any) -> Any:
        mesh, known = partitioned(request.op, mesh, operands)
        q = known["q"].sharding
        place = place_of(q, request.B, request.H, batch_is_whole=_pooled(request))
        mine = part_of(request, place.rows, place.parts)

        def local(*values: Array) -> tuple[Array, ...]:
            found = run(mine, dict(zip(names, values, strict=True)))
            return tuple(found[n] for n in results)

        return mesh, place, local

    free = ("t", "h", "r") if _pooled(request) else ("b", "t", "h", "r")
    operation = divided(request, whole, names, results, axes, free, part)
    # A partitioned operation has no rule for vmap.
    function = custom_vmap(operation)

    @function.def_vmap
    def mapped(size: int, batched: list[bool], *values: Array) -> Any:
        axes = tuple(0 if b else None for b in batched)
        return jax.vmap(whole, axes)(*values), (True,) * len(results)

    return dict(zip(results, function(*arrays.values()), strict=True))


def _pooled(request: Request) -> bool:
    """Whether sequences find their states by number: then none may be taken from the others."""
    return bool(request.pool_size or request.write_pool_size or request.inplace_state)
