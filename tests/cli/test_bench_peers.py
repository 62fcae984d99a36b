"""Peers of the bench: their calls are adapted right, and where one cannot be timed the row says why."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

from kdacore.bench import arrays as made
from kdacore.bench import contenders, gate, results, runner
from kdacore.bench.cases import PRESETS, Case
from kdacore.bench.clock import Budget
from kdacore.bench.peers import PEERS, Peer, cudnn_frontend, fla, flash_kda
from kdacore.cli import main as cli
from kdacore.machine import versions

torch = pytest.importorskip("torch")

QUICK = Budget(samples=3, seconds=5)
CASE = Case(name="small", B=2, T=40, H=2, dtype="bfloat16")
PACKED = dataclasses.replace(CASE, B=1, T=70, lengths=(3, 1, 66))


def _reference(x: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    import kdacore

    return kdacore.chunk_kda(**x, output_final_state=True, backend="reference", **given)[:2]


IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
}


class FakeFlashKda(types.ModuleType):
    """Writes into the caller's arrays, states value-major, everything fused."""

    @staticmethod
    def fwd(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, out: Any, A_log: Any, dt_bias: Any,
        lower_bound: float, initial_state: Any = None, final_state: Any = None, cu_seqlens: Any = None,
    ) -> None:  # fmt: skip
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, out, final_state))
        assert initial_state is None and final_state.dtype == torch.float32 and dt_bias.ndim == 2
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "scale": scale}
        if cu_seqlens is not None:
            assert cu_seqlens.dtype == torch.int64
            x["cu_seqlens"] = cu_seqlens
        o, state = _reference(x, lower_bound=lower_bound, **IN_KERNEL)
        out.copy_(o)
        final_state.copy_(state.mT)


class FakeCudnnOps(types.ModuleType):
    """Packed tokens with int32 offsets, fused or not as it is asked; gradients only of what is not."""

    @staticmethod
    def kimi_delta_attention(
        q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
        safe_gate: bool = False, gate_lower_bound: Any = None, a_log: Any = None, dt_bias: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert output_final_state and cu_seqlens.dtype == torch.int32 and q.ndim == 3
        assert use_qk_l2norm_in_kernel == use_beta_sigmoid_in_kernel
        x = {n: t[None] for n, t in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()}
        given: dict[str, Any] = {"cu_seqlens": cu_seqlens.long()}
        if use_qk_l2norm_in_kernel:
            given.update(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        if safe_gate:
            given.update(A_log=a_log, dt_bias=dt_bias, lower_bound=gate_lower_bound)
            given.update(safe_gate=True, use_gate_in_kernel=True)
        else:
            assert g.dtype == torch.float32
        assert not (q.requires_grad and use_qk_l2norm_in_kernel)
        o, state = _reference(x, **given)
        return o[0], state.mT


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modules are there, and a CPU will do."""
    monkeypatch.setitem(sys.modules, "flash_kda", FakeFlashKda("flash_kda"))
    for name in ("cudnn", "cudnn.linear_attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    name = "cudnn.linear_attention.ops"
    monkeypatch.setitem(sys.modules, name, FakeCudnnOps(name))
    there = {"flash-kda": "0.0.1", "nvidia-cudnn-frontend": "1.32.0"}
    monkeypatch.setattr(contenders, "version_of", lambda name: there.get(name, ""))
    monkeypatch.setattr(contenders, "_elsewhere", lambda case, device: "")


def _rows(case: Case, **only: Any) -> dict[str, results.Row]:
    found = runner.run_case("test", case, "init", "cpu", ("reference",), QUICK, **only)
    return {row.contender: row for row in found.rows}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "pack"])
def test_an_installed_peer_is_timed(case: Case) -> None:
    rows = _rows(case)
    assert rows["fla-core"].note == "not installed"
    for name in ("flash-kda 0.0.1", "nvidia-cudnn-frontend 1.32.0"):
        row = rows[name]
        assert (row.status, row.note, row.backend) == ("ok", "", name), row
        assert row.seconds is not None and row.error is not None and row.error <= (row.bound or 0)


@pytest.mark.usefixtures("installed")
def test_figures_name_the_peer() -> None:
    found = runner.run_case("test", CASE, "init", "cpu", ("reference",), QUICK)
    names = [figure.name for figure in found.figures]
    assert names == [
        f"small, forward, init: times faster than {name}"
        for name in ("flash-kda 0.0.1", "nvidia-cudnn-frontend 1.32.0")
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("gate_kind", ["sigmoid", "softplus"])
def test_what_cudnn_does_not_fuse_is_in_the_timed_call(gate_kind: Any) -> None:
    training = dataclasses.replace(CASE, phase="training", gate=gate_kind)
    row = _rows(training)["nvidia-cudnn-frontend 1.32.0"]
    assert row.status == "ok" and "by torch in the timed region" in row.note, row
    assert _rows(training)["flash-kda 0.0.1"].status == "skipped"
    if gate_kind == "softplus":
        row = _rows(dataclasses.replace(CASE, gate="softplus"))["nvidia-cudnn-frontend 1.32.0"]
        assert row.status == "ok" and row.note.startswith("gate by torch"), row


@pytest.mark.usefixtures("installed")
def test_a_wrong_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeFlashKda.fwd

    def off(*args: Any, **given: Any) -> None:
        right(*args, **given)
        given["final_state"].mul_(1.05)

    monkeypatch.setattr(FakeFlashKda, "fwd", staticmethod(off))
    row = _rows(CASE, peers=("flash-kda",))["flash-kda 0.0.1"]
    assert (row.status, row.note, row.seconds) == ("wrong", "final_state is off", None)


@pytest.mark.usefixtures("installed")
def test_a_peer_that_cannot_be_imported_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_kda", None)
    row = _rows(CASE, peers=("flash-kda",))["flash-kda 0.0.1"]
    assert row.status == "FAILED" and "flash_kda" in row.note


def test_peers_can_be_chosen() -> None:
    assert [row for row in _rows(CASE, peers=("none",)) if not row.startswith("kdacore")] == []
    assert "fla-core" in " ".join(_rows(CASE, peers=("fla-core",)))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--peer"])


@pytest.mark.parametrize(
    ("peer", "change", "said"),
    [
        (flash_kda.PEER, {"gate": "softplus"}, "bounded gates only"),
        (flash_kda.PEER, {"phase": "training"}, "forward only"),
        (flash_kda.PEER, {"HV": 4}, "no grouped value heads"),
        (flash_kda.PEER, {"K": 64}, "K = V = 128 only"),
        (flash_kda.PEER, {"op": "fused_recurrent_kda", "phase": "decode"}, "has no decode step"),
        (cudnn_frontend.PEER, {"phase": "training", "HV": 4}, "no grouped value heads in its backward"),
        (cudnn_frontend.PEER, {"phase": "training", "disable_recompute": True}, "no choice of what is kept"),
        (cudnn_frontend.PEER, {"V": 64}, "K = V = 128 only"),
        (cudnn_frontend.PEER, {"dtype": "float32"}, "bfloat16 only"),
        (cudnn_frontend.PEER, {"op": "fused_recurrent_kda", "phase": "decode"}, "its in-place decode"),
        (fla.PEER, {}, ""),
    ],
)
def test_a_peer_refuses_what_it_cannot(peer: Peer, change: dict[str, Any], said: str) -> None:
    refusal = peer.refusal(dataclasses.replace(CASE, **change))
    assert refusal.startswith(said) and bool(said) == bool(refusal)


def test_the_forward_table_has_rows_of_every_peer() -> None:
    served = {p.distribution: sum(not p.refusal(c) for c in PRESETS["h200-forward"]) for p in PEERS}
    assert served == {"fla-core": 16, "flash-kda": 13, "nvidia-cudnn-frontend": 16}


def test_results_carry_every_peers_version() -> None:
    assert {peer.distribution for peer in PEERS} <= {row.name for row in versions()}


def test_states_are_compared_value_major() -> None:
    """The gate would notice a state handed over the wrong way round."""
    arrays = made.make(CASE, "init", "cpu")
    o, state = _reference(arrays, **{**IN_KERNEL, "lower_bound": -5.0})
    want = gate.expected(CASE, arrays)
    assert gate.judge(CASE, want, o, state).ok and not gate.judge(CASE, want, o, state.mT).ok
