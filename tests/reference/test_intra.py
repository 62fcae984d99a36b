"""Blocks of ``base`` rows give the results of joining single rows, up to the bound that allows
them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdacore_reference.gate import base_rows
from kdacore_reference.intra import carry_decays, interact
from kdacore_reference.intra_backward import interact_backward

SHAPE = (2, 1, 2, 32, 8)


def chunks(decays: str, dtype: Any, width: int = 8) -> list[np.ndarray]:
    """Rows, columns and decays as :func:`interact` takes them."""
    rng = np.random.default_rng(5)
    n, H, G, C, K = SHAPE
    k, q = (rng.standard_normal((n, H, 1, C, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log = {
        "strong": np.full((n, H, G, C, width), -5.0),
        "mixed": np.where(rng.random((n, H, G, C, width)) < 0.5, -5.0, 0.0),
        "weak": -1e-4 * rng.random((n, H, G, C, width)),
    }[decays]
    beta = rng.random((n, H, G, C, 1))
    return [x.astype(dtype) for x in (np.stack([-k, q], axis=-2), beta * k, np.exp(log))]


@pytest.mark.parametrize("decays", ["strong", "mixed", "weak"])
@pytest.mark.parametrize("width", [8, 1])
@pytest.mark.parametrize("base", [8, 16])
def test_forward(base: int, width: int, decays: str) -> None:
    want = interact(*chunks(decays, np.float64, width))
    got = interact(*chunks(decays, np.float32, width), base)
    for name, x, y in zip(want._fields, got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)
    assert not np.triu(got.qk, 1).any() and not np.triu(got.inverse, 1).any()


@pytest.mark.parametrize("decays", ["strong", "mixed", "weak"])
@pytest.mark.parametrize("width", [8, 1])
@pytest.mark.parametrize("base", [8, 16])
def test_gradients(base: int, width: int, decays: str) -> None:
    """Compared in double precision with single rows; sums over a block cancel, so single precision
    is less exact."""
    n, H, G, C, K = SHAPE
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 2e-5)):
        found = []
        for b, kind in ((1, np.float64), (base, dtype)):
            rng = np.random.default_rng(6)
            shapes = ((n, H, G, C, 2, K), (n, H, G, C, K), (n, H, G, width), (n, H, G, C, 2, C))
            grads = [rng.standard_normal(shape).astype(kind) for shape in shapes]
            kq, columns, decay = chunks(decays, kind, width)
            carried = carry_decays(kq, columns, decay, b)
            found.append(interact_backward(carried, decay, *grads))
        for name, y, x in zip(found[0]._fields, *found, strict=True):
            error = np.abs(x - y).max() / np.abs(y).max()
            assert error < tolerance, (name, dtype, error)


@pytest.mark.parametrize(
    "gate, bound, l2norm, rows",
    [
        ("sigmoid", -5.0, True, 16),
        ("sigmoid", -5.0, False, 8),
        ("sigmoid", -80.0, True, 1),
        ("sigmoid", -0.1, False, 16),
        ("softplus", None, True, 1),
        ("log", None, True, 1),
    ],
)
def test_how_many_rows(gate: str, bound: float | None, l2norm: bool, rows: int) -> None:
    request: Any = SimpleNamespace(op="chunk_kda", gate=gate, lower_bound=bound, qk_l2norm=l2norm)
    assert base_rows(request) == rows
