"""``batch_invariant()``: what it asks of backends, where it reaches, and what the backends choose then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import kdacore
from kdacore import ShapeDtype, config
from kdacore.registry import REGISTRY
from kdacore.types import Request, Selection


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDACORE_BATCH_INVARIANT", "1")
    config.refresh()
    yield
    monkeypatch.undo()
    config.refresh()


def call(heads: int = 4, **given: object) -> Selection:
    def spec(*shape: int) -> ShapeDtype:
        return ShapeDtype(shape, "bfloat16", device="cuda", kind="torch", arch="sm_90")

    x = spec(1, 4096, heads, 128)
    return kdacore.explain(
        "chunk_kda", x, x, x, x, spec(1, 4096, heads), safe_gate=True, lower_bound=-5.0, **given
    )


def test_backends_that_do_not_promise_it_are_declined() -> None:
    with kdacore.batch_invariant():
        found = call()
    assert [r.code for r in found.candidate("xla").reasons if r.code == "batch_invariance"]
    assert "batch_invariance" not in [r.code for r in call().candidate("xla").reasons]


def test_every_op_of_every_gpu_backend_promises_it() -> None:
    for name in ("cuda", "triton", "reference"):
        for op, impl in REGISTRY.get(name).backend.ops.items():
            assert impl.batch_invariant, (name, op)


def test_where_it_reaches(everywhere: None) -> None:
    assert call().request.batch_invariant
    assert call(backend="cuda").request.batch_invariant
    with kdacore.use_backend("triton"):
        assert call().request.batch_invariant


def test_preferences_stay_inside_it() -> None:
    with kdacore.use_backend("triton"), kdacore.batch_invariant():
        found = call()
        assert found.request.batch_invariant and found.backend == "triton"
        with kdacore.use_backend("cuda"):
            assert call().request.batch_invariant
    assert not call().request.batch_invariant


def test_eager_calls_are_planned_anew() -> None:
    x, beta = torch.zeros(1, 70, 1, 16), torch.zeros(1, 70, 1)
    with kdacore.record_selections() as ran:
        for _ in range(3):  # the third is recognised by the fast path
            kdacore.chunk_kda(x, x, x, x, beta)
        with kdacore.batch_invariant():
            kdacore.chunk_kda(x, x, x, x, beta)
    assert [s.request.batch_invariant for s in ran] == [False, False, False, True]


def test_a_compiled_graph_keeps_what_it_was_traced_under() -> None:
    x, beta = torch.zeros(1, 70, 1, 16), torch.zeros(1, 70, 1)
    compiled = torch.compile(lambda: kdacore.chunk_kda(x, x, x, x, beta)[0], backend="aot_eager")
    with kdacore.batch_invariant(), kdacore.record_selections() as ran:
        compiled()
    assert ran[0].request.batch_invariant
    with pytest.raises(kdacore.UnsupportedError, match="traced inside batch_invariant"):
        compiled()


def bits_of(request: Request) -> tuple[object, ...]:
    """What the CUDA and Triton backends choose that results depend on."""
    from kdacore_cuda.choice import Figures, use_segments
    from kdacore_cuda.request_encoding import items_for_choice
    from kdacore_triton.chunk_forward_plan import ChunkForwardPlan

    items = items_for_choice(request)
    plan, device = ChunkForwardPlan(request), Figures("sm_90a", 132, lambda cluster: 0, lambda: 4.9e12)
    return (use_segments(items, True, device), *sorted(plan.config.items()))


@pytest.mark.parametrize("heads", [1, 4, 16, 40])
def test_choices_do_not_depend_on_the_batch(heads: int) -> None:
    with kdacore.batch_invariant():
        request = call(heads).request
    many = dataclasses.replace(request, B=64, N=64)
    assert bits_of(request) == bits_of(many)


def test_costs_do_not_count_where_the_batch_must_not() -> None:
    """Costs depend on the batch, and send calls to backends whose bits differ."""
    assert call().candidate("cuda").cost is not None
    with kdacore.batch_invariant():
        found = call()
    assert {c.cost for c in found.candidates} == {None}
    assert found.backend == "cuda" and found.why == "highest rank of those tested on sm_90"


def test_choices_depend_on_the_batch_otherwise() -> None:
    request = call(4).request
    assert bits_of(request) != bits_of(dataclasses.replace(request, B=64, N=64))
