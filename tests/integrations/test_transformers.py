"""Models of transformers, unmodified, on kdacore: logits, gradients and tokens of the library's torch path."""

from __future__ import annotations

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
from model_outcomes import NEW, Outcome, assert_equal, forget, imported_anew, modeling, outcome_of, run
from tiny_models import CONFIGURATIONS, build

sys.path.pop(0)

OPS = {"qwen3_next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
KDA = ("chunk_kda", "fused_recurrent_kda")


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
    from kdacore.integrations import transformers_fla_modules

    forget(name)
    before = {hook.function: hook for hook in transformers_fla_modules.status()}
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
    places = {hook.function: hook.place for hook in transformers.hooks}
    assert {places[n] for n in (*KDA, *OPS["qwen3_next"])} == {"fla's registry"}
    parts = {hook.function: hook for hook in transformers.hooks[4:]}
    assert {*parts} == {"causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated"}
    for function, part in parts.items():  # FLA's kernels for them do not run here
        assert part.place.startswith("transformers.models") and part.served == before[function].served
        assert part.declined > before[function].declined
        assert part.reason == "FLA's kernels do not run on cpu"
