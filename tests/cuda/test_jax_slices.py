"""Slices of a row that ranks share, from JAX: the launches and the bits of the same slices from torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw
from emulated_backend import HOPPER
from gated_delta_calls import draw as draw_gated_delta
from jax_calls import check
from jax_emulation import Device, to_jax
from program_launches import launches_of
from slice_checks import CROSSING, pack, state, use_segments
from slice_ranks import Rank, Row
from test_gated_delta_slices import pack as pack_gated_delta

from kdacore.types import ChunkInputs, OutputGrads, SliceFunctions
from kdacore_cuda.forms.slices import functions as slices
from kdacore_cuda.forms.slices import launches
from kdacore_cuda.jax import devices as jax_devices
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.runtime import device_figures, executor, torch_launch
from kdacore_cuda.runtime.program import Program, Start

CASES: dict[str, tuple[ChunkInputs, int, dict[str, Any]]] = {
    "grouped": (draw(280, 1, 2, B=2), 2, BOUNDED_MODEL | {"output_final_state": True}),
    "checkpoints": (draw(256), 2, MODEL | {"output_final_state": True, "checkpoint_every": 64}),
    "outputs only": (draw(300, gate="slow"), 2, {"safe_gate": True, "lower_bound": -5.0}),
    "pack": (pack(CROSSING, 768), 3, BOUNDED_MODEL | {"output_final_state": True}),
    "float16 gate": (
        draw(200)._replace(g=-torch.rand(1, 200, 1, 128).half(), A_log=None, dt_bias=None), 2, {}
    ),
    "gated delta": (draw_gated_delta(280, 1, 2, B=2), 2, MODEL | {"output_final_state": True}),
    "gated delta, checkpoints": (
        draw_gated_delta(256, HV=1), 2, MODEL | {"output_final_state": True, "checkpoint_every": 64}
    ),
    "gated delta, pack": (pack_gated_delta(CROSSING, 768), 3, MODEL | {"output_final_state": True}),
    "gated delta, float16 gate": (
        draw_gated_delta(200, HV=1)._replace(g=-torch.rand(1, 200, 1).half(), A_log=None, dt_bias=None), 2, {}
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


def middle_rank(inputs: ChunkInputs, ranks: int, options: dict[str, Any]) -> Rank:
    """One into which a sequence goes on, its arrays contiguous as JAX's are."""
    rank = Row(inputs, ranks, **options).ranks[1]
    return rank._replace(inputs=ChunkInputs(*(None if x is None else x.contiguous() for x in rank.inputs)))


def flows(rank: Rank) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The gradients of o and of the final states, the states at the slice's start, the gradients at its end."""
    d, r = Draw(11), rank.request
    form = (r.N, r.HV, 128, 128)
    final = d.normal(*form, dtype=torch.float32) if r.output_final_state else None
    return d.normal(*rank.inputs.v.shape), final, *(d.normal(*form, dtype=torch.float32) for _ in range(2))


def both_forwards(functions: SliceFunctions, request: Any, inputs: Any, starts: Any) -> list[Any]:
    """What the two functions of the forward return."""
    begun = functions.begin(request, inputs, None)
    out = functions.finish(request, inputs, begun.pending, starts)
    assert not out.saved
    return [begun.M, begun.C, *out[:3]]


def both_backwards(
    functions: SliceFunctions, request: Any, inputs: Any, d_o: Any, d_final: Any, starts: Any, ends: Any
) -> list[Any]:
    """What the two functions of the backward return."""
    grads = OutputGrads(d_o, d_final)
    d_start, pending = functions.backward_begin(request, inputs, (), grads, starts, None)
    return [d_start, *functions.backward_finish(request, inputs, (), pending, grads, starts, ends)]


def in_jax(rank: Rank) -> tuple[Any, Any]:
    """The request of a call from JAX, and the functions that serve it."""
    request = dataclasses.replace(rank.request, kind="jax", device=HOPPER)
    functions = slices.slice_functions(request)
    assert functions is not None
    return request, functions


def from_both(rank: Rank) -> tuple[list[Any], list[Any]]:
    """What JAX's functions return, each pair in a jitted program, and what torch's do."""
    given = flows(rank)
    request, functions = in_jax(rank)
    x, d = ChunkInputs(*map(to_jax, rank.inputs)), [to_jax(a) for a in given]
    got = jax.block_until_ready(jax.jit(lambda x, s: both_forwards(functions, request, x, s))(x, d[2]))
    got += jax.block_until_ready(jax.jit(lambda x, d: both_backwards(functions, request, x, *d))(x, d))
    theirs = slices.slice_functions(rank.request)
    assert theirs is not None
    want = both_forwards(theirs, rank.request, rank.inputs, given[2])
    return got, want + both_backwards(theirs, rank.request, rank.inputs, *given)


@pytest.mark.every_other
@pytest.mark.parametrize("name", CASES)
def test_launches_are_those_of_torch(
    either_handler: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same kernels on the same grids, given the same numbers and the same arrays, at addresses as aligned."""
    made: list[tuple[Any, int, dict[str, Any]]] = []

    def start_of(program: Program, arch: str, index: int) -> Start:
        def start(stream: int, values: bytes) -> None:
            for step, grid, packed in launches_of(program, values):
                params = step.kernel.params
                names = [field for field, _ in params.fields]
                made.append((step.kernel, grid, dict(zip(names, params.packer.unpack(packed), strict=True))))

        return start

    monkeypatch.setattr(executor, "start_of", start_of)
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    rank = middle_rank(*CASES[name])
    from_both(rank)
    assert [x.kernel.name for x in either_handler.launched] == [x.source.name for x, _, _ in made]
    for got, (kernel, grid, want) in zip(either_handler.launched, made, strict=True):
        assert (got.grid, got.threads, got.shared) == (grid, *kernel.block("sm_90a"))
        for (field, kind), value in zip(kernel.params.fields, got.values, strict=True):
            where = f"{kernel.source.name}: {field}"
            if kind == "ptr":
                unused = field in ("initial_state", "launch")
                assert unused or bool(value) == bool(want[field]), where
                assert not value or value % 16 == 0 or field in ("A_log", "dt_bias", "cu_seqlens"), where
            else:
                assert value == pytest.approx(want[field]), where


OFTEN = ("grouped", "gated delta")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OFTEN)
def test_bits_are_those_of_torch(emulated: list[str], from_jax: Device, name: str) -> None:
    got, want = from_both(middle_rank(*CASES[name]))
    assert [x.kernel.name for x in from_jax.launched] == emulated
    check(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n in CASES if n not in OFTEN])
def test_bits_of_other_calls(emulated: list[str], from_jax: Device, name: str) -> None:
    check(*from_both(middle_rank(*CASES[name])))


@pytest.mark.exhaustive
def test_packs_of_many_sequences(
    emulated: list[str], from_jax: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results by a call of their own; nothing is kept from the first half."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    lengths = [1, 40, 0, 17, 60]
    for module in (jax_devices, torch_launch):
        monkeypatch.setattr(module, "multiprocessors", lambda index: len(lengths) // 4)
    for number, value in (("device", 11), ("multiprocessors", 1)):  # a device that no call asked about yet
        from_jax.number(number).value = value
    rank = middle_rank(pack(lengths, 128, torch.int32), 2, BOUNDED_MODEL | {"output_final_state": True})
    (request, functions), wanted = in_jax(rank), slices.slice_functions(rank.request)
    assert launches.forward_launches(request).finish is None
    starts = state(len(lengths), 1)

    def run(functions: Any, request: Any, inputs: Any, starts: Any) -> Any:
        begun = functions.begin(request, inputs, None)
        assert begun.pending is None
        return [begun.M, begun.C, *functions.finish(request, inputs, None, starts)[:2]]

    arrays = ChunkInputs(*map(to_jax, rank.inputs))
    got = jax.block_until_ready(jax.jit(lambda x, s: run(functions, request, x, s))(arrays, to_jax(starts)))
    check(got, run(wanted, rank.request, rank.inputs, starts))


@pytest.mark.parametrize(("name", "in_place"), [("grouped", [0, 1, 0, 2, 1]), ("gated delta", [0, 1, 0, 1])])
def test_buffers_are_written_in_place(name: str, in_place: list[int]) -> None:
    """Of what goes from the first half of a call to the second nothing is copied, and nothing else is kept."""
    rank = middle_rank(*CASES[name])
    request, functions = in_jax(rank)
    given = [*rank.inputs, *flows(rank)]
    forms = [None if x is None else jax.ShapeDtypeStruct(to_jax(x).shape, to_jax(x).dtype) for x in given]

    def run(inputs: Any, given: Any) -> Any:
        forward = both_forwards(functions, request, inputs, given[2])
        return forward + both_backwards(functions, request, inputs, *given)

    count = len(ChunkInputs._fields)
    traced = jax.jit(run).trace(ChunkInputs(*forms[:count]), forms[count:])
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    calls = [line for line in text.splitlines() if f"custom_call @{xla_handler.TARGET}" in line]
    assert [line.count("output_operand_alias<") for line in calls] == in_place


def test_a_mapped_slice_is_a_loop(either_handler: Device) -> None:
    """A buffer of a larger call would be no row of smaller ones."""
    rank = middle_rank(*CASES["outputs only"])
    request, functions = in_jax(rank)
    arrays = ChunkInputs(*map(to_jax, rank.inputs))
    one = {n: x for n, x in arrays._asdict().items() if x is not None}
    starts = to_jax(flows(rank)[2])

    def run(q: Any, starts: Any) -> Any:
        inputs = arrays._replace(q=q)
        begun = functions.begin(request, inputs, None)
        return begun.M, functions.finish(request, inputs, begun.pending, starts).o

    M, o = jax.jit(jax.vmap(run, in_axes=(None, 0)))(one["q"], jnp.stack([starts] * 3))
    jax.block_until_ready(o)
    assert M.shape[0] == o.shape[0] == 3
    names = [x.kernel.name.split("-")[0] for x in either_handler.launched]
    assert names == ["prepare", "maps", "transition", *["slice_starts", "output"] * 3]
    assert np.ndim(o) == 5
