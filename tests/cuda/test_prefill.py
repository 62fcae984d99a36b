"""The fused prefill kernel, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import MODEL, O_BOUND, SAFE_MODEL, STATE_BOUND, Draw, error, oracle, request_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import prefill


@pytest.fixture(autouse=True, params=[1, 2, 4], ids=lambda c: f"cluster{c}")
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test runs with every cluster size."""
    monkeypatch.setattr(prefill, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(prefill, "cluster_size", lambda K, items, processors, arch: request.param)
    size: int = request.param
    return size


def draw(B: int, T: int, H: int = 1, HV: int = 1, K: int = 64, *, gate: str = "random", seed: int = 0, **more: Any) -> Any:
    d = Draw(seed)
    raw = gate in ("random", "init")
    make = d.normal if raw else d.unit
    fields = {
        "q": make(B, T, H, K),
        "k": make(B, T, H, K),
        "v": d.normal(B, T, HV, K),
        "beta": d.normal(B, T, HV) if raw else d.uniform(B, T, HV),
        **d.gate(gate, B, T, HV, K),
        **more,
    }
    return ChunkInputs(**fields)


def check(inputs: ChunkInputs, loose: float = 1.0, **options: Any) -> Outputs:
    request = request_of("chunk_kda", inputs, **options)
    want = oracle(request, inputs)
    got = prefill.forward(request, inputs)
    assert error(got.o, want.o) < loose * O_BOUND
    for mine, exact in ((got.final_state, want.final_state), (got.checkpoints, want.checkpoints)):
        assert (mine is None) == (exact is None)
        if mine is not None:
            assert error(mine, exact) < loose * STATE_BOUND
    return got


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow", "spread"])
def test_safe_gates(emulated: list[str], K: int, gate: str) -> None:
    options = SAFE_MODEL if gate in ("random", "init") else {"safe_gate": True, "lower_bound": -5.0}
    check(draw(1, 150, K=K, gate=gate), 2.0, output_final_state=True, **options)
    assert "SAFE1" in emulated[0]


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow", "mixed"])
def test_unbounded_gates(emulated: list[str], K: int, gate: str) -> None:
    options = MODEL if gate in ("random", "init") else {}
    check(draw(1, 150, K=K, gate=gate), 2.0, output_final_state=True, **options)
    assert "SAFE0" in emulated[0]
