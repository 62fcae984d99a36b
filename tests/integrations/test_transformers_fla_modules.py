"""FLA's fused convolution and gated norm in models of transformers. Its kernels need a GPU, so on a CPU stand-ins with
their signatures show that they are called with the right arguments; the last test runs FLA's own, on a GPU."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kdacore
from kdacore import config, integrations
from kdacore.integrations import transformers_fla_modules as fla_modules

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file
from hidden_packages import hidden, shown
from model_outcomes import NEW, Outcome, assert_close, assert_equal, forget, imported_anew, modeling, run
from tiny_models import CONFIGURATIONS, build

sys.path.pop(0)

PARTS = (fla_modules.CONVOLUTION, fla_modules.STEP, fla_modules.NORM)


def _activated(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    return {None: lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}[activation](y)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
) -> tuple[torch.Tensor, None]:
    assert residual is initial_state is None and weight is not None
    (taps,) = weight.shape[1:]
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return _activated(y, activation).transpose(1, 2).contiguous(), None


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel walks over the cache as if it was contiguous, and takes one token of each sequence."""
    assert residual is None and weight is not None and cache.is_contiguous() and x.shape[1] == 1
    assert cache.shape[1:] == weight.shape
    cache.copy_(torch.cat([cache[..., 1:], x.transpose(1, 2)], dim=-1))
    y = (cache * weight).sum(-1) + (0 if bias is None else bias)
    return _activated(y, activation)[:, None], cache


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    assert bias is residual is None
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight
    return (y * _activated(g.float(), activation)).to(x.dtype)


STAND_INS = fla_modules.FlaModules(causal_conv1d, causal_conv1d_update, rms_norm_gated)


@pytest.fixture(scope="module", autouse=True)
def without_fla() -> Iterator[None]:
    """The models' other functions are torch's."""
    with hidden("fla"):
        for name in CONFIGURATIONS:
            imported_anew(name)
        yield
    for name in CONFIGURATIONS:
        forget(name)


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fla_modules, "_fla", lambda: STAND_INS)
    monkeypatch.setattr(fla_modules, "_runs_kernels", lambda x: True)
    fla_modules.activate()
    yield
    fla_modules.deactivate()


def counts() -> dict[str, tuple[int, int]]:
    return {hook.function: (hook.served, hook.declined) for hook in fla_modules.status()}


def counted(before: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """Calls of the three parts since then, taken and declined."""
    now = counts()
    return [(now[n][0] - before[n][0], now[n][1] - before[n][1]) for n in PARTS]


_own: dict[str, Outcome] = {}


def own(name: str) -> Outcome:
    """What the model computes by itself."""
    if name not in _own:
        _own[name] = run(name)
    return _own[name]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_and_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wanted = own(name)
    request.getfixturevalue("activated")
    before = counts()
    outcome = run(name)
    # One layer: training and prefill, a step for each token that is fed back, and the norm at each.
    assert counted(before) == [(2, 0), (NEW - 1, 0), (NEW + 1, 0)]
    assert_equal(outcome, wanted)


def test_on_a_cpu_the_models_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = own("kimi_linear")
    monkeypatch.setattr(fla_modules, "_fla", lambda: pytest.fail("FLA's kernels do not run here"))
    fla_modules._replace_in(modeling("kimi_linear"))
    before = counts()
    outcome = run("kimi_linear")
    found, status = counted(before), fla_modules.status()
    fla_modules.deactivate()
    assert found == [(0, 2), (0, NEW - 1), (0, NEW + 1)]
    assert {hook.reason for hook in status} == {"FLA's kernels do not run on cpu"}
    assert torch.equal(outcome.logits, wanted.logits)


def test_a_model_that_is_imported_later(activated: None) -> None:
    fla_modules.deactivate()
    forget("kimi_linear")
    fla_modules.activate()
    imported_anew("kimi_linear")
    before = counts()
    run("kimi_linear")
    assert counted(before) == [(2, 0), (NEW - 1, 0), (NEW + 1, 0)]


def test_switched_off_by_the_environment(activated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = counts()
    monkeypatch.setenv("KDACORE_FLA_MODULES", "0")
    config.refresh()
    assert torch.equal(run("kimi_linear").logits, own("kimi_linear").logits)
    assert counted(before) == [(0, 0)] * 3


def test_deactivating_puts_the_parts_back() -> None:
    module = modeling("qwen3_next")
    parts = module.causal_conv1d_fn, module.causal_conv1d_update, module.Qwen3NextRMSNormGated.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla_modules, "_fla", lambda: STAND_INS)
        fla_modules.activate()
    during = module.causal_conv1d_fn, module.causal_conv1d_update, module.Qwen3NextRMSNormGated.forward
    fla_modules.deactivate()
    after = module.causal_conv1d_fn, module.causal_conv1d_update, module.Qwen3NextRMSNormGated.forward
    assert after == parts and all(x is not y for x, y in zip(during, parts, strict=True))


def test_with_the_package_causal_conv1d_its_kernels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fla_modules.importlib.util.find_spec
    monkeypatch.setattr(
        fla_modules.importlib.util,
        "find_spec",
        lambda n, *a: found("json" if n == "causal_conv1d" else n, *a),
    )
    monkeypatch.setattr(fla_modules, "_fla", lambda: STAND_INS)
    module = modeling("kimi_linear")
    before = module.causal_conv1d_fn
    fla_modules.activate()
    during, status = module.causal_conv1d_fn, {hook.function: hook for hook in fla_modules.status()}
    fla_modules.deactivate()
    assert during is before
    assert status[fla_modules.CONVOLUTION].reason == "the package causal_conv1d computes it"


X, WEIGHT = torch.randn(2, 6, 9), torch.randn(6, 4)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"activation": "gelu"}, "activation 'gelu'"),
        ({"hidden_states": X.double(), "weight": WEIGHT.double()}, "dtype torch.float64"),
        ({"hidden_states": X.as_subclass(type("Own", (torch.Tensor,), {}))}, "a Own"),
        ({"hidden_states": X[..., :0]}, "a tensor without elements"),
    ],
)
def test_convolutions_that_are_left_to_the_model(given: dict[str, Any], reason: str, activated: None) -> None:
    before = counts()
    try:
        y = modeling("kimi_linear").causal_conv1d_fn(**{"hidden_states": X, "weight": WEIGHT, **given})
        assert y.dtype == given.get("hidden_states", X).dtype
    except RuntimeError:  # torch convolves no empty tensors
        assert not given["hidden_states"].numel()
    assert counted(before)[0] == (0, 1) and fla_modules.status()[0].reason == reason


def test_packed_sequences_stay_an_error_of_transformers(activated: None) -> None:
    with pytest.raises(ValueError, match="packed sequences"):
        modeling("qwen3_next").causal_conv1d_fn(X, WEIGHT, seq_idx=torch.zeros(2, 9))
    assert fla_modules.status()[0].reason == "packed sequences"


def test_steps_that_are_left_to_the_model(activated: None) -> None:
    step, x = modeling("kimi_linear").causal_conv1d_update, X[..., :1].contiguous()
    narrow, strided = torch.zeros(2, 6, 3), torch.zeros(2, 4, 6).transpose(1, 2)
    reasons = []
    for state in (narrow, strided):
        wanted = state.clone()
        assert step(x, state, WEIGHT).shape == x.shape and not torch.equal(state, wanted)
        reasons.append(fla_modules.status()[1].reason)
    step(X[..., :2], torch.zeros(2, 6, 4), WEIGHT)
    step(x.clone().requires_grad_(), torch.zeros(2, 6, 4), WEIGHT)
    reasons.append(fla_modules.status()[1].reason)
    assert "[2, 6, 3]" in reasons[0] and "strides" in reasons[1] and reasons[2] == "gradients of a step"


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_and_convolutions_agree(batch: int, activated: None) -> None:
    """Also of one sequence, where FLA takes another branch; the state is the one of transformers."""
    module = modeling("kimi_linear")
    x, state = torch.randn(batch, 6, 9), torch.zeros(batch, 6, 4)
    whole = module.causal_conv1d_fn(x, WEIGHT, activation="silu")
    own_state = state.clone()
    for t in range(9):
        y = module.causal_conv1d_update(x[..., t : t + 1], state, WEIGHT, activation="silu")
        wanted = module.causal_conv1d_update.__wrapped__(
            x[..., t : t + 1], own_state, WEIGHT, activation="silu"
        )
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(y[..., 0], whole[..., t])
    assert torch.equal(state, own_state)


def test_a_compiled_norm_is_the_models_own(activated: None) -> None:
    norm = modeling("kimi_linear").KimiLinearRMSNormGated(8)
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    before = counts()
    y = torch.compile(norm, backend="eager", fullgraph=True)(x, gate)
    assert counted(before) == [(0, 0)] * 3
    assert_close(norm(x, gate).detach(), y.detach(), 1e-6)
    assert counted(before)[2] == (1, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", fla_modules.MODELS)
def test_every_model_has_the_parts(name: str, activated: None) -> None:
    """And its norm is the one that FLA computes."""
    forget(name)
    fla_modules.deactivate()
    imported_anew(name)
    fla_modules.activate()
    module, before = modeling(name), counts()
    (norm,) = [x for n, x in vars(module).items() if n.endswith(fla_modules.NORM)]
    made = norm(8)
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    assert_close(made(x, gate).detach(), norm.forward.__wrapped__(made, x, gate).detach(), 1e-6)
    y = module.causal_conv1d_fn(X, WEIGHT, activation="silu")
    assert_close(y, module.causal_conv1d_fn.__wrapped__(X, WEIGHT, activation="silu"), 1e-6)
    module.causal_conv1d_update(X[..., :1].contiguous(), torch.zeros(2, 6, 4), WEIGHT)
    assert counted(before) == [(1, 0)] * 3
    fla_modules.deactivate()
    forget(name)


def test_the_installed_fla_has_these_functions() -> None:
    """Read from its sources, since importing them takes long. Our stand-ins have the first of its parameters."""
    try:
        files = importlib.metadata.files("fla-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-linear-attention is not installed")
    found: dict[str, list[str]] = {}
    for file in files:
        if str(file).startswith("fla/modules/") and file.name in (
            "ops.py",
            "fused_norm_gate.py",
            "causal_conv1d.py",
        ):
            for node in ast.parse(Path(str(file.locate())).read_text()).body:
                if isinstance(node, ast.FunctionDef) and "triton_ascend" not in str(file):
                    found.setdefault(node.name, [a.arg for a in node.args.args])
    for function in STAND_INS:
        names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        assert found[function.__name__][: len(names)] == names


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_flas_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients and a decoded token beside those of the parts in torch."""
    forget(name)
    with shown("fla"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        integrations.activate("transformers")
        imported_anew(name)
        found: list[dict[str, torch.Tensor]] = []
        for switch in ("0", "1"):
            monkeypatch.setenv("KDACORE_FLA_MODULES", switch)
            config.refresh()
            model = build(modeling(name), name).to("cuda", dtype)
            before = counts()
            tokens = torch.randint(
                3, 40, (2, 66), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
            )
            with kdacore.record_selections() as ran:
                out = model(input_ids=tokens, labels=tokens)
                out.loss.backward()
                with torch.no_grad():
                    first = model(input_ids=tokens, use_cache=True)
                    step = model(input_ids=tokens[:, :1], past_key_values=first.past_key_values)
            assert ran and all(s.backend != "reference" for s in ran)
            assert counted(before) == ([(2, 0), (1, 0), (3, 0)] if switch == "1" else [(0, 0)] * 3)
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append({"logits": out.logits.detach(), "step": step.logits, **grads})
        integrations.deactivate()
    imported_anew(name)
    bound = 2e-4 if dtype is torch.float32 else 4e-2
    assert found[0].keys() == found[1].keys()
    for key, wanted in found[0].items():
        assert_close(found[1][key].float(), wanted.float(), bound, key)
