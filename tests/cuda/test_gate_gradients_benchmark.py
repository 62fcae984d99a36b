"""The float64 recurrence that the benchmark of the gate's gradients is held against."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_calls import MODEL, request_of

from kdacore.types import ChunkInputs, OutputGrads
from kdacore_reference.oracle import oracle_backward


@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
def test_it_is_the_oracle(kind: str) -> None:
    from benchmarks import gate_gradients

    given, do = gate_gradients.draw(70, "random", torch.bfloat16, 2, "cpu")
    inputs = ChunkInputs(**given)
    request = request_of("chunk_kda", inputs, **MODEL, **gate_gradients.KINDS[kind])
    want = oracle_backward(request, inputs, OutputGrads(do, None))
    got = gate_gradients.exact(given, do, kind)
    for name in gate_gradients.FLOAT32:
        np.testing.assert_allclose(got[name], np.asarray(getattr(want, name)), rtol=1e-9, atol=1e-12)
    apart = gate_gradients.errors({name: 1.01 * x for name, x in got.items()}, got)
    for e in apart.values():
        np.testing.assert_allclose(e, 1e-2)
