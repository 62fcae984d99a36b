"""Calls that flash-linear-attention's hook leaves to FlashQLA, by the committed records."""

from __future__ import annotations

import importlib
import json
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kdacore
from kdacore import config
from kdacore.integrations import flash_qla_times
from kdacore.integrations.flash_qla_times import Times, nearest, why_slower
from kdacore.types import Device, Request

pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import flash_qla_times as maker  # noqa: E402

NAME = "chunk_gated_delta_rule"
T, H, HV, D = 70, 1, 2, 128


def times(**changes: Any) -> Times:
    given = {"arch": "sm_90", "phase": "forward", "dtype": "bfloat16", "N": 1, "tokens": 8192, "H": 16, "HV": 32,
             "gates": "init", "kdacore": 2e-3, "flash_qla": 1e-3, "version": "0.1.3",
             "record": "h200/h200-gdn.json"}  # fmt: skip
    return Times(**{**given, **changes})


def request_of(
    call: Times, *, op: str = NAME, K: int = D, packed: bool = False, needs_grad: bool | None = None
) -> Request:
    B, tokens = (1, call.tokens) if packed else (call.N, call.tokens // call.N)
    device = Device("cuda", 0, call.arch)
    grad = call.phase == "training" if needs_grad is None else needs_grad
    return Request(op=op, kind="torch", device=device, B=B, T=tokens, H=call.H, HV=call.HV, K=K, V=D, N=call.N,
                   dtype=call.dtype, state_dtype="float32", needs_grad=grad, packed=packed)  # fmt: skip


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_packaged_table_is_what_the_committed_records_give() -> None:
    assert maker.TABLE.read_text(encoding="utf-8") == maker.table(), (
        "run: python -m benchmarks.flash_qla_times"
    )


def test_the_hook_leaves_what_the_records_show_flash_qla_to_do_faster() -> None:
    """For each measured call, FlashQLA is preferred where it is faster with every set of gates, and only there."""
    for call in flash_qla_times.measured():
        same = [
            m for m in flash_qla_times.measured() if nearest(request_of(call), (m,)) and m.sizes == call.sizes
        ]
        faster = all(m.flash_qla < m.kdacore for m in same)
        assert bool(why_slower(request_of(call))) == faster, call


def row(case: str, contender: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    about = {
        "preset": "h200-gdn-training",
        "phase": "training",
        "gates": "init",
        "shape": f"{case.partition(',')[0]} K128 V128",
        "dtype": "bfloat16",
    }
    return {**about, "case": case, "contender": contender, "seconds": seconds, "auto": False, **more}


GIVEN = "B8 T2048 H16 HV32, decay given"
MACHINE = {"torch": "built for CUDA 13.0; NVIDIA H200 (sm_90, 140 GiB)"}


def written(folder: Path, *rows: dict[str, Any], **record: Any) -> Path:
    (folder / "h200").mkdir()
    record = {"machine": MACHINE, **record, "rows": rows}
    (folder / "h200/h200-gdn-training.json").write_text(json.dumps(record))
    (folder / "h200/a-list.json").write_text("[]")
    return folder


def test_a_table_from_a_record(tmp_path: Path) -> None:
    """Of the cases with the decay given, with the backend that automatic choice takes."""
    folder = written(
        tmp_path,
        row(GIVEN, "flash-qla 0.1.3", 1.23456e-3, run=1),
        row(GIVEN, "kdacore cuda", 2.0e-3, run=0, auto=True),
        row(GIVEN, "kdacore triton", 1.0e-3, run=0),
        row(GIVEN, "fla-core 0.6.0", 4.0e-3, run=0),
        row("B8 T2048 H16 HV32", "flash-qla 0.1.3", 9e-3, run=0),
        row("B1 T8192 H16 HV64, decay given", "flash-qla 0.1.3", None, run=0),
        runs=[{"machine": {}}, {"machine": MACHINE}],
    )
    (call,) = json.loads(maker.table(folder))["calls"]
    record = "h200/h200-gdn-training.json"
    assert Times(**call) == times(phase="training", N=8, tokens=16384, flash_qla=1.235e-3, record=record)


@pytest.mark.parametrize(
    ("rows", "machine", "said"),
    [
        ([row("B0", "flash-qla 0.1.3", 1.0)], MACHINE, "preset h200-gdn-training has no case 'B0'"),
        (
            [row(GIVEN, "flash-qla 0.1.3", 1.0, shape="B2 T16")],
            MACHINE,
            "measured with B2 T16; wanted B8 T2048",
        ),
        ([row(GIVEN, "flash-qla 0.1.3", 1.0)], MACHINE, "no time of the backend that auto takes"),
        ([row(GIVEN, "flash-qla 0.1.3", 1.0), row(GIVEN, "kdacore cuda", 1.0, auto=True)], {}, "which GPU"),
    ],
)
def test_a_record_that_lacks_something_is_named(
    rows: list[dict[str, Any]], machine: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        maker.table(written(tmp_path, *rows, machine=machine))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(maker, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    (tmp_path / "table.json").write_text("{}")
    assert [_main(monkeypatch, *words) for words in (["--check"], [], ["--check"])] == [1, 0, 0]
    assert capsys.readouterr().out.splitlines()[-1] == "table.json: is what the records give"
    monkeypatch.setattr(maker, "table", lambda: maker.json.loads("{"))
    assert _main(monkeypatch) == 1


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["flash_qla_times", *words])
    return maker.main()


# --- the nearest measured call ------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*calls: Times) -> None:
        monkeypatch.setattr(flash_qla_times, "measured", lambda: calls)

    return use


def test_the_reason_names_the_measured_call(table: Any) -> None:
    table(times())
    assert why_slower(request_of(times())) == (
        "FlashQLA 0.1.3 is faster in the nearest measured call: forward of 8192 tokens in 1 sequences, 16 key and 32 "
        "value heads, on sm_90: 1.000 ms, kdacore 2.000 ms (benchmarks/results/h200/h200-gdn.json)"
    )


@pytest.mark.parametrize(
    ("call", "faster"),
    [
        (times(tokens=16384), True),
        (times(tokens=32768), True),
        (times(tokens=32769), False),
        (times(tokens=2047), False),
        (times(H=2, HV=8), False),
        (times(N=2, tokens=16384), True),
        (times(N=8), False),
        (times(tokens=0), False),
        (times(phase="training"), False),
        (times(dtype="float16"), False),
        (times(arch="sm_100"), False),
    ],
)
def test_only_calls_near_a_measured_one_are_judged(call: Times, faster: bool, table: Any) -> None:
    table(times())
    assert bool(why_slower(request_of(call))) == faster


def test_other_calls_are_not_judged(table: Any) -> None:
    table(times())
    assert why_slower(request_of(times(), packed=True))
    assert not why_slower(request_of(times(), op="chunk_kda"))
    assert not why_slower(request_of(times(), K=64))


def test_the_nearest_measured_call_decides(table: Any) -> None:
    few = times(H=2, HV=8, kdacore=1e-4, flash_qla=2e-4)
    table(few, times())
    assert not why_slower(request_of(times(H=4, HV=8)))
    assert why_slower(request_of(times(H=8, HV=32)))
    assert nearest(request_of(times(H=8, HV=32)), (few, times())) == (times(),)


def test_kdacore_is_preferred_where_it_is_faster_with_some_gates(table: Any) -> None:
    table(times(), times(gates="random", kdacore=1e-3))
    assert not why_slower(request_of(times()))
    table(times(), times(gates="random"))
    assert why_slower(request_of(times()))


# --- the hook -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def integration() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of fla, where there is no GPU
        module = importlib.import_module("kdacore.integrations.fla")
    module.activate()
    yield module
    module.deactivate()


class FlashQLA(types.ModuleType):
    """Records that it was called."""

    calls = 0

    def chunk_gated_delta_rule(self, **given: Any) -> tuple[Any, Any]:
        self.calls += 1
        return given["v"], None


@pytest.fixture
def flash_qla(integration: Any, monkeypatch: pytest.MonkeyPatch, table: Any) -> Iterator[FlashQLA]:
    """FlashQLA is installed and usable, on a CPU, and a record has it faster forward."""
    backend = importlib.import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    module = FlashQLA("flash_qla")
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    monkeypatch.setattr(backend.FlashQLABackend, "is_available", classmethod(lambda cls: True))
    monkeypatch.setattr(backend, "IS_NVIDIA_HOPPER", True)
    monkeypatch.setattr("fla.utils.has_usable_nvcc", lambda: True)
    arch = kdacore.explain(NAME, **arguments()).request.device.arch
    table(times(arch=arch, tokens=T, H=H, HV=HV))
    _forget(integration)
    yield module
    monkeypatch.undo()
    config.refresh()
    _forget(integration)


def _forget(integration: Any) -> None:
    integration._flash_qla_is_usable.cache_clear()
    integration._HANDOVERS[NAME].forget()


def arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = {n: torch.randn(1, T, h, D).to(dtype) for n, h in (("q", H), ("k", H), ("v", HV))}
    return {**x, "g": -torch.rand(1, T, HV), "beta": torch.rand(1, T, HV).to(dtype)}


def left(integration: Any, x: dict[str, Any], **options: Any) -> str:
    """Why the call was left to flash-linear-attention; empty when kdacore computed it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    handover = integration._HANDOVERS[NAME]
    before = handover.hook.served, handover.hook.declined
    chunk_gated_delta_rule(**x, **options)
    served, declined = handover.hook.served - before[0], handover.hook.declined - before[1]
    assert served + declined == 1
    return handover.hook.reason if declined else ""


def test_a_call_that_flash_qla_computes_faster_is_left_to_it(integration: Any, flash_qla: FlashQLA) -> None:
    for seen in range(1, 5):  # a call seen before is left as the first is
        assert left(integration, arguments()).startswith(
            "FlashQLA 0.1.3 is faster in the nearest measured call"
        )
        assert flash_qla.calls == seen


def test_a_call_that_no_record_has_is_kdacores(integration: Any, flash_qla: FlashQLA) -> None:
    x = arguments()
    x["q"].requires_grad_()
    assert not left(integration, x)
    assert not left(integration, arguments(torch.float16)) and flash_qla.calls == 0


def test_a_call_that_flash_qla_does_not_take_is_kdacores(integration: Any, flash_qla: FlashQLA) -> None:
    inside = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "use_beta_sigmoid_in_kernel": True}
    assert not left(integration, arguments(), **inside) and flash_qla.calls == 0


def test_a_backend_that_was_asked_for_computes(integration: Any, flash_qla: FlashQLA) -> None:
    with kdacore.use_backend("reference"):
        assert not left(integration, arguments())
    with kdacore.batch_invariant():
        assert not left(integration, arguments())
    assert flash_qla.calls == 0 and left(integration, arguments())


def test_flash_qla_switched_off(
    integration: Any, flash_qla: FlashQLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert not left(integration, arguments())


def test_flash_qla_without_a_compiler(
    integration: Any, flash_qla: FlashQLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fla.utils.has_usable_nvcc", lambda: False)
    assert not left(integration, arguments())


def test_flash_qla_that_is_not_installed(
    integration: Any, flash_qla: FlashQLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = importlib.import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    monkeypatch.setattr(backend.FlashQLABackend, "is_available", classmethod(lambda cls: False))
    assert not left(integration, arguments())


def test_flash_qla_that_cannot_be_imported(
    integration: Any, flash_qla: FlashQLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    with pytest.warns(RuntimeWarning, match="flash_qla is installed and cannot be imported"):
        assert not left(integration, arguments())
    assert not left(integration, arguments())


def test_an_fla_without_a_backend_for_flash_qla(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule.backends.flash_qla", None)
    integration._flash_qla_backend.cache_clear()
    assert not integration._flash_qla_takes((), arguments())
    integration._flash_qla_backend.cache_clear()
