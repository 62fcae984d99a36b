"""``chunk_kda`` as servers call it: padded packs, slots that are none, pools; emulated, against the oracle of single
sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from pool_checks import check_pools, pool_of, same_bits
from server_model import Expected

from kdacore.types import ChunkInputs
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
from kdacore_cuda.runtime import device_figures

NAN = float("nan")
MORE = pytest.mark.exhaustive
WAYS = ("portable", "clusters of two", "shared", "clusters of four", "clusters of four, shared", "segments")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels serve the call."""
    name: str = request.param
    cluster = 4 if name.startswith("clusters of four") else 2
    shares = 3 if name.endswith("shared") else 0
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: name == "segments")
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(1))
    if name != "portable":
        monkeypatch.setattr(choice, "cluster_size", lambda *given: cluster)
        monkeypatch.setattr(choice, "resident_clusters", lambda *given: shares)
    return name


def draw(way: str, lengths: tuple[int, ...], padding: int = 0, **more: Any) -> ChunkInputs:
    """A pack of these sequences with ``padding`` rows behind, two value heads."""
    d, K, T = Draw(sum(lengths)), 64 if way == "portable" else 128, sum(lengths) + padding
    return ChunkInputs(
        q=d.normal(1, T, 1, K),
        k=d.normal(1, T, 1, K),
        v=d.normal(1, T, 2, K),
        beta=d.normal(1, T, 2),
        **d.gate("random", 1, T, 2, K),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        **more,
    )


def pool(way: str, P: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return pool_of(P, 64 if way == "portable" else 128, dtype, seed=seed)


def check(inputs: ChunkInputs, **options: Any) -> Expected:
    """Short sequences: the contract's hard-case factor."""
    bounds = (2 * O_BOUND, 2 * STATE_BOUND)
    options = BOUNDED_MODEL | options
    return check_pools(chunk_forward, "chunk_kda", inputs, bounds, options)


def ran(way: str, launched: list[str]) -> None:
    """The kernels meant."""
    if way == "segments":
        assert any(name.startswith("output-") for name in launched)
        return
    cluster = 1 if way == "portable" else 4 if way.startswith("clusters of four") else 2
    assert all(f"-CLUSTER{cluster}-" in name and "SCANNERS" in name for name in launched) or cluster == 1


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [True, pytest.param(False, marks=MORE)])
def test_everything_at_once(emulated: list[str], way: str, v_first: bool) -> None:
    """Two pools of strided rows, sequences without slots, new ones, and rows behind the pack."""
    states, other = pool(way, 8), pool(way, 9, seed=2)
    states[0] = states[6] = other[0] = NAN
    inputs = draw(
        way,
        (70, 0, 17, 65, 1, 33, 0),
        21,
        initial_state=states,
        state_indices=torch.tensor([4, 0, 0, 2, 6, 7, -1]),
        has_initial_state=torch.tensor([True, True, True, True, False, False, False]),
        write_indices=torch.tensor([8, 1, 2, 3, 4, 0, 5], dtype=torch.int32),
        write_pool=other,
    )
    options = {"inplace_state": True, "null_index": 0, "state_v_first": v_first, "output_final_state": True}
    want = check(inputs, **options)
    assert want.written.nonzero()[0].tolist() == [3, 4, 8]
    ran(way, emulated)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=MORE)])
def test_one_pool_in_place(emulated: list[str], way: str, dtype: torch.dtype) -> None:
    """Rows are read and written again, those of empty sequences too; ``out`` is not written behind the pack."""
    indices = torch.tensor([3, 5, -4, 1], dtype=torch.int32)
    inputs = draw(way, (130, 0, 40, 3), 5, initial_state=pool(way, 6, dtype), state_indices=indices)
    out = torch.full(inputs.v.shape, 7.0, dtype=torch.bfloat16)
    want = check(inputs._replace(out=out), inplace_state=True)
    assert want.written.nonzero()[0].tolist() == [1, 3, 5]
    check(inputs, output_final_state=True)  # new final states, zero for padding
    ran(way, emulated)


@pytest.mark.parametrize(
    "lengths",
    [(15, 16, 17, 0, 0), pytest.param((0, 0), marks=MORE), pytest.param((1, 63, 64), marks=MORE)],
)
@pytest.mark.parametrize("gate", ["bounded", pytest.param("unbounded", marks=MORE)])
def test_padded_packs(emulated: list[str], way: str, lengths: tuple[int, ...], gate: str) -> None:
    inputs = draw(way, lengths, 70)
    options = BOUNDED_MODEL if gate == "bounded" else MODEL
    bounds = (2 * O_BOUND, 2 * STATE_BOUND)
    more = options | {"output_final_state": True}
    check_pools(chunk_forward, "chunk_kda", inputs, bounds, more)
    ran(way, emulated)


def test_rows_behind_a_pack_change_no_bit(emulated: list[str], way: str) -> None:
    plain = draw(way, (40, 50))
    longer = draw(way, (40, 50), 77)
    tokens = {name: getattr(longer, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for name, x in tokens.items():
        x.fill_(NAN)
        x[:, :90] = getattr(plain, name)
    longer = longer._replace(**tokens, A_log=plain.A_log, dt_bias=plain.dt_bias)
    got = [
        chunk_forward.forward(request_of("chunk_kda", x, output_final_state=True, **BOUNDED_MODEL), x)
        for x in (plain, longer)
    ]
    assert same_bits(got[0].o, got[1].o[:, :90])
    assert same_bits(got[0].final_state, got[1].final_state)


@pytest.mark.first_cases(2)
def test_batches_with_padding(emulated: list[str], way: str) -> None:
    """Rows of equal length, one of them without a slot."""
    pack = draw(way, (150,))
    tokens = {n: getattr(pack, n).unflatten(1, (3, 50)).flatten(0, 1) for n in ("q", "k", "v", "g", "beta")}
    inputs = pack._replace(**tokens, cu_seqlens=None, initial_state=pool(way, 4))
    indices = torch.tensor([2, -1, 0])
    check(inputs._replace(state_indices=indices), inplace_state=True, output_final_state=True)
    check(inputs._replace(state_indices=indices), null_index=2, output_final_state=True)
    ran(way, emulated)


def test_checkpoints_of_padding_are_zero(emulated: list[str], way: str) -> None:
    inputs = draw(way, (70, 64, 3), initial_state=pool(way, 4), state_indices=torch.tensor([2, -1, 0]))
    options = BOUNDED_MODEL | {"checkpoint_every": 64}
    got = chunk_forward.forward(request_of("chunk_kda", inputs, **options), inputs)
    kept = got.checkpoints
    assert same_bits(kept[0], inputs.initial_state[2])
    assert not kept[2].any()
    assert same_bits(kept[3], inputs.initial_state[0])


def test_outputs_and_pools_that_are_copied(emulated: list[str], way: str) -> None:
    states = pool(way, 3).transpose(2, 3)
    inputs = draw(way, (20, 3), 4, initial_state=states, state_indices=torch.tensor([2, 0]))
    out = torch.full((1, 2, 27, inputs.v.shape[-1]), 7.0, dtype=torch.bfloat16).transpose(1, 2)
    before = states.clone()
    options = BOUNDED_MODEL | {"inplace_state": True, "output_final_state": True}
    given = inputs._replace(out=out)
    got = chunk_forward.forward(request_of("chunk_kda", given, **options), given)
    plain = inputs._replace(initial_state=before.contiguous())
    want = chunk_forward.forward(request_of("chunk_kda", plain, **options), plain)
    assert got.o is out
    assert got.final_state is states
    assert (out[:, 23:] == 7.0).all()
    assert same_bits(out[:, :23], want.o[:, :23])
    assert error(states, want.final_state) == 0.0


CHOSEN = [16, 0, 144, 64, 96, 48, 80, 112, 99, 179, 163, 999, 32]
"""In a pack of 128, 19, 0 and 40 tokens: starts of sequences, of steps of every size, between them; rows without a
slot may have any position."""


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "gate", ["bounded", pytest.param("unbounded", marks=MORE), pytest.param("log", marks=MORE)]
)
@pytest.mark.parametrize("v_first", [False, pytest.param(True, marks=MORE)])
def test_checkpoints_at_chosen_tokens(emulated: list[str], way: str, gate: str, v_first: bool) -> None:
    options = {"bounded": BOUNDED_MODEL, "unbounded": MODEL, "log": {}}[gate]
    lengths = (128, 19, 0, 40)
    inputs = draw(way, lengths, 9)
    if gate == "log":
        d = Draw(3)
        shape = inputs.g.shape
        inputs = inputs._replace(
            **d.gate("spread", 1, *shape[1:]),
            **{name: d.unit(*getattr(inputs, name).shape) for name in ("q", "k")},
            A_log=None,
            dt_bias=None,
            beta=d.uniform(*inputs.beta.shape),
        )
    rows = [7, 8, 9, 10, 11, 12, 13, 14, -1, 15, 16, 0, 17]
    inputs = inputs._replace(
        initial_state=pool(way, 20),
        state_indices=torch.tensor([3, 4, 5, 6]),
        checkpoint_offsets=torch.tensor(CHOSEN),
        checkpoint_indices=torch.tensor(rows, dtype=torch.int32),
    )
    bounds = (2 * O_BOUND, 2 * STATE_BOUND)
    more = options | {"inplace_state": True, "null_index": 0, "state_v_first": v_first}
    want = check_pools(chunk_forward, "chunk_kda", inputs, bounds, more)
    assert want.written.sum() == 4 + 11
    extra = {"portable": "", "segments": "prepare_marked"}.get(way, "checkpoint_tail")
    for name in ("checkpoint_tail", "prepare_marked"):
        assert any(x.startswith(name) for x in emulated) == (name == extra)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=MORE)])
def test_checkpoints_beside_others(emulated: list[str], way: str, dtype: torch.dtype) -> None:
    """Of padding there are none; in another pool, beside those of every block, of strided tokens."""
    inputs = draw(way, (70, 33, 0, 64), 9)
    wide = torch.stack([inputs.k, inputs.v[:, :, :1]], 2).flatten(2, 3)
    inputs = inputs._replace(
        k=wide[:, :, :1],
        initial_state=pool(way, 5, dtype),
        state_indices=torch.tensor([3, -1, 2, 4], dtype=torch.int32),
        has_initial_state=torch.tensor([True, True, True, False]),
        write_pool=pool(way, 9, dtype, seed=4),
        checkpoint_offsets=torch.tensor([48, 70, 86, 103, 119, 151], dtype=torch.int32),
        checkpoint_indices=torch.tensor([0, 1, 5, 6, 7, 8]),
    )
    options = {"inplace_state": True, "checkpoint_every": 64, "output_final_state": True}
    want = check(inputs, **options)
    assert want.written.tolist() == [True, False, True, True, True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=MORE)], ids=str)
def test_checkpoints_with_gates_of_other_types(emulated: list[str], way: str, dtype: torch.dtype) -> None:
    inputs = draw(way, (70,), 3, initial_state=pool(way, 5), state_indices=torch.tensor([1]))
    inputs = inputs._replace(
        g=inputs.g.to(dtype),
        dt_bias=inputs.dt_bias.to(torch.bfloat16),
        checkpoint_offsets=torch.tensor([16, 48]),
        checkpoint_indices=torch.tensor([3, 4]),
    )
    check(inputs, inplace_state=True)


def test_checkpoints_do_not_change_a_bit(emulated: list[str], way: str) -> None:
    inputs = draw(way, (150, 40), initial_state=pool(way, 9), state_indices=torch.tensor([3, 1]))
    options = BOUNDED_MODEL | {"inplace_state": True}
    before = inputs.initial_state.clone()
    first = chunk_forward.forward(request_of("chunk_kda", inputs, **options), inputs).o
    pool_after = inputs.initial_state.clone()
    inputs.initial_state.copy_(before)
    marked = inputs._replace(
        checkpoint_offsets=torch.tensor([96, 16, 150]), checkpoint_indices=torch.tensor([5, 6, 7])
    )
    second = chunk_forward.forward(request_of("chunk_kda", marked, **options), marked).o
    assert same_bits(first, second)
    assert same_bits(inputs.initial_state[:5], pool_after[:5])
    assert same_bits(inputs.initial_state[7], before[1])


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=MORE)])
def test_checkpoints_of_one_row_in_a_pool_that_begins_anywhere(
    emulated: list[str], way: str, dtype: torch.dtype, v_first: bool
) -> None:
    """Without offsets of sequences; the pool's first element is not aligned to more than itself."""
    inputs = draw(way, (100,))
    K = inputs.q.shape[-1]
    memory = torch.zeros(9 * (2 * K * K + 3) + 1, dtype=dtype)
    states = memory.as_strided((9, 2, K, K), (2 * K * K + 3, K * K, K, 1), 1)
    states.copy_(pool(way, 9, dtype))
    inputs = inputs._replace(
        cu_seqlens=None,
        initial_state=states,
        state_indices=torch.tensor([1]),
        checkpoint_offsets=torch.tensor([16, 48, 64, 80, 0]),
        checkpoint_indices=torch.tensor([3, 4, 5, 7, 8]),
    )
    want = check(inputs, inplace_state=True, state_v_first=v_first)
    assert want.written.sum() == 6


@pytest.mark.parametrize("way", ["segments"], indirect=True)
@pytest.mark.parametrize("gate", ["bounded", pytest.param("unbounded", marks=MORE)])
@pytest.mark.parametrize("segment_chunks", [1, 3])
def test_checkpoints_in_segments_have_the_bits_of_a_call_that_ends_there(
    emulated: list[str], way: str, gate: str, segment_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several inside one chunk, more of them than stages of the ring, and where chunks and segments begin."""
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(segment_chunks))
    options = {"bounded": BOUNDED_MODEL, "unbounded": MODEL}[gate] | {"inplace_state": True}
    inputs = draw(way, (150,), initial_state=pool(way, 9), state_indices=torch.tensor([3]))
    start, ends = inputs.initial_state[3:4].clone(), [48, 16, 80, 64, 32, 112, 128, 144]
    rows = [0, 1, 2, 4, 5, 6, 7, 8]
    marked = inputs._replace(
        checkpoint_offsets=torch.tensor(ends), checkpoint_indices=torch.tensor(rows, dtype=torch.int32)
    )
    chunk_forward.forward(request_of("chunk_kda", marked, **options), marked)
    ran(way, emulated)
    for end, row in zip(ends, rows, strict=True):
        tokens = {name: getattr(inputs, name)[:, :end] for name in ("q", "k", "v", "g", "beta")}
        short = inputs._replace(
            **tokens,
            cu_seqlens=torch.tensor([0, end], dtype=torch.int32),
            initial_state=start,
            state_indices=None,
        )
        plain = options | {"inplace_state": False, "output_final_state": True}
        got = chunk_forward.forward(request_of("chunk_kda", short, **plain), short)
        assert same_bits(marked.initial_state[row], got.final_state[0]), end
