"""Peers of the bench: their calls are adapted right, and where one cannot be timed the row says why."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest

from kdacore.bench import arrays as made
from kdacore.bench import contenders, gate, results, runner
from kdacore.bench.cases import PRESETS, Case
from kdacore.bench.clock import Budget
from kdacore.bench.peers import PEERS, Peer, cudnn_frontend, fla, flash_kda, flash_qla, flashinfer
from kdacore.cli import main as cli
from kdacore.machine import versions

torch = pytest.importorskip("torch")

QUICK = Budget(samples=3, seconds=5)
CASE = Case(name="small", B=2, T=40, H=2, dtype="bfloat16")
PACKED = dataclasses.replace(CASE, B=1, T=70, lengths=(3, 1, 66))
GDN = dataclasses.replace(CASE, op="chunk_gated_delta_rule", HV=4, gate="softplus")
GDN_PACKED = dataclasses.replace(PACKED, op="chunk_gated_delta_rule", HV=4, gate="softplus")
GATED_DELTA = {"op": "chunk_gated_delta_rule", "gate": "softplus"}
GDN_CASES = {
    "batch": GDN,
    "pack": GDN_PACKED,
    "from a state": dataclasses.replace(GDN, initial_state=True),
    "decay given": dataclasses.replace(GDN, gate_inside=False),
}


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


def _gdn(x: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    import kdacore

    given = {**given, "output_final_state": True, "backend": "reference"}
    return kdacore.chunk_gated_delta_rule(**x, **given)[:2]


class FakeFlashQla(types.ModuleType):
    """Its own l2norm; the log decay in float32 and beta are given."""

    @staticmethod
    def chunk_gated_delta_rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
        head_first: bool = False, state_v_first: bool = False, auto_cp: bool = True,
        enable_fwd_cp_cache: bool = True, cp_context: Any = None, force_intra_cp: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert output_final_state and use_qk_l2norm_in_kernel and not state_v_first
        assert g.dtype == torch.float32 and beta.dtype == q.dtype == k.dtype == v.dtype
        assert (g <= 0).all() and ((beta >= 0) & (beta <= 1)).all()
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        x.update({"initial_state": initial_state} if initial_state is not None else {})
        x.update({"cu_seqlens": cu_seqlens} if cu_seqlens is not None else {})
        return _gdn(x, use_qk_l2norm_in_kernel=True)


class FakeFlashInfer(types.ModuleType):
    """Packed tokens, the decay itself and beta in float32, normalised q and k, states value-major."""

    l2norm_works = False

    @classmethod
    def chunk_gated_delta_rule(
        cls, q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, scale: Any = None,
        initial_state: Any = None, output_final_state: bool = False, cu_seqlens: Any = None,
        use_qk_l2norm_in_kernel: bool = False, output: Any = None, output_state: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert output_final_state and cu_seqlens.dtype == torch.int64
        assert all(x.is_contiguous() and x.ndim == 3 for x in (q, k, v))
        assert g.dtype == beta.dtype == torch.float32 and ((g >= 0) & (g <= 1)).all()
        assert use_qk_l2norm_in_kernel == cls.l2norm_works
        x = {n: t[None] for n, t in {"q": q, "k": k, "v": v, "g": g.log(), "beta": beta}.items()}
        if initial_state is not None:
            assert initial_state.is_contiguous()
            x["initial_state"] = initial_state.mT.contiguous()
        x["beta"] = x["beta"].to(q.dtype)
        o, state = _gdn(x, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=cls.l2norm_works)
        return o[0], state.mT


@pytest.fixture
def gdn_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashQLA and FlashInfer are there, without flash-linear-attention, and a CPU will do."""
    monkeypatch.setitem(sys.modules, "flash_qla", FakeFlashQla("flash_qla"))
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", FakeFlashInfer("flashinfer.gdn_prefill"))

    def found(name: str) -> Any:
        return object() if name == flashinfer.OWN_L2NORM and FakeFlashInfer.l2norm_works else None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    there = {"flash-qla": "0.1.3", "flashinfer-python": "0.7.4"}
    monkeypatch.setattr(contenders, "version_of", lambda name: there.get(name, ""))
    monkeypatch.setattr(contenders, "_elsewhere", lambda case, device: "")


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


@pytest.mark.usefixtures("gdn_installed")
@pytest.mark.parametrize("l2norm_works", [False, True])
@pytest.mark.parametrize("case", GDN_CASES.values(), ids=GDN_CASES)
def test_a_peer_of_the_gated_delta_rule_is_timed(
    case: Case, l2norm_works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeFlashInfer, "l2norm_works", l2norm_works)
    rows = _rows(case)
    for name in ("fla-core", "flash-kda", "nvidia-cudnn-frontend"):
        assert rows[name].note == "not installed"
    for name in ("flash-qla 0.1.3", "flashinfer-python 0.7.4"):
        row = rows[name]
        assert (row.status, row.backend) == ("ok", name), row
        assert row.seconds is not None and row.error is not None and row.error <= (row.bound or 0)
    assert ("by torch" in rows["flash-qla 0.1.3"].note) == case.gate_inside
    assert "l2norm" in rows["flashinfer-python 0.7.4"].note


@pytest.mark.usefixtures("gdn_installed")
@pytest.mark.parametrize("gate_inside", [True, False])
def test_training_the_gated_delta_rule(gate_inside: bool) -> None:
    """Gradients pass what torch computes before FlashQLA; FlashInfer has none."""
    rows = _rows(dataclasses.replace(GDN, phase="training", gate_inside=gate_inside))
    assert rows["flash-qla 0.1.3"].status == "ok", rows["flash-qla 0.1.3"]
    row = rows["flashinfer-python 0.7.4"]
    assert (row.status, row.note) == ("skipped", "forward only")


def test_fla_computes_the_gated_delta_rule_with_its_own_kernels() -> None:
    """Not with a backend of its registry, which would be another row."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    with pytest.MonkeyPatch.context() as patch:
        given: list[Any] = []
        patch.setattr(chunk.ChunkGatedDeltaRuleFunction, "apply", lambda *args: given.append(args) or (1, 2))
        patch.setattr("fla.backends.BackendRegistry._get_sorted_backends", lambda self: 1 / 0)
        call = fla.PEER.build(dataclasses.replace(GDN, gate_inside=False))
        assert call(made.make(dataclasses.replace(GDN, gate_inside=False), "init", "cpu")) == (1, 2)
    assert len(given) == 1


@pytest.mark.parametrize(
    ("triton", "tilelang", "capability", "refused"),
    [
        ("3.6.0", "", (9, 0), True),
        ("3.7.1", "", (9, 0), False),
        ("3.6.0", "0.1.15", (9, 0), False),
        ("3.6.0", "", (10, 0), False),
        ("3.6.0", "", None, False),
    ],
)
def test_fla_does_not_train_the_gated_delta_rule_everywhere(
    triton: str, tilelang: str, capability: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"triton": triton, "tilelang": tilelang}
    monkeypatch.setattr(fla, "version_of", there.__getitem__)
    monkeypatch.setattr(fla, "_capability", lambda: capability)
    said = fla.PEER.refusal(dataclasses.replace(GDN, phase="training"))
    assert said == ("refuses to train with Triton 3.6.0 on Hopper without tilelang" if refused else "")
    assert fla.PEER.refusal(GDN) == ""


def test_decays_that_are_given_are_those_of_the_raw_gate() -> None:
    import kdacore

    raw = made.make(GDN, "init", "cpu")
    given = made.make(dataclasses.replace(GDN, gate_inside=False, gate_dtype="bfloat16"), "init", "cpu")
    want = kdacore.kda_gate(raw["g"], A_log=raw["A_log"], dt_bias=raw["dt_bias"], backend="reference")
    assert torch.allclose(given["g"].float(), want, rtol=2**-8)
    assert torch.equal(given["beta"], raw["beta"].double().sigmoid().to(torch.bfloat16))
    assert set(raw) - set(given) == {"A_log", "dt_bias"}


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
        (cudnn_frontend.PEER, {"op": "chunk_gated_delta_rule", "gate": "softplus"}, "timed on Kimi Delta"),
        (flash_kda.PEER, {"op": "chunk_gated_delta_rule"}, "Kimi Delta Attention only"),
        (flash_kda.PEER, {"gate_inside": False}, "raw gates only"),
        (flash_qla.PEER, {}, "the gated delta rule over whole sequences only"),
        (flash_qla.PEER, {**GATED_DELTA, "phase": "graph"}, "not timed in phase graph"),
        (flash_qla.PEER, {**GATED_DELTA, "K": 64}, "K = V = 128 only"),
        (flash_qla.PEER, {**GATED_DELTA, "dtype": "float32"}, "bfloat16 and float16 only"),
        (flash_qla.PEER, {**GATED_DELTA, "disable_recompute": True}, "no choice of what is kept"),
        (flash_qla.PEER, {**GATED_DELTA, "phase": "training", "dtype": "float16"}, ""),
        (flashinfer.PEER, {}, "the gated delta rule over whole sequences only"),
        (flashinfer.PEER, {**GATED_DELTA, "phase": "training"}, "forward only"),
        (flashinfer.PEER, {**GATED_DELTA, "V": 64}, "K = V = 128 only"),
        (flashinfer.PEER, {**GATED_DELTA, "dtype": "float32"}, "bfloat16 and float16 only"),
        (flashinfer.PEER, GATED_DELTA, ""),
        (fla.PEER, {}, ""),
    ],
)
def test_a_peer_refuses_what_it_cannot(peer: Peer, change: dict[str, Any], said: str) -> None:
    refusal = peer.refusal(dataclasses.replace(CASE, **change))
    assert refusal.startswith(said) and bool(said) == bool(refusal)


def test_the_forward_table_has_rows_of_every_peer() -> None:
    assert _served("h200-forward") == {"fla-core": 16, "flash-kda": 13, "nvidia-cudnn-frontend": 16}


def test_the_tables_of_the_gated_delta_rule_have_rows_of_every_peer() -> None:
    every = len(PRESETS["h200-gdn"])
    assert _served("h200-gdn") == {"fla-core": every, "flash-qla": every, "flashinfer-python": every}
    assert _served("h200-gdn-training") == {"fla-core": 8, "flash-qla": 8}


def _served(preset: str) -> dict[str, int]:
    """Cases by peer, those of peers with some alone."""
    served = {p.distribution: sum(not p.refusal(c) for c in PRESETS[preset]) for p in PEERS}
    return {name: count for name, count in served.items() if count}


def test_results_carry_every_peers_version() -> None:
    assert {peer.distribution for peer in PEERS} <= {row.name for row in versions()}


def test_states_are_compared_value_major() -> None:
    """The gate would notice a state handed over the wrong way round."""
    arrays = made.make(CASE, "init", "cpu")
    o, state = _reference(arrays, **{**IN_KERNEL, "lower_bound": -5.0})
    want = gate.expected(CASE, arrays)
    assert gate.judge(CASE, want, o, state).ok and not gate.judge(CASE, want, o, state.mT).ok
