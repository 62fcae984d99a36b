"""Models of transformers, unmodified, on kdacore: logits, gradients and tokens of the library's torch path."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kdacore
from kdacore import integrations

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file
from hidden_packages import hidden, shown
from tiny_models import CONFIGURATIONS, VOCABULARY, build

sys.path.pop(0)

LOGITS, GRADIENTS = 5e-6, 3e-5  # relative errors
TOKENS, PROMPT, NEW = 66, 20, 4
OPS = {"qwen3_next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
KDA = ("chunk_kda", "fused_recurrent_kda")


@dataclasses.dataclass
class Outcome:
    """What one model computed, and which calls of kdacore it made."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    tokens: torch.Tensor
    ran: list[str]


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def imported_anew(name: str) -> None:
    """Import the model's module once more: it looks its functions up while it is imported."""
    forget(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        modeling(name)


def forget(name: str) -> None:
    sys.modules.pop(f"transformers.models.{name}.modeling_{name}", None)


def run(name: str) -> Outcome:
    """Training on a padded batch, and generation with a cache from a padded prompt."""
    return outcome_of(build(modeling(name), name))


def outcome_of(model: Any) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    prompt = {"input_ids": tokens[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}
    with kdacore.record_selections() as ran:
        trained = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        trained.loss.backward()
        with torch.no_grad():
            generated = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ops = [selection.request.op for selection in ran]
    return Outcome(trained.logits.detach(), trained.loss.detach(), gradients, generated, ops)


def assert_equal(got: Outcome, want: Outcome) -> None:
    assert_close(got.logits, want.logits, LOGITS)
    assert_close(got.loss, want.loss, LOGITS)
    assert set(got.gradients) == set(want.gradients)
    for name in want.gradients:
        assert_close(got.gradients[name], want.gradients[name], GRADIENTS, name)
    assert torch.equal(got.tokens, want.tokens)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float, name: str = "") -> None:
    error = (got - want).double().norm() / want.double().norm()
    assert error <= bound, f"{name}: relative error {error:.1e}"


def expected_calls(name: str) -> list[str]:
    """One layer: training, prefill, then one call for each token that is fed back."""
    chunk, recurrent = OPS.get(name, KDA)
    return [chunk, chunk, *[recurrent] * (NEW - 1)]


@pytest.fixture(scope="module", autouse=True)
def without_fla() -> Iterator[None]:
    with hidden("fla"):
        for name in CONFIGURATIONS:
            imported_anew(name)
        yield
    for name in CONFIGURATIONS:
        forget(name)


@pytest.fixture(autouse=True)
def deactivated_afterwards(without_fla: None) -> Iterator[None]:
    """Importing an integration activates it, so the first test that does would leave it active for the others."""
    yield
    integrations.deactivate()


class TorchInFloat64:
    """What a model's module sees as ``torch`` while it is the reference: where the library's torch path converts to
    float32, it converts to float64. In float32 its gradient of A_log is up to 6e-5 off, depending on the CPU."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run_in_float64(name: str) -> Outcome:
    model = build(modeling(name), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling(name), "torch", TorchInFloat64())
        return outcome_of(model)


@pytest.fixture(scope="module")
def on_torch(without_fla: None) -> dict[str, Outcome]:
    """The library's own torch path."""
    outcomes = {name: run_in_float64(name) for name in CONFIGURATIONS}
    assert all(not outcome.ran for outcome in outcomes.values())
    return outcomes


@pytest.fixture
def activated(on_torch: dict[str, Outcome]) -> None:
    integrations.activate("transformers")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_that_was_imported_before(name: str, activated: None, on_torch: dict[str, Outcome]) -> None:
    outcome = run(name)
    assert outcome.ran == expected_calls(name)
    assert_equal(outcome, on_torch[name])


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_a_model_that_is_imported_later(name: str, on_torch: dict[str, Outcome]) -> None:
    forget(name)
    integrations.activate("transformers")
    imported_anew(name)
    outcome = run(name)
    integrations.deactivate("transformers")
    assert outcome.ran == expected_calls(name)
    assert_equal(outcome, on_torch[name])
    assert run(name).ran == []


def test_the_status_counts_the_calls(activated: None) -> None:
    def counts() -> dict[str, int]:
        (status,) = [s for s in integrations.status() if s.name == "transformers"]
        assert status.active and status.host.startswith("transformers 5")
        return {hook.function: hook.served for hook in status.hooks}

    before = counts()
    ran = run("kimi_linear").ran
    after = counts()
    assert {n: after[n] - before[n] for n in after if after[n] != before[n]} == {n: ran.count(n) for n in KDA}


def test_a_call_that_kdacore_declines_is_computed_by_the_model(activated: None) -> None:
    from kdacore.integrations import transformers as integration

    module = modeling("kimi_linear")
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    g, beta = -torch.rand(1, 5, 2, 8), torch.rand(1, 5, 2)
    with kdacore.record_selections() as ran:
        o, _ = module.chunk_kimi_delta_attention(q, k, v.bfloat16(), g=g, beta=beta)
    assert not ran and o.shape == v.shape
    assert "chunk_kda: argument 'v': got dtype bfloat16" in integration.status()[0].reason


def test_a_compiled_model_has_kdacore_in_its_graph(activated: None) -> None:
    module = modeling("kimi_linear")
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    arguments = {"g": -torch.rand(1, 5, 2, 8), "beta": torch.rand(1, 5, 2), "use_cache": False}
    compiled = torch.compile(module.chunk_kimi_delta_attention, backend="eager", fullgraph=True)
    with torch.no_grad():
        with kdacore.record_selections() as ran:
            o, _ = compiled(q, k, v, **arguments)
        assert [selection.request.op for selection in ran] == ["chunk_kda"]
        assert torch.equal(o, module.chunk_kimi_delta_attention(q, k, v, **arguments)[0])


def test_deactivating_puts_the_models_functions_back(on_torch: dict[str, Outcome]) -> None:
    from transformers.integrations import hub_kernels

    module = modeling("kimi_linear")
    before = module.chunk_kimi_delta_attention, hub_kernels.use_kernel_func_from_hub_with_fallback
    integrations.activate("transformers")
    during = module.chunk_kimi_delta_attention, hub_kernels.use_kernel_func_from_hub_with_fallback
    integrations.deactivate("transformers")
    after = module.chunk_kimi_delta_attention, hub_kernels.use_kernel_func_from_hub_with_fallback
    assert after == before and all(x is not y for x, y in zip(during, before, strict=True))
    outcome = run_in_float64("kimi_linear")
    assert outcome.ran == [] and torch.equal(outcome.logits, on_torch["kimi_linear"].logits)


def test_through_fla_the_integration_is_as_active_as_that_of_fla(
    on_torch: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdacore.integrations import transformers as integration

    for reached in (True, False):
        fla = SimpleNamespace(is_active=lambda reached=reached: reached)
        monkeypatch.setitem(sys.modules, "kdacore.integrations.fla", fla)
        monkeypatch.setattr(integration, "_through_fla", True)
        monkeypatch.setattr(integration, "_active", True)
        assert integration.is_active() is reached
        monkeypatch.setattr(integration, "_active", False)
        assert not integration.is_active()


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_through_the_registry_of_fla(name: str, on_torch: dict[str, Outcome]) -> None:
    with shown("fla"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of fla, where there is no GPU
            integrations.activate("transformers")
        imported_anew(name)
        outcome = run(name)
        fla, transformers = (s for s in integrations.status() if s.name in ("fla", "transformers"))
        integrations.deactivate()
    imported_anew(name)
    assert outcome.ran == expected_calls(name)
    assert_equal(outcome, on_torch[name])
    assert fla.active and sum(hook.served for hook in fla.hooks) >= len(outcome.ran)
    assert {hook.place for hook in transformers.hooks} == {"fla's registry"}
