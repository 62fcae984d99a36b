"""Checkpoints of ``chunk_gated_delta_rule`` at chosen tokens, emulated on the CPU: against the model of servers, in
every way that a call is launched."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from cuda_calls import MODEL, error, request_of
from gated_delta_calls import OP, TOKENS, check_servers, choose_records, draw, names_of, pack
from gated_delta_calls import WAYS as WAYS_OF_RECORDS
from jax_calls import arrays_of, check, from_torch, function, ints
from jax_emulation import Device
from pool_checks import pool_of, same_bits

from kdacore.types import ChunkInputs
from kdacore_cuda import gated_delta_variant, unsupported_calls
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import kernels, launches, segments
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
MORE = pytest.mark.exhaustive
TO = "walk_to_checkpoints"
WAYS = {
    "half a state a block": ["chunk_records", "walk_records", TO],
    "a whole state a block": ["chunk_records", "walk_records", TO],
    "beside": [*WAYS_OF_RECORDS["beside"], TO],
    "segments": ["chunk_records", "walk_first_segments", "chain", "walk_later_segments", TO],
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of a call."""
    name = request.param
    if name == "segments":
        lengths = SegmentLengths(1, 0, 2, 1, 1, 2, 3)
        monkeypatch.setattr(segments, "choose_lengths", lambda *given: lengths)
    else:
        choose_records(monkeypatch, name)
        count = 2 if name == "a whole state a block" else 1
        monkeypatch.setattr(launches, "walk_warpgroups", lambda *given: count)
    return WAYS[name]


def at(
    inputs: ChunkInputs, offsets: list[int], rows: list[int], dtype: torch.dtype = torch.int32
) -> ChunkInputs:
    return inputs._replace(
        checkpoint_offsets=torch.tensor(offsets, dtype=dtype),
        checkpoint_indices=torch.tensor(rows, dtype=dtype),
    )


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_a_pack(emulated: list[str], way: list[str], v_first: bool, dtype: torch.dtype) -> None:
    """Where chunks and segments begin, inside them, several in one chunk, in the last one; of a sequence without a
    slot and for rows that are none there are none."""
    states = pool_of(20, 128, dtype)
    inputs = pack((300, 0, 70, 40, 16), 9, gate="random", initial_state=states)
    inputs = inputs._replace(
        state_indices=torch.tensor([3, 0, 4, -1, 5]),
        has_initial_state=torch.tensor([True, True, False, True, True]),
    )
    offsets = [0, 16, 48, 64, 80, 112, 128, 192, 208, 288, 300, 348, 364, 386, 410]
    rows = [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 0]
    more = {"inplace_state": True, "null_index": 0, "state_v_first": v_first}
    want = check_servers(at(inputs, offsets, rows), **more)
    assert want.written.nonzero()[0].tolist() == [3, 4, 5, *range(6, 19)]
    assert names_of(emulated)[: len(way)] == way


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), pytest.param((48, 96), marks=MORE)], ids=str)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16], ids=str)
def test_of_one_row_with_other_dims_and_types(
    emulated: list[str], way: list[str], dims: tuple[int, int], of: torch.dtype
) -> None:
    """Without offsets of sequences, beside checkpoints of every block, in another pool."""
    K, V = dims
    inputs = draw(250, 1, 3, gate="random", dims=dims, of=of, initial_state=pool_of(4, K, V=V, HV=3))
    inputs = inputs._replace(
        state_indices=torch.tensor([1], dtype=torch.int32), write_pool=pool_of(9, K, V=V, HV=3, seed=4)
    )
    given = at(inputs, [16, 48, 64, 80, 0, 240], [3, 4, 5, 7, 8, 2], torch.int64)
    options = {"inplace_state": True, "checkpoint_every": 64, "output_final_state": True}
    want = check_servers(given, **options)
    assert want.written.sum() == 7
    assert names_of(emulated)[: len(way)] == way
    assert unsupported_calls.chunk_head_dims(request_of(OP, given, **MODEL, **options)) is None


def test_they_change_no_other_bit(emulated: list[str], way: list[str]) -> None:
    inputs = pack((250, 40), gate="random", initial_state=pool_of(9, 128))
    inputs = inputs._replace(state_indices=torch.tensor([3, 1]))
    before = inputs.initial_state.clone()
    first = forward(inputs).o
    after = inputs.initial_state.clone()
    inputs.initial_state.copy_(before)
    assert same_bits(forward(at(inputs, [96, 16, 266], [5, 6, 7])).o, first)
    assert same_bits(inputs.initial_state[:5], after[:5])


def forward(inputs: ChunkInputs, **options: Any) -> Any:
    r = request_of(OP, inputs, inplace_state=inputs.state_indices is not None, **MODEL, **options)
    return gated_delta.forward(r, inputs)


ENDS, ROWS = [16, 32, 64, 80, 112, 128, 144, 192, 240], [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_states_of_calls_that_end_there(emulated: list[str], way: list[str]) -> None:
    """Closer than bounds ask for: decays may be summed in another order. A call that ends in its first segments is not
    cut; states behind maps have other roundings."""
    close = 3e-3 if "chain" in way else 2e-4
    inputs = pack((250,), gate="random", initial_state=pool_of(10, 128), state_indices=torch.tensor([3]))
    start = inputs.initial_state[3:4].clone()
    forward(at(inputs, ENDS, ROWS))
    for end, row in zip(ENDS, ROWS, strict=True):
        tokens = {n: getattr(inputs, n)[:, :end] for n in TOKENS}
        short = inputs._replace(**tokens, cu_seqlens=None, initial_state=start, state_indices=None)
        want = forward(short, output_final_state=True).final_state[0]
        assert error(inputs.initial_state[row], want.numpy()) < close, end


def test_later_tokens_change_no_bit_of_them(emulated: list[str], way: list[str]) -> None:
    inputs, noise = (
        draw(250, gate="random", seed=seed, initial_state=pool_of(10, 128), state_indices=torch.tensor([3]))
        for seed in (0, 7)
    )
    found = []
    for cut in (250, 144, 100):
        mixed = {n: torch.cat([getattr(inputs, n)[:, :cut], getattr(noise, n)[:, cut:]], 1) for n in TOKENS}
        given = inputs._replace(**mixed, initial_state=pool_of(10, 128))
        forward(at(given, ENDS, ROWS))
        found.append(given.initial_state)
    for end, row in zip(ENDS, ROWS, strict=True):
        assert end > 144 or same_bits(found[1][row], found[0][row]), end
        assert end > 100 or same_bits(found[2][row], found[0][row]), end


def test_from_jax(emulated: list[str], from_jax: Device) -> None:
    """The bits of the same call from torch, by the same launches."""
    inputs = pack((70, 0, 60), 20, initial_state=pool_of(6, 128).contiguous())
    inputs = inputs._replace(
        state_indices=ints(4, 0, -1),
        has_initial_state=torch.tensor([False, True, True]),
        write_indices=ints(2, 5, -1),
    )
    given = at(inputs, [0, 48, 32], [1, 3, -1])
    options = MODEL | {"output_final_state": True, "inplace_state": True}
    got = jax.block_until_ready(jax.jit(function(OP, given, options, {}))(arrays_of(given)))
    names = [x.kernel.entry for x in from_jax.launched]
    emulated.clear()
    check([x for x in got if x is not None], from_torch(gated_delta.forward, OP, given, options))
    assert names == names_of(emulated) and names[-1] == TO


MARKED = gated_delta_variant.Variant(marks=True)
KERNELS = {
    "walk": lambda: kernels.walk_kernel(1, of=MARKED),
    "whole state": lambda: kernels.walk_kernel(2, of=MARKED),
    "beside": lambda: kernels.walk_beside_kernel(MARKED),
    "first": lambda: kernels.first_segments_kernel(MARKED),
    "later": lambda: kernels.later_segments_kernel(MARKED),
    TO: lambda: kernels.to_checkpoints_kernel(MARKED),
}


@pytest.mark.parametrize("name", ["walk", *(pytest.param(x, marks=MORE) for x in [*KERNELS][1:])])
def test_products_overlap(name: str) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(KERNELS[name]().source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
    assert "injected" not in log
