"""Calls of the XLA handler from traced code: launches, arrays and results by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from kdacore.arrays.jax_meshes import mesh_axes, out_struct, varying
from kdacore.types import Request
from kdacore.verifiers import sm_number
from kdacore_cuda.forms.chunk_numbers import g_type
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.jax.batching import Arrays
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import Clear, InPlace, Program, Step

Form = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


def make_launches(
    request: Request,
    launches: Launches,
    arrays: Arrays,
    results: Mapping[str, Form],
    in_place: Mapping[str, str] = {},
    cleared: Sequence[str] = (),
) -> Arrays:
    """One call of the handler.

    Args:
        request: as :func:`kdacore_cuda.runtime.device_figures.planned` returns it.
        launches: of contiguous arrays.
        arrays: row-major as XLA hands them over; those that the launches do not take are left out.
        results: arrays that they write. XLA allocates them, and the buffers.
        in_place: further results, each with the array whose memory it is. XLA copies one that is still used; the
            handler copies one for which XLA has not kept to this.
        cleared: results that are zero before the first launch.

    Returns:
        The results by name, and the buffers.
    """
    plain = launches.program
    taken = {*plain.arrays, *in_place.values()}
    given = {name: x for name, x in arrays.items() if name in taken}
    buffers: dict[str, Form] = {
        name: ((size,), "uint8") for name, size in launches.buffers.items() if size and name not in given
    }
    forms = {**results, **{name: form_of(given[x]) for name, x in in_place.items()}, **buffers}
    structs = {name: _struct(form, *given.values()) for name, form in forms.items()}
    sizes = {f"bytes of {x}": structs[x].size * structs[x].dtype.itemsize for x in (*in_place, *cleared)}
    first: list[Step] = [InPlace(x, name, f"bytes of {name}") for name, x in in_place.items()]
    first += [Clear(name, f"bytes of {name}") for name in cleared]
    numbers, known = launches.numbers | sizes, {*plain.arrays, *given, *structs}
    program = Program((*first, *plain.steps), sorted(known), tuple(numbers), plain.one_segment)
    # The rows that are written are those read where no others are named.
    written = request.written_indices if request.inplace_state else ""
    device = sm_number(request.device.arch), multiprocessors_of(request)
    words, cubins = program.words(
        *(launches.arch, *device, tuple(given), tuple(structs)),
        own=program.pack_numbers(numbers),
        same={"write_indices": written} if written not in ("", "write_indices") else {},
    )
    xla_handler.add_kernels(cubins)
    call = jax.ffi.ffi_call(
        xla_handler.TARGET,
        list(structs.values()),
        input_output_aliases={[*given].index(x): [*structs].index(name) for name, x in in_place.items()},
        vmap_method="sequential",
    )
    axes = mesh_axes(*given.values())
    made = call(*(varying(x, axes) for x in given.values()), program=words)
    return dict(zip(structs, made, strict=True))


def _struct(form: Form, *given: Any) -> jax.ShapeDtypeStruct:
    """A result that varies over the mesh axes that the arguments vary over."""
    struct = out_struct(form[0], jnp.dtype(form[1]), *given)
    mesh = get_abstract_mesh()
    return struct if mesh.empty else struct.update(sharding=NamedSharding(mesh, PartitionSpec()))


def form_of(x: Any) -> Form:
    """That of an array."""
    return x.shape, x.dtype.name


_READ_NEVER = frozenset({"cu_seqlens_cpu", "out"})
"""Arguments that kernels do not take; JAX arrays cannot be written, so there is no ``out``."""


def given_arrays(request: Request, inputs: Any) -> Arrays:
    """The arrays of a call that kernels read, by the name of the argument, g in the dtype in which they take it. A
    dt_bias of heads and channels in one axis has two here, so that it can be split by heads."""
    fields = zip(inputs._fields, inputs, strict=True)
    given = {name: x for name, x in fields if x is not None and name not in _READ_NEVER}
    if "dt_bias" in given and not request.scalar_gate:
        given["dt_bias"] = given["dt_bias"].reshape(request.HV, request.K)
    if request.op == "chunk_kda":
        given["g"] = given["g"].astype(g_type(request))
    return given
