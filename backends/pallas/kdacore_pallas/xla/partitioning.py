"""How XLA splits a call over the devices of a mesh, under plain ``jit``.

Sequences and heads are independent, but the programs here put both, and chunks, in one axis, of which XLA can keep no
split. So a call is one operation that tells XLA how it is split: along batch and heads each device makes the call on
what it holds, and communicates nothing; only the gradients of ``A_log`` and ``dt_bias`` are summed over devices that
hold other sequences. What is split in another way, along tokens for example, is gathered.

On one device, inside ``shard_map``, under ``vmap`` and in derivatives of derivatives the call is the program that it
would be without this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, get_abstract_mesh

from kdacore.arrays.jax_meshes import on_known_mesh
from kdacore.arrays.jax_placement import Place, divided, part_of, place_of
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla.call_axes import arrays_of, axes_of, batch_is_whole
from kdacore_pallas.xla.records import PARTS

Array = Any
Arrays = dict[str, Array]
Run = Callable[[Request, Arrays], Arrays]
"""A call on arrays by name, with results by name."""
_SAVED = "saved_"
"""How the names of the arrays that the forward saves begin."""
_WRITTEN = "written_"
"""The same of new arrays in place of those that the call writes beside the pool."""
_CONSTANT = "constant_"
"""The same of the constants of a program."""


def split_forward(
    forward: Callable[[Request, Any], Outputs], request: Request, inputs: ChunkInputs | RecurrentInputs
) -> Outputs:
    """``forward(request, inputs)``, split over devices as its arrays are."""

    def run(request: Request, arrays: Arrays) -> Arrays:
        out = forward(request, type(inputs)(**arrays))
        more = {f"{_SAVED}{n}": x for n, x in enumerate(out.saved)}
        more |= {f"{_WRITTEN}{n}": x for n, x in zip(PARTS, out.written, strict=False)}
        return {n: x for n, x in zip(Outputs._fields[:3], out[:3], strict=True) if x is not None} | more

    found = _split(run, request, arrays_of(inputs))
    saved, written = (
        tuple(x for n, x in found.items() if n.startswith(start)) for start in (_SAVED, _WRITTEN)
    )
    return Outputs(found["o"], found.get("final_state"), found.get("checkpoints"), saved, written)


def split_backward(
    backward: Callable[..., InputGrads],
    request: Request,
    inputs: ChunkInputs | RecurrentInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
) -> InputGrads:
    """``backward(request, inputs, saved, grads)``, split over devices as its arrays are."""
    kept = {f"{_SAVED}{n}": x for n, x in enumerate(saved)}
    cotangents = {f"d_{n}": x for n, x in arrays_of(grads).items()}

    def run(request: Request, arrays: Arrays) -> Arrays:
        own = type(inputs)(**{n: x for n, x in arrays.items() if n not in kept and n not in cotangents})
        d = OutputGrads(*(arrays.get(f"d_{n}") for n in OutputGrads._fields))
        return arrays_of(backward(request, own, tuple(arrays[n] for n in kept if n in arrays), d))

    found = _split(run, request, arrays_of(inputs) | kept | cotangents)
    return InputGrads(*(found.get(n) for n in InputGrads._fields))


def _split(run: Run, request: Request, arrays: Arrays) -> Arrays:
    """``run(request, arrays)`` as one operation that XLA may partition."""
    if get_abstract_mesh().manual_axes:  # inside shard_map, whose arrays are one device's
        return run(request, arrays)
    results: list[str] = []

    def whole(*values: Array) -> tuple[Array, ...]:
        found = run(request, dict(zip(arrays, values, strict=True)))
        results[:] = found
        return tuple(found.values())

    # JAX takes no function with arrays of constants in it: they become arguments.
    traced = jax.make_jaxpr(whole)(*arrays.values())
    constants = {f"{_CONSTANT}{n}": jnp.asarray(x) for n, x in enumerate(traced.consts)}
    names = (*arrays, *constants)

    def closed(*values: Array) -> tuple[Array, ...]:
        at = len(arrays)
        return tuple(jax.core.eval_jaxpr(traced.jaxpr, values[at:], *values[:at]))

    def part(mesh: Mesh, operands: Arrays, made: Sequence[Any]) -> tuple[Mesh, Place, Any]:
        mesh, known = on_known_mesh(mesh, operands)
        q = known["q"].sharding
        place = place_of(q, request.B, request.H, batch_is_whole=batch_is_whole(request))
        mine = part_of(request, place.rows, place.parts)

        def local(*values: Array) -> tuple[Array, ...]:
            # What the forward saves in programs for several devices is never read, so XLA removes it: its layout is
            # that of the whole call, and the backward may be split in another way than the forward.
            own = {
                n: x for n, x in zip(names, values, strict=True) if n in arrays and not n.startswith(_SAVED)
            }
            found = run(mine, own)
            unread = {n: jnp.zeros(x.shape, x.dtype) for n, x in zip(results, made, strict=True)}
            return tuple(unread[n] if n.startswith(_SAVED) else found[n] for n in results)

        return mesh, place, local

    def axes(name: str, ndim: int, is_result: bool) -> str:
        return axes_of(request, name.removeprefix(_WRITTEN), ndim)

    split = divided(request, closed, names, results, axes, ("b", "h"), part)
    found = _with_whole_derivatives(split, closed)(*arrays.values(), *constants.values())
    return dict(zip(results, found, strict=True))


def _with_whole_derivatives(split: Callable[..., Any], whole: Callable[..., Any]) -> Any:
    """``split``, which JAX can neither map nor differentiate, with the batches and derivatives of ``whole``."""
    mapped = custom_vmap(split)

    @mapped.def_vmap
    def batches(size: int, batched: list[bool], *values: Array) -> Any:
        found = jax.vmap(whole, tuple(0 if b else None for b in batched))(*values)
        return found, jax.tree.map(lambda _: True, found)

    call = jax.custom_jvp(lambda *values: mapped(*values))

    @call.defjvp
    def derivatives(values: tuple[Array, ...], tangents: tuple[Any, ...]) -> Any:
        return jax.jvp(whole, values, tangents)

    return call
