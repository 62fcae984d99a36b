"""``chunk_gated_delta_rule`` on Hopper, emulated on the CPU: against the oracle, as servers call it, equal bits."""

from __future__ import annotations

import ctypes
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from cuda_calls import MODEL
from emulated_backend import registered, run_emulated, wide_inference_cases
from gated_delta_calls import (
    NAN,
    OP,
    TOKENS,
    all_same_bits,
    check,
    check_servers,
    draw,
    in_each_order,
    pack,
    run,
    state,
)
from pool_checks import pool_of, same_bits

from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE, gather_headers
from kdacore_cuda.forms.gated_delta import launches
from kdacore_cuda.forms.gated_delta.kernels import records_kernel, walk_kernel
from kdacore_cuda.kernel_parameters import GATED_DELTA
from kdacore_cuda.runtime.kernel import Kernel

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(params=[1, 2], ids=["half a state a block", "a whole state a block"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(launches, "walk_warpgroups", lambda *given: request.param)
    return int(request.param)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.every_other
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 129, 257])
def test_lengths(emulated: list[str], warpgroups: int, T: int) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **MODEL)
    assert [name.split("-")[0] for name in emulated] == ["chunk_records", "walk_records"]


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    check(draw(300, gate=gate, initial_state=state(1, 2)), **options)


def test_bounded_gate_and_negative_eigenvalues(emulated: list[str]) -> None:
    check(draw(140), safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, scale=0.2, **MODEL)


def test_nearly_equal_keys(emulated: list[str]) -> None:
    """The inverse of a chunk's system then has large elements that nearly cancel."""
    inputs = draw(200, gate="fast", initial_state=state(1, 2))
    k = inputs.k[:, :1] + 0.05 * inputs.k
    check(
        inputs._replace(k=k, beta=torch.full_like(inputs.beta, 6.0)), **{**MODEL, "use_gate_in_kernel": False}
    )


@pytest.mark.parametrize("group", [1, 3, 5, 16])
def test_groups_of_value_heads(emulated: list[str], group: int) -> None:
    check(draw(130, 2, 2 * group), **MODEL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gates_and_betas_of_other_types(emulated: list[str], dtype: torch.dtype) -> None:
    inputs = draw(140)
    check(inputs._replace(**{n: getattr(inputs, n).to(dtype) for n in ("g", "beta", "dt_bias")}), **MODEL)


def test_strided_tokens(emulated: list[str]) -> None:
    wide = torch.randn(1, 140, 2, 3 * 128).to(torch.bfloat16)
    check(draw(140, 2, 4)._replace(q=wide[..., :128], k=wide[..., 256:]), **MODEL)


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], warpgroups: int, v_first: bool, dtype: torch.dtype) -> None:
    inputs = draw(200, B=2, initial_state=state(2, 2, dtype=dtype))
    got = check(inputs, checkpoint_every=128 if v_first else 64, state_v_first=v_first, **MODEL)
    assert got.final_state is not None and got.final_state.dtype == dtype


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", ["random", "init"])
def test_the_contract_s_length(emulated: list[str], gate: str) -> None:
    check(draw(2048, gate=gate), 1.0, **MODEL)


# --- as servers call it --------------------------------------------------------------------------------------------


def test_everything_at_once(emulated: list[str], warpgroups: int) -> None:
    """Two pools of strided rows, sequences without slots, new ones, and rows behind the pack."""
    states, other = pool_of(8, 128), pool_of(9, 128, seed=2)
    states[0] = states[6] = other[0] = NAN
    inputs = pack(
        (70, 0, 17, 65, 1, 33, 0),
        21,
        gate="random",
        initial_state=states,
        state_indices=torch.tensor([4, 0, 0, 2, 6, 7, -1]),
        has_initial_state=torch.tensor([True, True, True, True, False, False, False]),
        write_indices=torch.tensor([8, 1, 2, 3, 4, 0, 5], dtype=torch.int32),
        write_pool=other,
    )
    want = check_servers(inputs, inplace_state=True, null_index=0, output_final_state=True)
    assert want.written.nonzero()[0].tolist() == [3, 4, 8]


def test_one_pool_in_place(emulated: list[str]) -> None:
    indices = torch.tensor([3, 5, -4, 1], dtype=torch.int32)
    inputs = pack((130, 0, 40, 3), 5, gate="random", initial_state=pool_of(6, 128), state_indices=indices)
    out = torch.full(inputs.v.shape, 7.0, dtype=torch.bfloat16)
    assert check_servers(inputs._replace(out=out), inplace_state=True).written.nonzero()[0].tolist() == [
        1,
        3,
        5,
    ]
    check_servers(inputs, output_final_state=True)  # new final states, zero for padding


def test_batches_with_padding(emulated: list[str]) -> None:
    inputs = draw(50, B=3, gate="random", initial_state=pool_of(4, 128))
    check_servers(inputs._replace(state_indices=torch.tensor([2, -1, 0])), inplace_state=True)
    check_servers(
        inputs._replace(state_indices=torch.tensor([2, -1, 0])), null_index=2, output_final_state=True
    )


@pytest.mark.parametrize("lengths", [(15, 16, 17, 0, 0), (0, 0), (1, 63, 64)])
def test_padded_packs(emulated: list[str], lengths: tuple[int, ...]) -> None:
    check_servers(pack(lengths, 70, gate="random"), output_final_state=True)


def test_checkpoints_of_packs(emulated: list[str]) -> None:
    offsets = torch.tensor([0, 0, 65, 66, 193, 250])
    check(draw(270, cu_seqlens=offsets, initial_state=state(5, 2)), checkpoint_every=64, **MODEL)


# --- bits ----------------------------------------------------------------------------------------------------------


def test_later_tokens_change_no_bit(emulated: list[str]) -> None:
    """Changed or appended."""
    inputs, noise = draw(270), draw(270, seed=7)
    whole = run(inputs, checkpoint_every=64, **MODEL)
    assert whole.checkpoints is not None
    for cut in (40, 128, 200):
        short = run(
            inputs._replace(**{n: getattr(inputs, n)[:, :cut].contiguous() for n in TOKENS}),
            checkpoint_every=64,
            **MODEL,
        )
        assert short.checkpoints is not None
        assert same_bits(short.o, whole.o[:, :cut])
        assert same_bits(short.checkpoints, whole.checkpoints[:, : -(-cut // 64)])
    mixed = {n: torch.cat([getattr(inputs, n)[:, :200], getattr(noise, n)[:, 200:]], 1) for n in TOKENS}
    assert same_bits(run(inputs._replace(**mixed), **MODEL).o[:, :200], whole.o[:, :200])


def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_a_pack(
    emulated: list[str], monkeypatch: Any
) -> None:
    """Whatever the block that carries its state."""
    batch = draw(100, B=3)
    found = []
    for warpgroups in (1, 2):
        monkeypatch.setattr(launches, "walk_warpgroups", lambda *given, count=warpgroups: count)
        first = batch._replace(**{n: getattr(batch, n)[:1].contiguous() for n in TOKENS})
        tokens = {n: getattr(batch, n).flatten(0, 1)[None] for n in TOKENS}
        packed = batch._replace(**tokens, cu_seqlens=torch.tensor([0, 100, 200, 300]))
        found += [run(x, **MODEL).o.flatten(0, 1)[:100] for x in (first, batch, packed)]
    assert all(same_bits(x, found[0]) for x in found)


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = draw(150, B=2)
    want = run(inputs, **MODEL).o[0]
    for n in TOKENS:
        getattr(inputs, n)[1] = NAN
    assert same_bits(run(inputs, **MODEL).o[0], want)


def test_same_bits_in_any_order(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, warpgroups: int
) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    inputs, found = draw(270), []
    for _ in in_each_order(monkeypatch, (0, 3, 4, 8)):
        found.append(run(inputs, output_final_state=True, **MODEL))
    assert all(all_same_bits(x, found[0]) for x in found)


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, warpgroups: int
) -> None:
    """As racecheck is given the kernels: the same bits."""
    inputs = draw(270)
    want = run(inputs, **MODEL).o
    monkeypatch.setenv(EVERY_LANE, "1")
    assert same_bits(run(inputs, **MODEL).o, want)


# --- records of several units by one block -------------------------------------------------------------------------


@pytest.fixture(params=[1, 3], ids=["one block", "three"])
def record_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(launches, "records_blocks", lambda units, multiprocessors: min(units, request.param))
    return int(request.param)


@pytest.mark.every_other
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_units_one_after_another(emulated: list[str], record_blocks: int, group: int) -> None:
    """Tiles and gates of the next unit come while the last records of a unit are completed."""
    check(draw(300, 2, 2 * group), **MODEL)


def test_units_of_padded_packs(emulated: list[str], record_blocks: int) -> None:
    """Slots without tokens come first, between others and last."""
    check_servers(pack((0, 130, 0, 70, 0), 90, gate="random"), output_final_state=True)


def test_units_in_any_order_of_threads(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, record_blocks: int
) -> None:
    """The same bits, too, where one warp falls behind all others, and as with a block for each unit."""
    inputs, found = draw(200, 1, 3), []
    for _ in in_each_order(monkeypatch, range(8)):
        found.append(run(inputs, output_final_state=True, **MODEL))
    monkeypatch.setattr(launches, "records_blocks", lambda units, multiprocessors: units)
    want = run(inputs, output_final_state=True, **MODEL)
    assert all(all_same_bits(x, want) for x in found)


# --- conformance and the compiler ----------------------------------------------------------------------------------

QUICK = (f"{OP}-causality_append-base", f"{OP}-accuracy-collinear")


def test_some_conformance_cases(emulated: list[str]) -> None:
    with registered(OP):
        cases = [c for c in wide_inference_cases(OP) if c.id.startswith(QUICK)]
        assert len(cases) >= len(QUICK)
        run_emulated(cases, emulated, "walk_records")


@pytest.mark.exhaustive
def test_every_conformance_case(emulated: list[str]) -> None:
    with registered(OP):
        cases = wide_inference_cases(OP)
        assert len(cases) > 60
        run_emulated(cases, emulated, "walk_records")


@pytest.mark.parametrize(
    "kernel", [records_kernel(), walk_kernel(1), walk_kernel(2)], ids=lambda k: k.source.name
)
def test_products_overlap(kernel: Kernel) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(kernel.source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log


_PLACES = """
#define WARPGROUPS 1
#define EVERY_LANE 0
#include "sm90/gated_delta/walk_block.cuh"
static void places(const GatedDeltaParams& p, int* out) {
  for (int i = 0; i < p.N; ++i) {
    const int n = sequence_at(p, i);
    if (!thread_index()) out[i] = n;
  }
}
#pragma GCC visibility push(default)
extern "C" const char* run(GatedDeltaParams p, int* out) {
  return emu::run([&] { places(p, out); }, 1, 1, 32, 16, 0);
}
"""


@pytest.fixture(scope="module")
def places_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("places")
    return ctypes.CDLL(str(emulator.compile_library(_PLACES, gather_headers(_PLACES), [], folder, "places")))


@pytest.mark.parametrize("count", [1, 6, 32, 33])
def test_a_packs_longest_sequences_begin_first(places_library: ctypes.CDLL, count: int) -> None:
    """By their chunks, and as they lie where these are equal or there are more sequences than a warp has lanes."""
    lengths = np.random.default_rng(count).integers(0, 500, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    given = {"cu_seqlens": offsets.ctypes.data, "N": count, "T": int(offsets[-1])}
    struct = type(
        "Params", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_uint64 * (GATED_DELTA.size // 8))]}
    )
    packed = struct.from_buffer_copy(
        GATED_DELTA.packer.pack(*[given.get(n, 0) for n, _ in GATED_DELTA.fields])
    )
    function = places_library.run
    function.argtypes, function.restype = [struct, ctypes.c_void_p], ctypes.c_char_p
    out = np.full(count, -1, np.int32)
    assert function(packed, out.ctypes.data) is None
    order = sorted(range(count), key=lambda n: (-((int(lengths[n]) + 63) // 64), n))
    assert out.tolist() == (order if count <= 32 else list(range(count)))
