"""The walks of the gated delta rule's backward, emulated, each against its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chunk_backward_model as chunk_model
import gated_delta_model as model
import numpy as np
import pytest
import torch
from chunk_backward_calls import filled, worst
from chunk_backward_model import F64
from cuda_calls import MODEL, Draw, error, request_of
from gated_delta_calls import NAN, OP, in_each_order
from single_launches import launch_kernel
from spill_allowances import allowed

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import backward_walk_kernel, records_kernel, walk_kernel
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.request_encoding import division, type_code
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_reference.oracle import to_float64

pytestmark = pytest.mark.usefixtures("poison")
BOUND = 3.5e-3
"""Relative, of each chunk's matrix: a few roundings to bfloat16, and those of the states before."""

WARPGROUPS = pytest.mark.parametrize("warpgroups", [1, 2])


def draw(
    T: int = 150, H: int = 1, HV: int = 2, B: int = 1, gate: str = "init", seed: int = 0, **arrays: Any
) -> ChunkInputs:
    d = Draw(seed)
    raw = gate in ("random", "init")
    gates = {n: x if n == "A_log" else x[..., 0] for n, x in d.gate(gate, B, T, HV, 1).items()}
    q, k, v = d.normal(B, T, H, 128), d.normal(B, T, H, 128), d.normal(B, T, HV, 128)
    beta = d.normal(B, T, HV) if raw else d.uniform(B, T, HV)
    return ChunkInputs(q, k, v, beta=beta, **gates)._replace(**arrays)


def draw_states(n: int, hv: int = 2, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    return Draw(seed).normal(n, hv, 128, 128, dtype=dtype)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN before and behind them."""
    edge = 64 * int(np.prod(x.shape[2:]))
    buffer = torch.full((x.numel() + 2 * edge,), NAN, dtype=x.dtype)
    inside = buffer[edge:-edge].view(x.shape)
    inside.copy_(x)
    return inside


def nan_like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(0).new_empty(shape, dtype=dtype).fill_(NAN)


def options_of(gate: str) -> dict[str, Any]:
    return MODEL if gate in ("random", "init") else {"use_qk_l2norm_in_kernel": True}


class Case(NamedTuple):
    """A call, the records that its walks read, and the gradients they begin with."""

    request: Request
    inputs: ChunkInputs
    records: torch.Tensor
    d_o: torch.Tensor
    d_final: torch.Tensor | None
    device: str = "cpu"
    """Where the walks run."""

    @property
    def work(self) -> model.Work:
        return model.unpack_records(self.records)

    @property
    def units(self) -> tuple[int, int]:
        return chunk_slots(self.request), self.request.HV


def make_case(
    inputs: ChunkInputs, d_final: torch.Tensor | None = None, flags: int = 0, **options: Any
) -> Case:
    """With the model's records; numbers in them that walks have no use for are NaN."""
    request = request_of(OP, inputs, output_final_state=True, **(options or MODEL))
    work = model.records(request, inputs, flags)
    work |= {name: np.full_like(work[name], NAN) for name in model.SCALARS}
    return Case(request, inputs, model.pack_records(work), Draw(100).normal(*inputs.v.shape), d_final)


def numbers_of(request: Request, flags: int = 0) -> dict[str, Any]:
    """Those that a launch of the gated delta rule takes."""
    numbers = chunk_numbers(request) | {"g_type": type_code(request, "g")}
    for name, divisor in (("h", request.H), ("group", request.HV // request.H)):
        numbers[f"{name}_factor"], numbers[f"{name}_shift"] = division(divisor)
    return numbers | {"flags": numbers["flags"] | flags}


Results = dict[str, torch.Tensor]
Walk = Callable[..., Results]


def kept_arrays(case: Case) -> Results:
    return {"u": nan_like(*case.units, 64 * 128), "states": nan_like(*case.units, 128 * 128)}


def launch_walk(kernel: Kernel, blocks: int, case: Case, given: tuple[str, ...], results: Results) -> None:
    """``given``: arrays of tokens, by name; pointers to others are null."""
    arrays = {name: guarded(getattr(case.inputs, name)) for name in given if name != "d_o"}
    arrays |= {"d_o": guarded(case.d_o)} if "d_o" in given else {}
    arrays |= {"records": case.records, **results}
    if case.inputs.cu_seqlens is not None:
        arrays["cu_seqlens"] = case.inputs.cu_seqlens
    if case.inputs.initial_state is not None and "v" in given:
        arrays["h0"] = case.inputs.initial_state
    if case.d_final is not None and "d_o" in given:
        arrays["d_ht"] = case.d_final
    arrays = {name: x.to(case.device) for name, x in arrays.items()}
    launch_kernel(kernel, blocks, arrays["records"], arrays, **numbers_of(case.request))
    for name, x in results.items():
        x.copy_(arrays[name])


def walk_back(case: Case, warpgroups: int = 1, with_states: bool = False) -> Results:
    """One launch of the backward's walks, held to the model."""
    r, inputs = case.request, case.inputs
    got = {"state_grads": nan_like(*case.units, 128 * 128), "dv": nan_like(*inputs.v.shape)}
    if with_states:
        got |= kept_arrays(case)
    if inputs.initial_state is not None:
        got["d_h0"] = nan_like(*inputs.initial_state.shape, dtype=inputs.initial_state.dtype)
    kernel = backward_walk_kernel(warpgroups, with_states)
    given = ("q", "k", "v", "d_o") if with_states else ("q", "k", "d_o")
    launch_walk(kernel, 2 // warpgroups * r.N * r.HV * (1 + with_states), case, given, got)
    want, dv, d_initial = model.reverse(r, inputs, case.work, case.d_o, case.d_final)
    check_units(case, got, want)
    check_tokens(case, got["dv"], dv)
    if inputs.initial_state is not None:
        assert error(got["d_h0"], d_initial) < BOUND
    if with_states:
        check_units(case, got, model.walk(r, inputs, case.work)[0])
        check_rows_past_the_end(case, got["u"])
    return got


def walk_keeping(case: Case, warpgroups: int = 1, keeps: bool = True) -> Results:
    """One launch of the forward's walk, held to the model."""
    r, inputs = case.request, case.inputs
    state_dtype = torch.float32 if inputs.initial_state is None else inputs.initial_state.dtype
    got = {"o": nan_like(*inputs.v.shape), "ht": nan_like(r.N, r.HV, 128, 128, dtype=state_dtype)}
    if keeps:
        got |= kept_arrays(case)
    blocks = 2 // warpgroups * r.N * r.HV
    launch_walk(walk_kernel(warpgroups, keeps), blocks, case, ("q", "k", "v"), got)
    want, o, final = model.walk(r, inputs, case.work)
    check_units(case, got, want if keeps else {})
    assert error(got["o"], np.nan_to_num(o)) < BOUND
    assert error(got["ht"], final) < BOUND
    if keeps:
        check_rows_past_the_end(case, got["u"])
    return got


def check_units(case: Case, got: Results, want: model.Work) -> None:
    """Each chunk's matrix within the bound; slots that no sequence fills unwritten."""
    where = filled(case.request, case.inputs)
    elsewhere = np.ones(case.units, bool)
    for at in where:
        elsewhere[at] = False
    for name, exact in want.items():
        mine = chunk_model.from_images(got[name], *exact.shape[2:])
        assert not where or worst(mine, exact, where) < BOUND, name
        assert np.isnan(mine[elsewhere]).all(), name


def check_tokens(case: Case, got: torch.Tensor, want: F64) -> None:
    """Each chunk's rows within the bound; those behind a pack unwritten."""
    mine = to_float64(got)
    for c in chunk_model.chunks(case.request, case.inputs):
        at = c.batch, c.tokens
        assert np.linalg.norm(mine[at] - want[at]) <= BOUND * np.linalg.norm(want[at])
    assert np.isnan(mine[np.isnan(want)]).all()


def check_rows_past_the_end(case: Case, u: torch.Tensor) -> None:
    rows = chunk_model.from_images(u, 64, 128)
    for c in chunk_model.chunks(case.request, case.inputs):
        assert not rows[c.slot, :, c.tokens.stop - c.tokens.start :].any()


def same(x: Results, y: Results, *names: str) -> bool:
    """Bit for bit, NaN too; of all arrays unless some are named."""
    return all(torch.equal(x[n].view(torch.uint8), y[n].view(torch.uint8)) for n in names or x)


def walk_back_with_states(case: Case, warpgroups: int = 1) -> Results:
    return walk_back(case, warpgroups, with_states=True)


# --- numbers ---------------------------------------------------------------------------------------------------------

WALKS = pytest.mark.parametrize("walk", [walk_back, walk_back_with_states, walk_keeping])


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129, 200])
@WARPGROUPS
@WALKS
def test_lengths(emulated: list[str], walk: Walk, warpgroups: int, T: int) -> None:
    walk(make_case(draw(T, B=1 + T % 2, seed=T)), warpgroups)


@WARPGROUPS
@WALKS
def test_many_chunks(emulated: list[str], walk: Walk, warpgroups: int) -> None:
    """Rings run round more than twice."""
    inputs = draw(9 * 64 + 5, HV=1, seed=3, initial_state=draw_states(1, 1))
    walk(make_case(inputs, draw_states(1, 1, seed=6)), warpgroups)


@pytest.mark.every_other
@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
@WALKS
def test_gates(emulated: list[str], walk: Walk, gate: str) -> None:
    """States that live long, and such that are gone within a chunk."""
    inputs = draw(250, gate=gate, seed=4, initial_state=draw_states(1))
    walk(make_case(inputs, draw_states(1, seed=6), **options_of(gate)))


@pytest.mark.parametrize("group", [1, 3])
@WALKS
def test_groups_of_value_heads(emulated: list[str], walk: Walk, group: int) -> None:
    walk(make_case(draw(70, 2, 2 * group)))


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["both", "initial", "final"])
@WALKS
def test_states(emulated: list[str], walk: Walk, given: str, dtype: torch.dtype, v_first: bool) -> None:
    """Two sequences, a last chunk of six rows."""
    initial = None if given == "final" else draw_states(2, dtype=dtype)
    # The final state has the type of the initial one, float32 without.
    final_dtype = dtype if given == "both" else torch.float32
    d_final = None if given == "initial" else draw_states(2, dtype=final_dtype, seed=6)
    inputs = draw(70, B=2, initial_state=initial)
    walk(make_case(inputs, d_final, state_v_first=v_first, **MODEL), 1 + v_first)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@WALKS
def test_packs(emulated: list[str], walk: Walk, dtype: torch.dtype, index: torch.dtype) -> None:
    """Empty sequences, rows behind the pack, and slots that no sequence fills."""
    offsets = torch.tensor([0, 0, 1, 63, 64, 65, 130, 130], dtype=index)
    inputs = draw(150, cu_seqlens=offsets, initial_state=draw_states(7, dtype=dtype))
    d_final = draw_states(7, dtype=dtype, seed=9)
    got = walk(make_case(inputs, d_final))
    for empty in (0, 6):
        if "d_h0" in got:
            assert torch.equal(got["d_h0"][empty], d_final[empty])
        else:
            assert inputs.initial_state is not None
            assert torch.equal(got["ht"][empty], inputs.initial_state[empty])


def test_an_empty_sequence_without_a_final_gradient(emulated: list[str]) -> None:
    offsets = torch.tensor([0, 0, 3], dtype=torch.int32)
    inputs = draw(3, cu_seqlens=offsets, initial_state=draw_states(2, dtype=torch.bfloat16))
    assert not walk_back(make_case(inputs))["d_h0"][0].any()


@pytest.mark.parametrize("flag", [0, FLAGS["NONZERO_BETA"]])
@WALKS
def test_betas_of_zero(emulated: list[str], walk: Walk, flag: int) -> None:
    inputs = draw(150, gate="slow", initial_state=draw_states(1))
    inputs.beta[:, ::3] = 0.0
    walk(make_case(inputs, draw_states(1, seed=6), flag, **options_of("slow")))


@WALKS
def test_after_the_launch_that_makes_records(emulated: list[str], walk: Walk) -> None:
    """Betas of zero among them."""
    offsets = torch.tensor([0, 70, 70, 150])
    inputs = draw(150, gate="slow", cu_seqlens=offsets, initial_state=draw_states(3))
    inputs.beta[:, ::3] = 0.0
    case = make_case(inputs, draw_states(3, seed=6), FLAGS["NONZERO_BETA"], **options_of("slow"))
    r, made = case.request, torch.full_like(case.records, 255)
    names = ("q", "k", "g", "beta", "cu_seqlens")
    arrays = {"records": made} | {name: getattr(inputs, name) for name in names}
    launch_kernel(
        records_kernel(), chunk_slots(r) * r.H, inputs.q, arrays, **numbers_of(r, FLAGS["NONZERO_BETA"])
    )
    want, got = model.records(r, inputs, FLAGS["NONZERO_BETA"]), model.unpack_records(made)
    where = filled(r, inputs)
    for name, x in want.items():
        assert worst(got[name], x, where) < (3e-3 if name in model.MATRICES else 1e-5), name
    walk(case._replace(records=made))


# --- bits ------------------------------------------------------------------------------------------------------------


def bits_case() -> Case:
    return make_case(draw(270, initial_state=draw_states(1)), draw_states(1, seed=6))


@pytest.mark.first_cases(1)
@WALKS
def test_same_bits_in_any_order(emulated: list[str], monkeypatch: pytest.MonkeyPatch, walk: Walk) -> None:
    """Of threads and copies, where one warp falls behind all others, and however blocks share a state."""
    case, found = bits_case(), []
    for warpgroups, starved in ((1, (0, 3, 4, 7)), (2, (0, 5, 8, 11))):
        for _ in in_each_order(monkeypatch, starved):
            found.append(walk(case, warpgroups))
    assert all(same(x, found[0]) for x in found)


@pytest.mark.first_cases(1)
@WARPGROUPS
def test_kept_and_recomputed_bits_are_the_same(emulated: list[str], warpgroups: int) -> None:
    """And outputs those of the walk that keeps nothing; the reverse walk those of a launch of its own."""
    case = bits_case()
    kept, recomputed = walk_keeping(case, warpgroups), walk_back_with_states(case, warpgroups)
    assert same(kept, recomputed, "u", "states")
    assert same(kept, walk_keeping(case, warpgroups, keeps=False), "o", "ht")
    assert same(recomputed, walk_back(case, warpgroups), "state_grads", "dv", "d_h0")


@WALKS
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_a_pack(emulated: list[str], walk: Walk) -> None:
    inputs = draw(100, B=3, initial_state=draw_states(3))
    tokens = ("q", "k", "v", "g", "beta")
    packed = inputs._replace(
        **{n: getattr(inputs, n).flatten(0, 1)[None] for n in tokens}, cu_seqlens=torch.arange(0, 301, 100)
    )
    first = inputs._replace(**{n: getattr(inputs, n)[:1].contiguous() for n in (*tokens, "initial_state")})
    d_final = draw_states(3, seed=6)
    batch = walk(make_case(inputs, d_final))
    alone = walk(make_case(first, d_final[:1]))
    pack = walk(make_case(packed, d_final))
    for name, x in alone.items():
        if name in ("o", "dv"):
            others = (y[name].flatten(0, 1)[:100][None] for y in (batch, pack))
        else:
            others = (y[name][: len(x)] for y in (batch, pack))
        assert all(torch.equal(y[: len(x)], x) for y in others), name


@pytest.mark.exhaustive
@WARPGROUPS
@WALKS
def test_with_an_arrival_for_each_lane(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, walk: Walk, warpgroups: int
) -> None:
    """As racecheck is given the kernels: the same bits."""
    want = walk(bits_case(), warpgroups)
    monkeypatch.setenv(EVERY_LANE, "1")
    assert same(walk(bits_case(), warpgroups), want)


@pytest.mark.gpu
@WARPGROUPS
@WALKS
def test_on_the_device(walk: Walk, warpgroups: int) -> None:
    """More blocks than run at once, and the same bits every time."""
    offsets = torch.tensor([0, 0, 1, 63, 64, 65, 130, 900])
    inputs = draw(910, 8, 16, cu_seqlens=offsets, initial_state=draw_states(7, 16))
    case = make_case(inputs, draw_states(7, 16, seed=6))._replace(device="cuda")
    found = [walk(case, warpgroups) for _ in range(3)]
    assert all(same(x, found[0]) for x in found)


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@WARPGROUPS
@pytest.mark.parametrize("walk", ["reverse", "reverse and states", "keeping"])
def test_products_overlap(walk: str, warpgroups: int) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    if walk == "keeping":
        kernel = walk_kernel(warpgroups, keeps=True)
    else:
        kernel = backward_walk_kernel(warpgroups, with_states=walk != "reverse")
    compiled = compile_kernel(kernel.source, "sm_90a")
    assert compiled.usage().spills <= allowed(kernel.source, "sm_90a")
    assert "serialized" not in compiled.log
    assert "setmaxnreg ignored" not in compiled.log
