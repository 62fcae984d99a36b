"""flash-linear-attention, unmodified, on kdacore: its layers and functions, on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kdacore
from kdacore import config, integrations
from kdacore.integrations import handover
from kdacore.registry import REGISTRY
from kdacore.types import Device

pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
B, T, H, D = 2, 70, 2, 16
CLOSE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def integration() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of fla, where there is no GPU
        module = importlib.import_module("kdacore.integrations.fla")
        importlib.import_module("fla.layers")
    module.activate()
    yield module
    module.deactivate()


def hook(integration: Any, name: str) -> Any:
    (found,) = [h for h in integration.status() if h.function == name]
    return found


# --- the layers ---------------------------------------------------------------------------------------------------


class GatedNorm(torch.nn.Module):
    """In the place of the layers' own norm, which is a Triton kernel."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:]) * self.activation(gate)


class Cache(dict[int, Any]):
    def update(self, layer_idx: int, offset: int, **state: Any) -> None:  # type: ignore[override]
        self[layer_idx] = state


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    allow_neg_eigval: bool,
    cu_seqlens: torch.Tensor | None,
    lower_bound: float | None = None,
    **flags: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the layers ask for, by flash-linear-attention's own naive reference."""
    from fla.ops.kda.naive import naive_recurrent_kda

    assert all(flags[n] for n in flags if n != "safe_gate")
    if g.dim() == 3:
        g, dt_bias = g.unsqueeze(-1), dt_bias.unsqueeze(-1)
    x = g.float() + dt_bias.view(g.shape[2:])
    rate = A_log.float().exp().unsqueeze(-1)
    log = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    log = log.expand(*g.shape[:3], q.shape[-1])
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    rows = [(b, slice(None)) for b in range(len(q))]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        rows = [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]
    outputs, finals = [], []
    for n, (b, tokens) in enumerate(rows):
        start = None if initial_state is None else initial_state[n : n + 1].transpose(2, 3)
        part = [a[b : b + 1, tokens] for a in (q, k, v, log, beta)]
        o, final = naive_recurrent_kda(*part, initial_state=start, output_final_state=True)
        outputs.append(o)
        finals.append(final.transpose(2, 3))
    o = torch.cat(outputs, dim=0 if cu_seqlens is None else 1)
    return o, torch.cat(finals) if output_final_state else None


LAYERS = {
    "kda": ("kda", "KimiDeltaAttention", {}, ("chunk_kda", "fused_recurrent_kda")),
    "kda bounded": (
        "kda",
        "KimiDeltaAttention",
        {"safe_gate": True, "lower_bound": -5.0, "num_v_heads": 2 * H},
        ("chunk_kda", "fused_recurrent_kda"),
    ),
    "gdn": (
        "gated_deltanet",
        "GatedDeltaNet",
        {"expand_v": 1, "allow_neg_eigval": True, "num_v_heads": 2 * H},
        ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    ),
}


class Layer:
    """A layer of flash-linear-attention, and the same with the naive reference in its attention."""

    def __init__(self, name: str) -> None:
        file, class_name, arguments, self.functions = LAYERS[name]
        self.module = importlib.import_module(f"fla.layers.{file}")
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that short convolutions, which are Triton kernels, are important
            self.layer = getattr(self.module, class_name)(
                hidden_size=32, head_dim=D, num_heads=H, layer_idx=0, use_short_conv=False, **arguments
            )
        self.layer.o_norm = GatedNorm(torch.sigmoid if file == "kda" else F.silu)
        self.ops: list[str] = []

    def __call__(self, x: torch.Tensor, naively: bool, **arguments: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch, kdacore.record_selections() as ran:
            for function in self.functions if naively else ():
                patch.setattr(self.module, function, naive)
            o = self.layer(x, **arguments)[0]
        self.ops = [selection.request.op for selection in ran]
        return o


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float = CLOSE) -> None:
    assert (got - want).norm() <= bound * want.norm()


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


def test_training_on_a_padded_batch(layer: Layer) -> None:
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :9] = 0
    x = torch.randn(B, T, 32, requires_grad=True)

    def gradients(naively: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        layer.layer.zero_grad()
        x.grad = None
        o = layer(x, naively, attention_mask=mask)
        o.square().sum().backward()
        return o, [x.grad, *[p.grad.clone() for p in layer.layer.parameters() if p.grad is not None]]

    o, got = gradients(naively=False)
    assert layer.ops == [layer.functions[0]]
    want_o, want = gradients(naively=True)
    assert layer.ops == []
    assert_close(o, want_o)
    assert len(got) == len(want) > 5
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_training_on_a_pack(layer: Layer) -> None:
    ends = torch.tensor([0, 20, 21, T], dtype=torch.int32)
    x = torch.randn(1, T, 32)
    assert_close(layer(x, False, cu_seqlens=ends), layer(x, True, cu_seqlens=ends))


def test_prefill_then_decode(layer: Layer) -> None:
    layer.layer.eval()
    x = torch.randn(B, T + 3, 32)

    def outputs(naively: bool) -> tuple[list[torch.Tensor], list[str]]:
        cache, found, ops = Cache(), [], []
        for part in (x[:, :T], *[x[:, t : t + 1] for t in range(T, T + 3)]):
            found.append(layer(part, naively, past_key_values=cache, use_cache=True))
            ops += layer.ops
        return found, ops

    with torch.no_grad():
        got, ops = outputs(naively=False)
        want, _ = outputs(naively=True)
    assert ops == [layer.functions[0], *[layer.functions[1]] * 3]
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


# --- the functions ------------------------------------------------------------------------------------------------


@functools.cache
def call() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = {name: torch.randn(B, T, H, D) for name in "qkv"}
    return {**x, "g": -torch.rand(B, T, H, D), "beta": torch.rand(B, T, H)}


def test_every_function_is_hooked(integration: Any) -> None:
    from fla.ops.gated_delta_rule import chunk_gdn, fused_recurrent_gdn
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.gate import fused_kda_gate

    x = call()
    gdn = {**x, "g": x["g"][..., 0]}
    before = {h.function: h.served for h in integration.status()}
    pairs = [
        (chunk_kda(*x.values()), kdacore.chunk_kda(**x)),
        (fused_recurrent_kda(*x.values()), kdacore.fused_recurrent_kda(**x)),
        (chunk_gdn(*gdn.values()), kdacore.chunk_gated_delta_rule(**gdn)),
        (fused_recurrent_gdn(**gdn), kdacore.fused_recurrent_gated_delta_rule(**gdn)),
        ((fused_kda_gate(x["g"], torch.zeros(H)),), (kdacore.kda_gate(x["g"], A_log=torch.zeros(H)),)),
    ]
    for got, want in pairs:
        assert torch.equal(got[0], want[0])
    assert {h.function: h.served - before[h.function] for h in integration.status()} == dict.fromkeys(
        before, 1
    )
    assert all(h.place for h in integration.status())


def test_the_recurrent_gated_delta_rule_has_a_backward(integration: Any) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    x = {n: a[:, :5].clone().requires_grad_() for n, a in call().items()}
    fused_recurrent_gated_delta_rule(**{**x, "g": x["g"][..., 0]})[0].sum().backward()
    assert x["q"].grad is not None


def test_the_recurrent_gated_delta_rule_can_be_compiled(integration: Any) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    x = {n: a[:, :5] for n, a in call().items()}
    x["g"] = x["g"][..., 0]
    compiled = torch.compile(fused_recurrent_gated_delta_rule, backend="eager", fullgraph=True)
    with torch.no_grad():
        want = kdacore.fused_recurrent_gated_delta_rule(**x)[0]
        assert torch.equal(compiled(**x)[0], want)


class ComputedByFlaError(Exception):
    """flash-linear-attention has come to its own kernels."""


def _own(*_: Any, **__: Any) -> None:
    raise ComputedByFlaError


def test_half_precision_v_beside_float32_q_and_k(integration: Any) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    x = {n: torch.rand(1, 5, H, D) for n in "qkv"}
    g, beta = -torch.rand(1, 5, H, D), torch.rand(1, 5, H)
    for function, decay in ((fused_recurrent_kda, g), (fused_recurrent_gated_delta_rule, g[..., 0])):
        with kdacore.record_selections() as ran:
            o, _ = function(**{**x, "v": x["v"].half()}, g=decay, beta=beta)
        want, _ = function(**{**x, "v": x["v"].half().float()}, g=decay, beta=beta)
        assert len(ran) == 1 and torch.equal(o, want.half())


def test_a_call_that_is_declined_gets_kdacores_reason(
    integration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fla.ops.kda import chunk

    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", _own)
    before = hook(integration, "chunk_kda").declined
    for _ in range(4):  # a call seen before is declined as the first is
        with pytest.raises(ComputedByFlaError):
            chunk.chunk_kda(**{**call(), "v": call()["v"].bfloat16()})
    found = hook(integration, "chunk_kda")
    assert found.declined == before + 4
    assert found.reason == "chunk_kda: argument 'v': got dtype bfloat16; wanted dtype float32, as q has"
    for given, reason in (
        ({"unheard_of": 1}, "unexpected keyword argument 'unheard_of'"),
        ({"chunk_size": 48}, "'chunk_size': got 48"),
        ({"chunk_size": 48, "scale": []}, "'chunk_size': got 48"),
        ({"scale": []}, "'scale': got list []"),
    ):
        with pytest.raises((ComputedByFlaError, ValueError)):
            chunk.chunk_kda(**call(), **given)
        assert reason in hook(integration, "chunk_kda").reason


def test_calls_seen_before_are_recognised_before_they_are_translated(
    integration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = integration._HANDOVERS["chunk_kda"]
    x = {n: a[:, :33] for n, a in call().items()}
    for _ in range(4):
        assert handed.verdict((), x) == (True, None)

    def untouched(**_: Any) -> None:
        raise AssertionError("translated again")

    monkeypatch.setattr(handed, "translate", untouched)
    assert handed.verdict((), {n: a.clone() for n, a in x.items()}) == (True, None)
    for other in ({"scale": 0.5}, {"g": x["g"].bfloat16()}, {"q": x["q"][:, :3]}):
        with pytest.raises(AssertionError, match="translated again"):
            handed.verdict((), {**x, **other})
    with kdacore.use_backend("reference"), pytest.raises(AssertionError, match="translated again"):
        handed.verdict((), x)
    REGISTRY.reset()
    with pytest.raises(AssertionError, match="translated again"):
        handed.verdict((), x)


def test_on_an_accelerator_the_reference_is_no_reason_to_take_a_call() -> None:
    cuda = Device("cuda", 0, "sm_90")
    shape = kdacore.ShapeDtype((1, 64, 2, 16), kind="torch")
    selection = kdacore.explain("chunk_kda", *[shape] * 4, kdacore.ShapeDtype((1, 64, 2), kind="torch"))
    assert selection.backend == "reference" and not handover.left_to_the_reference(selection)
    there = dataclasses.replace(selection, request=dataclasses.replace(selection.request, device=cuda))
    assert handover.left_to_the_reference(there)
    assert (
        "only kdacore's slow reference backend would serve this call on cuda"
        in handover._why_the_reference(there)
    )
    assert not handover.left_to_the_reference(dataclasses.replace(there, backend="triton"))
    asked_for = dataclasses.replace(there, why="preferred by use_backend")
    assert not handover.left_to_the_reference(asked_for)
    invariant = dataclasses.replace(there, request=dataclasses.replace(there.request, batch_invariant=True))
    assert not handover.left_to_the_reference(invariant)


def test_no_committed_record_has_fla_faster() -> None:
    """The integration declines no call in favour of flash-linear-attention's own kernels. The day a record says that it
    should, this test does too. (FlashQLA: test_flash_qla.py.)"""
    slower, compared = [], 0
    for path in sorted((ROOT / "benchmarks/results/h200").glob("*.json")):
        record = json.loads(path.read_text())
        rows = record.get("rows", []) if isinstance(record, dict) else []
        timed = [r for r in rows if isinstance(r, dict) and r.get("seconds") and "contender" in r]
        for fla in [r for r in timed if r["contender"].startswith("fla-core")]:
            same = [r for r in timed if r.get("auto") and _case(r) == _case(fla)]
            compared += len(same)
            slower += [(path.name, _case(r)) for r in same if r["seconds"] > fla["seconds"]]
    assert compared > 30 and slower == []


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("preset"), row["case"], row["phase"]


# --- switching it off ---------------------------------------------------------------------------------------------


@pytest.fixture
def refreshed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    config.refresh()


def test_by_the_environment(integration: Any, refreshed: pytest.MonkeyPatch) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent
    from fla.ops.kda import chunk

    refreshed.setenv("FLA_KDACORE", "0")
    config.refresh()
    assert not integration.is_active()
    before = integration.status()
    x = {n: a[:, :3] for n, a in call().items()}
    refreshed.setattr(chunk.ChunkKDAFunction, "apply", _own)
    refreshed.setattr(fused_recurrent, "fused_recurrent_gated_delta_rule_fwd", _own)
    with torch.no_grad(), kdacore.record_selections() as ran:
        for function, g in (
            (chunk.chunk_kda, x["g"]),
            (fused_recurrent.fused_recurrent_gated_delta_rule, x["g"][..., 0]),
        ):
            with pytest.raises(ComputedByFlaError):
                function(**{**x, "g": g})
    assert not ran and integration.status() == before


def test_by_the_variable_that_switches_off_every_backend_of_fla(
    integration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration.deactivate()
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.warns(RuntimeWarning, match="asks no backend"):
        integration.activate()
    assert not integration.is_active()
    monkeypatch.undo()
    integration.activate()
    assert integration.is_active()


def test_by_hand(integration: Any) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent

    hooked = fused_recurrent.FusedRecurrentFunction
    integrations.deactivate("fla")
    own = fused_recurrent.FusedRecurrentFunction
    try:
        assert own is not hooked and issubclass(own, torch.autograd.Function)
        assert not integration.is_active()
    finally:
        integrations.activate("fla")
    assert integration.is_active() and fused_recurrent.FusedRecurrentFunction is not own
    assert integrations.status()[0].active
