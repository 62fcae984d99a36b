"""``benchmarks.integrations`` times a model only if kdacore's logits are nearly as exact as the other side's."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import tiny_models
import torch

from benchmarks import integrations


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        (0.012, 0.01, True),
        (0.0125, 0.01, False),
        (0.001, 0.01, True),
        (float("nan"), 0.01, False),
        (0.01, float("nan"), False),
    ],
)
def test_errors_are_compared_with_the_other_sides(ours: float, theirs: float, passes: bool) -> None:
    exact = torch.tensor([3.0, 4.0])
    results = {"kdacore": exact * (1 + ours * 0.999), "fla": exact * (1 + theirs)}
    if not passes:
        with pytest.raises(AssertionError, match="logits"):
            integrations._errors("logits", exact, results)
        return
    found = integrations._errors("logits", exact, results)
    assert found == pytest.approx({"kdacore": ours * 0.999, "fla": theirs}, rel=1e-3)


def test_float32_logits_are_computed_by_the_models_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever library the model has found; its functions are back afterwards, its weights stay bfloat16."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    network = tiny_models.build(module, "kimi_linear")
    x = torch.arange(3, 40)[None]
    with (
        torch.no_grad(),
        integrations._torch_path(module),
    ):  # another test may have brought a library's functions
        expected = network(x).logits
    own = module.chunk_kimi_delta_attention

    def wrong(*_: Any, **__: Any) -> Any:
        raise AssertionError("a library's kernel was called")

    wrong.__wrapped__ = inspect.unwrap(own)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "chunk_kimi_delta_attention", wrong)
    found = integrations._float32_logits(network.bfloat16(), x)
    assert module.chunk_kimi_delta_attention is wrong
    assert next(network.parameters()).dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 2e-2  # the weights' rounding to bfloat16


def test_where_the_other_side_refuses_a_step_the_models_own_functions_are_timed() -> None:
    def refuse() -> None:
        raise RuntimeError("wrong on this GPU")

    def without_memory() -> None:
        raise torch.OutOfMemoryError("no memory")

    sides: list[str] = []
    assert integrations._base(sides.append, refuse) == ("torch", "wrong on this GPU")
    assert integrations._base(sides.append, lambda: None) == ("fla", None)
    with pytest.raises(torch.OutOfMemoryError):
        integrations._base(sides.append, without_memory)
    assert sides == ["fla"] * 3
