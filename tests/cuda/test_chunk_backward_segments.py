"""The backward in segments, emulated on the CPU: each launch against its model, the whole against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda import chunk_backward, chunk_backward_segments
from kdacore_reference.oracle import oracle_backward

BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice that on calls as short as these."""
SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks each, so that few tokens make many."""
    use_segments(monkeypatch, 2)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that a call gets is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def use_segments(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    monkeypatch.setattr(chunk_backward_segments, "chunks_per_segment", lambda items: chunks)


def state(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=dtype)


def check(inputs: ChunkInputs, *, final: bool = True, loose: float = 2.0, **options: Any) -> InputGrads:
    """Run, compare every gradient with the oracle, return what was computed."""
    request = request_of("chunk_kda", inputs, output_final_state=final, **options)
    d = Draw(17)
    do = d.normal(*inputs.v.shape)
    d_final = d.normal(*request.state_shape, dtype=torch.float32) if final else None
    want = oracle_backward(request, inputs, OutputGrads(do, d_final))
    got = chunk_backward.backward(request, inputs, (), OutputGrads(do, d_final))
    errors = {}
    for name in InputGrads._fields:
        mine, exact = getattr(got, name), getattr(want, name)
        assert (mine is None) == (exact is None), name
        if mine is not None:
            errors[name] = error(mine, exact)
    print({k: f"{v:.1e}" for k, v in errors.items()})
    assert all(x < loose * BOUND for x in errors.values()), errors
    return got


@pytest.mark.parametrize("T", [1, 64, 128, 129, 257, 700])
def test_lengths(emulated: list[str], T: int) -> None:
    check(draw(T, B=1 + T % 2, seed=T + 1, initial_state=state(1 + T % 2, 1)), **BOUNDED_MODEL)
    names = [name.split("-")[0] for name in emulated][1:-2]
    assert names == (["segment_maps", "segment_chain", "scan"] if T > 128 else ["scan"])


@pytest.mark.parametrize("chunks", [1, 2, 100])
@pytest.mark.parametrize("options", [SAFE_LOG, {}], ids=["bounded", "unbounded"])
def test_near_collinear_keys(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], chunks: int
) -> None:
    """Gradients of rows that nearly cancel. kg is in one part in the walks that give B'."""
    use_segments(monkeypatch, chunks)
    d = Draw(3)
    inputs = draw(300, gate="slow", initial_state=d.normal(1, 1, 128, 128, dtype=torch.float32))
    keys = d.normal(1, 1, 1, 128, dtype=torch.float32) + 1e-2 * d.normal(1, 300, 1, 128, dtype=torch.float32)
    unit = torch.nn.functional.normalize(keys, dim=-1).to(torch.bfloat16)
    check(inputs._replace(k=unit, beta=torch.full((1, 300, 1), 0.9975)), **options)


@pytest.mark.parametrize("gate", ["init", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    """Slow ones: what a segment hands on is most of the next one's state."""
    options = (BOUNDED_MODEL if gate == "init" else SAFE_LOG) if gate != "mixed" else {}
    check(draw(300, gate=gate, initial_state=state(1, 1)), **options)
