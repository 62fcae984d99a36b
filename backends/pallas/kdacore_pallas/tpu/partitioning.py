"""How XLA splits a call of the kernels over the devices of a mesh, under plain ``jit``.

XLA cannot see into a kernel, and by itself refuses to partition one. Sequences and heads are independent: a call whose
arrays are split along batch or heads runs on each device on what that holds, and communicates nothing; only the
gradients of ``A_log`` and ``dt_bias`` are summed over devices that hold other sequences. A row that is split along its
tokens is refused. Inside ``shard_map`` the caller has split the arrays already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh

from kdacore.arrays.jax_meshes import partitioned
from kdacore.arrays.jax_placement import part_of, place_of, spec_of
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request

Array = Any
Run = Callable[[Request, dict[str, Array]], dict[str, Array]]
"""A call on arrays by name, with results by name."""

_SUMMED = ("A_log", "dt_bias")
"""What all sequences share."""
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
    wanted = {"o": 4}
    if request.output_final_state or request.inplace_state:
        wanted["final_state"] = 4
    if keep_starts:
        wanted[_STARTS] = 5

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
    wanted = {n: arrays[n].ndim for n in InputGrads._fields if n in arrays}

    def call(request: Request, arrays: dict[str, Array]) -> dict[str, Array]:
        own = OutputGrads(*(arrays.get(n) for n in OutputGrads._fields))
        kept = tuple(arrays[n] for n in (_STARTS,) if n in arrays)
        found = run(request, ChunkInputs(**{n: arrays[n] for n in arrays if n not in given}), kept, own)
        return {n: getattr(found, n) for n in wanted}

    return InputGrads(**_split(call, request, arrays | given, wanted))


def _split(run: Run, request: Request, arrays: dict[str, Array], results: dict[str, int]) -> dict[str, Array]:
    """``run(request, arrays)`` as one operation that XLA may partition. ``results``: dimensions by name."""
    if AxisType.Manual in get_abstract_mesh().axis_types:
        return run(request, arrays)
    names = tuple(arrays)

    def whole(*values: Array) -> tuple[Array, ...]:
        found = run(request, dict(zip(names, values, strict=True)))
        return tuple(found[n] for n in results)

    def partition(mesh: Any, given: Any, _: Any) -> Any:
        mesh, operands = partitioned(request.op, mesh, dict(zip(names, given, strict=True)))
        q = operands["q"].sharding
        place = place_of(q, request.B, request.H, batch_is_whole=_pooled(request))
        part = part_of(request, place.rows, place.parts)

        def local(*values: Array) -> tuple[Array, ...]:
            found = run(part, dict(zip(names, values, strict=True)))
            if place.batch is not None:
                found |= {n: lax.psum(found[n], place.batch) for n in _SUMMED if n in found}
            return tuple(found[n] for n in results)

        def sharding(name: str, ndim: int) -> NamedSharding:
            return NamedSharding(mesh, spec_of(_axes(request, name, ndim), place))

        into = tuple(sharding(n, len(x.shape)) for n, x in zip(names, given, strict=True))
        return mesh, local, tuple(sharding(n, ndim) for n, ndim in results.items()), into

    divided = custom_partitioning(whole)
    rule = [_axes(request, n, x.ndim) for n, x in arrays.items()]
    made = [_axes(request, n, ndim) for n, ndim in results.items()]
    # A split along the tokens of results, or of gradients that are given, concerns no argument: XLA moves these arrays.
    rule = [_moved(axes) if n in OutputGrads._fields else axes for n, axes in zip(arrays, rule, strict=True)]
    made = [_moved(axes) for axes in made]
    factors = dict.fromkeys(re.findall(r"\w+", " ".join((*rule, *made))))  # XLA wants them in this order
    divisible = ("t", "h", "r") if _pooled(request) else ("b", "t", "h", "r")
    divided.def_partition(
        partition=partition,
        sharding_rule=f"{', '.join(rule)} -> {', '.join(made)}",
        need_replication_factors=tuple(f for f in factors if f not in divisible),
        **({"r": request.HV // request.H} if _value_heads(request) == "(h r)" else {}),
    )
    # A partitioned operation has no rule for vmap.
    function = custom_vmap(divided)

    @function.def_vmap
    def mapped(size: int, batched: list[bool], *values: Array) -> Any:
        axes = tuple(0 if b else None for b in batched)
        return jax.vmap(whole, axes)(*values), (True,) * len(results)

    return dict(zip(results, function(*arrays.values()), strict=True))


def _pooled(request: Request) -> bool:
    """Whether sequences find their states by number: then none may be taken from the others."""
    return bool(request.pool_size or request.write_pool_size or request.inplace_state)


def _value_heads(request: Request) -> str:
    """The axis of value heads. XLA takes no product of axes of which one has size 1."""
    if request.HV == request.H:
        return "h"
    return "r" if request.H == 1 else "(h r)"


def _axes(request: Request, name: str, ndim: int) -> str:
    """The axes of an array: ``b`` batch, ``t`` tokens, ``h`` q/k heads and ``r`` value heads of each, ``k`` and ``w``
    channels of keys and of values. Axes that have nothing in common with other arrays' are named after the array."""
    heads = _value_heads(request)
    rows = f"{name}_rows" if request.packed or _pooled(request) else "b"
    state = f"{rows} {heads} w k" if request.state_v_first else f"{rows} {heads} k w"
    bias = f"({heads.strip('()')} k)" if ndim == 1 else f"{heads} k"
    known = {
        "q": "b t h k",
        "k": "b t h k",
        "v": f"b t {heads} w",
        "o": f"b t {heads} w",
        "g": f"b t {heads}" if request.scalar_gate else f"b t {heads} k",
        "beta": f"b t {heads}",
        "A_log": heads,
        "dt_bias": heads if request.scalar_gate else bias,
        "initial_state": state,
        "write_pool": state,
        "final_state": state,
        _STARTS: f"b chunks {heads} w k",
    }
    return known.get(name) or " ".join(f"{name}_{n}" for n in range(ndim))


def _moved(axes: str) -> str:
    """These axes, the tokens ``t`` by another name."""
    return " ".join("moved_t" if axis == "t" else axis for axis in axes.split(" "))
