"""Decode steps of SGLang's backends computed by kdacore, compared with convolution, recurrence and norm in float64.

Arrays lie as in SGLang: columns of projections, and layers of pools in which windows of Kimi's layers are transposed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_package
import torch
from fake_vllm import close, recurrence
from sglang_package import THEIRS
from torch.nn.functional import conv1d, silu, softplus

import kdacore
from kdacore import integrations
from kdacore.integrations import sglang, sglang_decode_steps

KDA, GDN = "KDAAttnBackend", "GDNAttnBackend"
MODULES = {KDA: "kda_backend", GDN: "gdn_backend"}
KERNELS = {KDA: sglang.KDA_KERNEL, GDN: sglang.GDN_KERNEL}
ROWS = torch.tensor([3, -1, 1], dtype=torch.int32)
K, TAPS, SLOTS, BOUND, EPS = 16, 4, 6, -5.0, 1e-5


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sglang_package.make(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sglang_package.forget()


class Step:
    """One decode step of a layer of a backend, one token of each sequence."""

    def __init__(self, name: str, H: int = 2, HV: int = 2, bounded: bool = True) -> None:
        torch.manual_seed(H + HV)
        self.kda, self.H, self.HV, self.D = name == KDA, H, HV, (2 * H + HV) * K
        kernel = sglang_package.kernel(KERNELS[name])
        module = importlib.import_module(f"sglang.srt.layers.attention.linear.{MODULES[name]}")
        states = torch.randn(2, SLOTS, HV, K, K)  # one layer of two
        windows = torch.randn(2, SLOTS, *((TAPS - 1, self.D) if self.kda else (self.D, TAPS - 1)))
        self.cache = SimpleNamespace(conv=[windows[1]], temporal=states[1], replayssm_d=None)
        self.before = self.windows.clone(), self.cache.temporal.clone()
        self.backend = getattr(module, name)(kernel, SimpleNamespace(mamba_cache_indices=ROWS))
        self.backend.kernel_dispatcher = SimpleNamespace(decode_kernel=kernel)
        self.backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer_id: self.cache)
        gate = HV * K if self.kda else HV
        self.layer = SimpleNamespace(
            layer_id=4,
            conv_weights=torch.randn(self.D, TAPS),
            bias=None,
            activation="silu",
            A_log=torch.rand(1, 1, HV, 1) if self.kda else torch.rand(HV),
            dt_bias=torch.randn(gate),
            lower_bound=BOUND if bounded else None,
        )
        B = len(ROWS)
        self.x = torch.randn(B, self.D + 8)[:, : self.D]
        self.a = torch.randn(B, gate)
        self.b = torch.randn(1, B, HV) if self.kda else torch.randn(B, HV)

    @property
    def windows(self) -> torch.Tensor:
        """``[slots, D, L]``."""
        of_layer: torch.Tensor = self.cache.conv[0]
        return of_layer.transpose(1, 2) if self.kda else of_layer

    def run(self, x: Any = None) -> Any:
        """Calls the method as SGLang does."""
        x = self.x if x is None else x
        return self.backend.forward_decode(
            q=None, k=None, v=None, layer=self.layer, forward_batch="batch", mixed_qkv=x, a=self.a, b=self.b
        )

    def log_decay(self, n: int) -> torch.Tensor:
        g = self.a[n].double().view(1, self.HV, -1) + self.layer.dt_bias.double().view(self.HV, -1)
        rate = self.layer.A_log.double().exp().view(-1, 1)
        if self.kda and self.layer.lower_bound is not None:
            return self.layer.lower_bound * (rate * g).sigmoid()
        return -rate * softplus(g)

    def expected(self, n: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``o [HV, V]`` and the state after the token of sequence n."""
        line = torch.cat([self.before[0][row], self.x[n, :, None]], dim=1).double()
        y = silu(conv1d(line[None], self.layer.conv_weights.double()[:, None], groups=self.D)[0]).T
        q, k, v = y.split([self.H * K, self.H * K, self.HV * K], dim=-1)
        heads = q.unflatten(-1, (self.H, K)), k.unflatten(-1, (self.H, K)), v.unflatten(-1, (self.HV, K))
        beta = self.b.reshape(-1, self.HV)[n, None].double().sigmoid()
        o, after = recurrence(*heads, self.log_decay(n), beta, self.before[1][row])
        return o[0], after

    def check(self, o: torch.Tensor, normalised: Any = lambda o, n: o) -> None:
        assert o.shape == (1, len(ROWS), self.HV, K)
        for n, row in enumerate(ROWS.tolist()):
            if row < 0:
                assert not o[0, n].any()
                continue
            want, after = self.expected(n, row)
            close(o[0, n], normalised(want, n))
            close(self.cache.temporal[row], after)
            moved = torch.cat([self.before[0][row], self.x[n, :, None]], dim=1)[:, 1:]
            assert torch.equal(self.windows[row], moved)
        self.check_left_alone([0, 2, 4, 5])
        batch, windows, states, rows, layer_id = self.backend.tracked
        assert (batch, layer_id) == ("batch", 4)
        assert windows is self.cache.conv[0] and states is self.cache.temporal and rows is ROWS

    def check_left_alone(self, rows: list[int]) -> None:
        for now, before in zip((self.windows, self.cache.temporal), self.before, strict=True):
            assert torch.equal(now[rows], before[rows])


def counts(backend: str) -> tuple[int, int]:
    (found,) = [h for h in sglang.status() if h.function == f"{backend}.forward_decode"]
    return found.served, found.declined


@pytest.mark.parametrize("bounded", [False, True], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("heads", [2, 24])
def test_a_step_of_kimi(package: None, heads: int, bounded: bool) -> None:
    """Convolution and recurrence in one call; the norm is the model's."""
    step, before = Step(KDA, heads, heads, bounded), counts(KDA)
    with kdacore.record_selections() as ran:
        step.check(step.run())
    assert [s.op for s in ran] == ["fused_decode_kda"]
    assert counts(KDA) == (before[0] + 1, before[1])


def test_the_norm_of_kimi_k3_where_its_gate_is_handed_over(package: None) -> None:
    step = Step(KDA)
    gate, weight = torch.randn(len(ROWS), step.HV * K), torch.rand(K) + 0.5
    step.layer._k3_onorm_gate, step.layer._k3_onorm_consumed = gate, False
    step.layer._k3_fused_decode_args = (None,) * 5 + (weight, EPS)

    def normalised(o: torch.Tensor, n: int) -> torch.Tensor:
        normal = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        return normal * gate[n].double().view(step.HV, K).sigmoid()

    step.check(step.run(), normalised)
    assert step.layer._k3_onorm_consumed is True


@pytest.mark.parametrize(("H", "HV"), [(2, 2), (2, 6)])
def test_a_step_of_qwen(package: None, H: int, HV: int) -> None:
    step, before = Step(GDN, H, HV), counts(GDN)
    with kdacore.record_selections() as ran:
        step.check(step.run())
    assert [s.op for s in ran] == ["fused_decode_gated_delta_rule"]
    assert counts(GDN) == (before[0] + 1, before[1])


def test_qwen_hands_both_projections_over(package: None) -> None:
    """As SGLang 0.5.23 does by default: z comes back with the output."""
    step = Step(GDN, 2, 6)
    step.layer.num_v_heads, step.layer.head_v_dim = 6, K
    step.layer.q_dim = step.layer.k_dim = 2 * K
    step.layer.v_dim = 6 * K
    z = torch.randn(len(ROWS), 6 * K)
    ba = torch.cat([step.b, step.a], dim=1)
    with kdacore.record_selections() as ran:
        o, gate = step.run((torch.cat([step.x, z], dim=1), ba))
    assert [s.op for s in ran] == ["fused_decode_gated_delta_rule"]
    step.check(o)
    assert torch.equal(gate, z.view(-1, 6, K)) and gate.is_contiguous()
    assert step.run((step.x, ba)) == THEIRS


def test_bfloat16_with_weights_in_float32(package: None) -> None:
    step = Step(KDA)
    step.x, step.a, step.b = step.x.bfloat16(), step.a.bfloat16(), step.b.bfloat16()
    step.cache.conv = [step.cache.conv[0].bfloat16()]
    before = step.windows.clone()
    o = step.run()
    assert o.dtype == torch.bfloat16
    step.before = before.float(), step.before[1]
    step.x, step.a, step.b = step.x.float(), step.a.float(), step.b.float()
    for n, row in enumerate(ROWS.tolist()):
        if row >= 0:
            want = step.expected(n, row)[0]
            assert float((o[0, n].double() - want).norm() / want.norm()) < 2e-2


@pytest.mark.parametrize("name", [KDA, GDN])
def test_a_traced_step_is_left(package: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is made there, so a call that kdacore cannot serve would fail."""
    step, before = Step(name), counts(name)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert step.run() == THEIRS and counts(name) == before


@pytest.mark.parametrize("name", [KDA, GDN])
def test_other_steps_are_left_to_sglang(package: None, name: str) -> None:
    """With a reason each."""
    step, before = Step(name), counts(name)
    step.cache.replayssm_d = torch.zeros(1)
    assert step.run() == THEIRS
    step.cache.replayssm_d = None
    assert step.run((step.x, step.a, step.b)) == THEIRS
    step.backend.forward_metadata.mamba_cache_indices = ROWS[:2]
    assert step.run() == THEIRS
    step.backend.forward_metadata.mamba_cache_indices = ROWS
    weights, step.layer.conv_weights = step.layer.conv_weights, step.layer.conv_weights.split(step.H * K)
    assert step.run() == THEIRS
    step.layer.conv_weights = weights
    step.backend.kernel_dispatcher.decode_kernel = object()
    assert step.run() == THEIRS
    step.check_left_alone(list(range(SLOTS)))
    assert not hasattr(step.backend, "tracked")
    assert counts(name) == (before[0], before[1] + 5)


def test_a_gate_that_is_not_projected_yet_is_left(package: None) -> None:
    step = Step(KDA)
    step.layer._k3_deferred_f_b = True
    assert step.run() == THEIRS


@pytest.mark.parametrize("name", [KDA, GDN])
def test_a_step_that_kdacore_declines_is_sglangs(package: None, name: str) -> None:
    step, before = Step(name), counts(name)
    rates, step.layer.A_log = step.layer.A_log, torch.rand(step.HV + 1)
    assert step.run() == THEIRS
    step.layer.A_log, gates = rates, step.a
    step.a = step.a[:, :-1]
    assert step.run() == THEIRS
    step.a = gates
    step.cache.conv = [step.cache.conv[0].half()]
    assert step.run() == THEIRS
    assert counts(name) == (before[0], before[1] + 3)
    assert torch.equal(step.cache.temporal, step.before[1])


@pytest.mark.parametrize("name", [KDA, GDN])
def test_sglang_computes_when_inactive(package: None, name: str) -> None:
    step = Step(name)
    sglang.deactivate()
    assert step.run() == THEIRS


def test_another_release_keeps_its_methods(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.5.17", "0.5.23+cu130", "0.5.20.post1"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert not sglang_decode_steps._why_left(SimpleNamespace(forward_decode=None))
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.0")
    with pytest.warns(RuntimeWarning, match=r"0\.5\.17 to 0\.5\.23, and this is 0\.6\.0"):
        step = Step(KDA)
    assert step.run() == THEIRS
    (reason,) = {
        h.reason for i in integrations.status() for h in i.hooks if h.function == f"{KDA}.forward_decode"
    }
    assert "0.6.0" in reason
