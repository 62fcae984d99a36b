"""Calls of the XLA handler from traced code: launches, arrays and results by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from kdacore.arrays.jax_meshes import mesh_axes, out_struct, varying
from kdacore.types import Request
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import Clear, InPlace, Program, Step

Form = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""
Arrays = dict[str, Any]
"""Arrays by name."""


def make_launches(
    request: Request,
    launches: Launches,
    arguments: Mapping[str, Any],
    results: Mapping[str, Form],
    in_place: Mapping[str, str] | None = None,
    cleared: Sequence[str] = (),
    same: Mapping[str, str] | None = None,
) -> Arrays:
    """One call of the handler.

    Args:
        request: as :func:`kdacore_cuda.runtime.device_figures.planned` returns it.
        launches: of contiguous arrays.
        arguments: arrays that they read, row-major as XLA hands them over.
        results: arrays that they write. XLA allocates them, and the buffers.
        in_place: result -> argument whose memory it is. XLA copies an argument that is still used; the handler
            copies one for which XLA has not kept to this.
        cleared: results that are zero before the first launch.
        same: further names of arguments.

    Returns:
        The results by name, and the buffers.
    """
    buffers: dict[str, Form] = {
        name: ((size,), "uint8") for name, size in launches.buffers.items() if size and name not in arguments
    }
    results = {**results, **buffers}
    names, given = tuple(arguments), tuple(arguments.values())
    in_place = in_place or {}
    sizes = {f"bytes of {name}": _bytes(results[name]) for name in (*in_place, *cleared)}
    first: list[Step] = [InPlace(x, name, f"bytes of {name}") for name, x in in_place.items()]
    first += [Clear(name, f"bytes of {name}") for name in cleared]
    plain, numbers = launches.program, launches.numbers | sizes
    arrays = {*plain.arrays, *arguments, *results}
    program = Program((*first, *plain.steps), sorted(arrays), tuple(numbers), plain.one_segment)
    capability = int("".join(filter(str.isdigit, request.device.arch)))
    words, cubins = program.words(
        *(launches.arch, capability, multiprocessors_of(request), names, tuple(results)),
        own=program.pack_numbers(numbers),
        same=same or {},
    )
    xla_handler.add_kernels(cubins)
    axes = mesh_axes(*given)
    aliases = {names.index(x): tuple(results).index(name) for name, x in in_place.items()}
    call = jax.ffi.ffi_call(
        xla_handler.TARGET,
        [_result(form, given) for form in results.values()],
        input_output_aliases=aliases,
        vmap_method="sequential",
    )
    made = call(*(varying(x, axes) for x in given), program=words)
    return dict(zip(results, made, strict=True))


def _result(form: Form, given: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
    """A result that varies over the mesh axes that the arguments vary over."""
    struct = out_struct(form[0], jnp.dtype(form[1]), *given)
    mesh = get_abstract_mesh()
    return struct if mesh.empty else struct.update(sharding=NamedSharding(mesh, PartitionSpec()))


def _bytes(form: Form) -> int:
    return math.prod(form[0]) * jnp.dtype(form[1]).itemsize


_READ_NEVER = frozenset({"cu_seqlens_cpu", "out"})
"""Arguments that kernels do not take; JAX arrays cannot be written, so there is no ``out``."""


def given_arrays(request: Request, inputs: Any) -> Arrays:
    """The arrays of a call that kernels read, by the name of the argument. A dt_bias of heads and
    channels in one axis has two here, so that it can be split by heads."""
    fields = zip(inputs._fields, inputs, strict=True)
    given = {name: x for name, x in fields if x is not None and name not in _READ_NEVER}
    if "dt_bias" in given and not request.scalar_gate:
        given["dt_bias"] = given["dt_bias"].reshape(request.HV, request.K)
    return given


def written_rows(r: Request) -> dict[str, str]:
    """Further names of index arrays: the rows that are written are those read where no others are named."""
    named = r.written_indices if r.inplace_state else ""
    return {"write_indices": named} if named and named != "write_indices" else {}


def state_results(r: Request, arrays: Mapping[str, Any]) -> tuple[dict[str, Form], dict[str, str]]:
    """The result for a call's states, if it has one, and the pool whose memory it is, if it is one."""
    if r.inplace_state:
        pool = arrays[r.written_pool]
        return {"final_state": (pool.shape, pool.dtype.name)}, {"final_state": r.written_pool}
    return ({"final_state": (r.state_shape, r.state_dtype)} if r.output_final_state else {}), {}
