"""What the integrations have in common, and the place where flash-linear-attention kept its registry before 0.6."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kdacore
from kdacore import config, integrations
from kdacore.integrations.hooks import Patches

sys.path.insert(0, str(Path(__file__).parent))
from hidden_packages import hidden

sys.path.pop(0)


# --- by name ------------------------------------------------------------------------------------------------------


class Recorder(ModuleType):
    """In the place of an integration."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.calls.append(name) or ()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Recorder]]:
    made = {name: Recorder() for name in config.INTEGRATIONS}
    for name, recorder in made.items():
        monkeypatch.setitem(sys.modules, f"kdacore.integrations.{name}", recorder)
    yield made
    monkeypatch.undo()
    config.refresh()


def test_the_environment_names_what_is_activated(
    recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert integrations.activate() == ()
    monkeypatch.setenv("KDACORE_INTEGRATIONS", " transformers ,")
    config.refresh()
    assert integrations.activate() == ("transformers",)
    assert integrations.activate("fla") == ("fla",)
    integrations.deactivate()
    assert recorders["transformers"].calls == recorders["fla"].calls == ["activate", "deactivate"]
    integrations.deactivate("fla")
    assert recorders["fla"].calls[2:] == ["deactivate"]


def test_names_that_may_be_set_are_those_there_are() -> None:
    assert tuple(status.name for status in integrations.status()) == config.INTEGRATIONS
    for use in (integrations.activate, integrations.deactivate):
        with pytest.raises(
            kdacore.ContractError, match="'flaa'; wanted names out of fla, sglang, transformers, vllm"
        ):
            use("flaa")


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("0.5", "fla.ops.backends"),
        ("0.5.2", "fla.ops.backends"),
        ("0.6rc1", "fla.backends"),
        ("0.6.0", "fla.backends"),
        ("0.10.0", "fla.backends"),
        ("1.0.dev3+g1234", "fla.backends"),
    ],
)
def test_the_place_of_the_registry_by_version(version: str, place: str) -> None:
    assert integrations._HOSTS["fla"].place(version) == place


def test_without_the_host_activating_is_an_import_error() -> None:
    with hidden("fla"), hidden("kdacore.integrations.fla"):
        del sys.modules["kdacore.integrations.fla"]
        with pytest.raises(ImportError, match="fla"):
            importlib.import_module("kdacore.integrations.fla")
        sys.modules.pop("kdacore.integrations.fla", None)
        sys.modules["kdacore.integrations.fla"] = None  # type: ignore[assignment]


def test_status_imports_no_integration() -> None:
    import subprocess

    code = (
        "import sys, kdacore.integrations as i; i.status();"
        "print([m for m in sys.modules if m.split('.')[0] in ('fla', 'torch', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- replaced attributes ------------------------------------------------------------------------------------------


def test_attributes_are_put_back_in_reverse() -> None:
    owner, patches = SimpleNamespace(f=1), Patches()
    patches.replace(owner, "f", lambda original: original + 1)
    patches.replace(owner, "f", lambda original: original * 10)
    assert owner.f == 20
    patches.undo()
    assert owner.f == 1
    patches.undo()
    with pytest.raises(AttributeError):
        patches.replace(owner, "g", lambda original: original)


def test_what_others_have_replaced_since_is_left_with_a_warning() -> None:
    owner, patches = SimpleNamespace(__name__="host", f=1), Patches()
    patches.replace(owner, "f", lambda original: 2)
    owner.f = 3
    with pytest.warns(RuntimeWarning, match=r"host\.f was replaced again"):
        patches.undo()
    assert owner.f == 3


# --- flash-linear-attention before 0.6 ----------------------------------------------------------------------------


class Registry:
    """As much of its registry as one call needs."""

    def __init__(self) -> None:
        self.backends: list[Any] = []

    def register(self, backend: Any) -> None:
        assert type(backend).is_available()
        self.backends.append(backend)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        (backend,) = self.backends
        if type(backend).is_enabled():
            accepted, reason = backend.verify(name, *args, **kwargs)
            return getattr(backend, name)(*args, **kwargs) if accepted else reason
        return "not enabled"


@pytest.fixture
def fla_0_5() -> Iterator[dict[str, ModuleType]]:
    class FusedRecurrentFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any) -> Any:
            raise AssertionError("its own kernel")

    content: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.backends": {"BaseBackend": type("BaseBackend", (), {})},
        "fla.ops.kda": {},
        "fla.ops.kda.backends": {"kda_registry": Registry()},
        "fla.ops.kda.fused_recurrent": {"fused_recurrent_kda_fwd": lambda *_, **__: "its own kernel"},
        "fla.ops.gated_delta_rule": {},
        "fla.ops.gated_delta_rule.backends": {"gdr_registry": Registry()},
        "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": FusedRecurrentFunction},
    }
    integrations.deactivate()
    with hidden("fla"):
        modules = {name: ModuleType(name) for name in content}
        for name, module in modules.items():
            vars(module).update(content[name])
        sys.modules.update(modules)
        integrations.activate("fla")
        yield modules
        integrations.deactivate()
        for name in modules:
            del sys.modules[name]
        sys.modules["fla"] = None  # type: ignore[assignment]


def test_the_registry_before_0_6(fla_0_5: dict[str, ModuleType]) -> None:
    from kdacore.integrations import fla as integration

    kda = fla_0_5["fla.ops.kda.backends"].kda_registry
    gdn = fla_0_5["fla.ops.gated_delta_rule.backends"].gdr_registry
    q, g, beta = torch.randn(1, 5, 2, 16), -torch.rand(1, 5, 2, 16), torch.rand(1, 5, 2)
    want = kdacore.chunk_kda(q, q, q, g, beta)
    assert torch.equal(kda.call("chunk_kda", q, q, q, g, beta)[0], want[0])
    want = kdacore.chunk_gated_delta_rule(q, q, q, g[..., 0], beta)
    assert torch.equal(gdn.call("chunk_gated_delta_rule", q, q, q, g[..., 0], beta=beta)[0], want[0])
    assert "got dtype bfloat16" in kda.call("chunk_kda", q, q, q.bfloat16(), g, beta)
    assert "not their parts" in kda.call("kda_gate_fwd", g)
    recurrent = fla_0_5["fla.ops.kda.fused_recurrent"]
    o, _ = recurrent.fused_recurrent_kda_fwd(q, q, q, g, beta, inplace_final_state=False)
    assert torch.equal(o, kdacore.fused_recurrent_kda(q, q, q, g, beta)[0])
    apply = fla_0_5["fla.ops.gated_delta_rule.fused_recurrent"].FusedRecurrentFunction.apply
    want = kdacore.fused_recurrent_gated_delta_rule(q, q, q, g[..., 0], beta)
    assert torch.equal(apply(q, q, q, g[..., 0], beta, None)[0], want[0])
    with pytest.raises(AssertionError, match="its own kernel"):
        apply(q, q.bfloat16(), q, g[..., 0], beta, None)
    places = {hook.function: hook.place for hook in integration.status()}
    assert places["chunk_kda"] == "fla.ops.backends, registry of kda"
    assert (
        places["fused_recurrent_kda_fwd"] == "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd, replaced"
    )
    integrations.deactivate("fla")
    assert kda.call("chunk_kda", q, q, q, g, beta) == "not enabled"
    assert recurrent.fused_recurrent_kda_fwd(q, q, q, g, beta) == "its own kernel"


def test_importing_the_integration_without_flash_linear_attention_says_so() -> None:
    code = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "fla":
            raise ModuleNotFoundError("No module named 'fla'", name="fla")

sys.meta_path.insert(0, Absent)
import kdacore.integrations.fla
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "is not installed; for calls of your own: from kdacore.compat.fla import" in run.stderr
