"""The training stages on a GPU: what an emulator cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import O_BOUND, Draw, error
from stages_calls import intra, recompute, stage_request

from kdacore.oracle import stages as exact
from kdacore.types import IntraInputs, RecomputeInputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CHUNK = 64
PACK = (0, 1, 31, 64, 65, 0, 300)
SHAPES = {
    "dense": {"B": 2, "T": 300, "H": 4, "HV": 4},
    "packed": {"lengths": PACK, "H": 4, "HV": 4},
    "grouped": {"B": 1, "T": 300, "H": 2, "HV": 8},
    "packed and grouped": {"lengths": PACK, "H": 2, "HV": 8},
    "many blocks": {"B": 2, "T": 1000, "H": 64, "HV": 64},
    "more blocks": {"B": 2, "T": 1100, "H": 64, "HV": 64},
    "packed, more blocks": {"lengths": PACK, "H": 64, "HV": 192},
    "head dim 64, float16": {"B": 2, "T": 300, "H": 4, "HV": 4, "K": 64, "dtype": torch.float16},
}
"""Of one wave and of several, of up to 16 chunks and heads a multiprocessor and of more, where Hopper has another
kernel without q; the last chunks are not whole."""
EACH = pytest.mark.parametrize("name", SHAPES)
STAGES = pytest.mark.parametrize("stage", ["intra", "w/u", "w/u with q"])


def make(
    B: int = 1, T: int = 0, *, H: int, HV: int, K: int = 128, lengths: tuple[int, ...] = (), seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Inputs of both stages by name, as the stages before them leave them; Akk is what the first stage makes."""
    d, T = Draw(seed, dtype, DEVICE), sum(lengths) or T
    x: dict[str, Any] = {"q": d.unit(B, T, H, K), "k": d.unit(B, T, H, K), "v": d.normal(B, T, HV, K)}
    x["beta"] = d.normal(B, T, HV).sigmoid()
    x["cu_seqlens"] = torch.tensor([0, *lengths], device=DEVICE).cumsum(0) if lengths else None
    steps, gc = -7.2 * d.uniform(B, T, HV, K) ** 3, []
    for sequence in steps.split(list(lengths) or [T], dim=1):
        gc += [chunk.cumsum(1) for chunk in sequence.split(CHUNK, dim=1)]
    x["gc"] = torch.cat(gc, 1)
    x["Akk"] = intra(intra_inputs(x)).Akk
    return x


def intra_inputs(x: dict[str, Any]) -> IntraInputs:
    return IntraInputs(x["q"], x["k"], x["gc"], x["beta"], x["cu_seqlens"])


def recompute_inputs(x: dict[str, Any], with_q: bool) -> RecomputeInputs:
    return RecomputeInputs(
        x["k"], x["v"], x["beta"], x["gc"], x["Akk"], x["q"] if with_q else None, x["cu_seqlens"]
    )


def run(stage: str, x: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the stage returns, by name."""
    got = intra(intra_inputs(x)) if stage == "intra" else recompute(recompute_inputs(x, "q" in stage))
    return {name: y for name, y in got._asdict().items() if y is not None}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(x: dict[str, Any], stop: int) -> dict[str, Any]:
    """The first tokens of a call."""
    return {
        name: y if y is None or name == "cu_seqlens" else y[:, :stop].contiguous() for name, y in x.items()
    }


@pytest.mark.parametrize("name", [name for name in SHAPES if "blocks" not in name])
@STAGES
def test_against_the_oracle(stage: str, name: str) -> None:
    x = make(**SHAPES[name])
    host = {name: None if y is None else y.cpu() for name, y in x.items()}
    if stage == "intra":
        inputs: Any = intra_inputs(host)
        want: Any = exact.oracle_chunk_intra(stage_request("kda_chunk_intra", inputs), inputs)
    else:
        inputs = recompute_inputs(host, "q" in stage)
        want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
    for result, y in run(stage, x).items():
        assert error(y.cpu(), getattr(want, result)) < O_BOUND, result


@EACH
@STAGES
def test_every_call_gives_the_same_bits(stage: str, name: str) -> None:
    x = make(**SHAPES[name])
    first = run(stage, x)
    assert all(y.isfinite().all() for y in first.values())
    assert all(same(run(stage, x), first) for _ in range(200))


@EACH
@STAGES
def test_graph_replay_equals_eager(stage: str, name: str) -> None:
    """On the numbers it was captured with, and on others written over them."""
    x, other = make(**SHAPES[name]), make(**SHAPES[name], seed=1)
    eager, eager_other = run(stage, x), run(stage, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(stage, x)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)
    for key in x.keys() - {"cu_seqlens"}:
        x[key].copy_(other[key])
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager_other)


@pytest.mark.parametrize("name", ["dense", "grouped", "many blocks", "more blocks", "head dim 64, float16"])
@pytest.mark.parametrize("stop", [CHUNK, 4 * CHUNK, 150])
@STAGES
def test_a_longer_call_s_first_chunks_have_the_same_bits(stage: str, stop: int, name: str) -> None:
    x = make(**SHAPES[name])
    whole, short = run(stage, x), run(stage, rows(x, stop))
    for result, y in short.items():
        # kg is taken from the chunk's last row, so a chunk that ends early has another.
        end = stop // CHUNK * CHUNK if result == "kg" else stop
        assert torch.equal(y[:, :end], whole[result][:, :end]), result


@pytest.mark.parametrize("name", ["packed", "packed and grouped", "packed, more blocks"])
@STAGES
def test_sequences_added_to_a_pack_change_no_bit(stage: str, name: str) -> None:
    x = make(**SHAPES[name])
    whole, stop = run(stage, x), sum(PACK[:-1])
    short = rows(x, stop) | {"cu_seqlens": x["cu_seqlens"][: len(PACK)].contiguous()}
    for result, y in run(stage, short).items():
        assert torch.equal(y, whole[result][:, :stop]), result


@pytest.mark.parametrize("name", ["packed", "packed and grouped", "packed, more blocks"])
@STAGES
def test_a_sequence_alone_gives_the_bits_it_gives_packed(stage: str, name: str) -> None:
    x = make(**SHAPES[name])
    whole, start = run(stage, x), sum(PACK[:-1])
    alone = {key: None if key == "cu_seqlens" else y[:, start:].contiguous() for key, y in x.items()}
    for result, y in run(stage, alone).items():
        assert torch.equal(y, whole[result][:, start:]), result


@pytest.mark.parametrize("name", ["grouped", "packed and grouped"])
@STAGES
def test_grouped_heads_equal_repeated_ones(stage: str, name: str) -> None:
    x = make(**SHAPES[name])
    group = x["v"].shape[2] // x["k"].shape[2]
    repeated = x | {key: x[key].repeat_interleave(group, dim=2) for key in ("q", "k")}
    assert same(run(stage, repeated), run(stage, x))
