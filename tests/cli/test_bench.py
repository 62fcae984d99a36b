"""``kdacore bench``: every preset runs, nothing wrong is timed, and the rows say what ran."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdacore import progress, report
from kdacore.bench import arrays as made
from kdacore.bench import (
    cases,
    clock,
    cpu,
    dispatch,
    gate,
    graphs,
    imports,
    plot,
    results,
    runner,
    stages,
)
from kdacore.bench.cases import PRESETS, SPECIAL, Case
from kdacore.bench.clock import Budget
from kdacore.bench.peers import PEERS
from kdacore.cli import bench as bench_command
from kdacore.cli import main as cli
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import Backend

ROOT = Path(__file__).resolve().parents[2]
QUICK = Budget(samples=3, seconds=1)
SMALL = Case(name="small", T=70, H=2, K=16, V=16, dtype="float32", kind="numpy")
IN_EVERY_RUN = 3
"""So many cases of a preset are not left to the exhaustive tests."""
GPU_CASES = [
    pytest.param(
        preset, case, id=f"{preset}: {case.name}", marks=[pytest.mark.exhaustive] if i >= IN_EVERY_RUN else []
    )
    for preset in (
        "h200-forward",
        "h200-training",
        "h200-gdn",
        "h200-gdn-training",
        "h200-head-dims",
        "h200-decode",
        "h200-host",
    )
    for i, case in enumerate(PRESETS[preset])
]


@pytest.mark.parametrize(("preset", "case"), GPU_CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_gpu_case_runs_small(preset: str, case: Case, device: str) -> None:
    small = cases.tiny(case)
    assert small.kind == "torch"
    found = runner.run_case(preset, small, case.gate_sets[-1], device, ("reference",), QUICK)
    ours, *peers = found.rows
    assert (ours.status, ours.backend, ours.phase) == ("ok", "reference", case.phase), ours.note
    assert ours.seconds is not None and ours.error is not None and ours.error <= (ours.bound or 0)
    assert [row.contender.partition(" ")[0] for row in peers] == [peer.distribution for peer in PEERS]
    assert all(row.status == "skipped" and row.note for row in peers) or device == "cuda"


@pytest.mark.gpu
@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("case", PRESETS["h200-decode-graph"][:2], ids=lambda case: case.name)
def test_graph_cases(case: Case) -> None:
    small = dataclasses.replace(case, B=2, H=2)
    rows = runner.run_case("test", small, "init", "cuda", ("triton", "cuda"), QUICK).rows
    ours = {row.backend: row for row in rows if row.contender.startswith("kdacore")}
    assert set(ours) == {"triton", "cuda"}
    assert all(row.status == "ok" and 0 < (row.seconds or 0) < 1e-3 for row in ours.values()), ours


def test_what_cannot_be_captured_is_not_timed_in_a_graph() -> None:
    small = cases.tiny(PRESETS["h200-decode-graph"][0])
    ours, *_ = runner.run_case("test", small, "init", "cpu", ("reference",), QUICK).rows
    assert (ours.status, ours.note) == ("skipped", "cannot be captured into a CUDA graph")


def test_states_of_a_graph_are_many_times_any_cache() -> None:
    for case in PRESETS["h200-decode-graph"]:
        states = graphs.launches(case) * case.B * case.H * case.K * case.V * 4
        assert 256 * 2**20 <= states <= 4 * 2**30


def test_presets_cover_the_promised_rows() -> None:
    named = {(c.phase, c.name): c for p in PRESETS.values() for c in p}
    assert named["forward", "B1 T8192 H64"].goals["triton"].must == pytest.approx(1.10e-3)
    assert named["forward", "B1 T8192 H64"].goals["cuda"].must == pytest.approx(0.60e-3)
    assert named["training", "B1 T8192 H64"].goals["triton"].aim == pytest.approx(3.0e-3)
    assert named["decode", "decode B256 H32"].goals["triton"].must == pytest.approx(280e-6)
    assert named["decode", "decode B256 H32"].goals["cuda"].must == pytest.approx(275e-6)
    assert all(c.gate_sets == ("random", "init") for c in PRESETS["h200-forward"])


@pytest.mark.parametrize("gates", cases.GATE_SETS)
@pytest.mark.parametrize(
    "case",
    [SMALL, dataclasses.replace(SMALL, T=70, lengths=(3, 1, 66)), dataclasses.replace(SMALL, HV=4, B=2)],
)
def test_numpy_cases(case: Case, gates: str) -> None:
    ours, *_ = runner.run_case("test", case, gates, "cpu", (), QUICK).rows
    assert (ours.status, ours.backend, ours.auto) == ("ok", "reference", True)
    assert ours.samples == 3 and ours.low is not None and ours.low <= (ours.seconds or 0) <= (ours.high or 0)


class Wrong:
    """The reference, with one result spoiled."""

    def __init__(self, field: str) -> None:
        self.field = field

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        reference = REGISTRY.get("reference").backend

        def forward(request: Any, inputs: Any) -> Any:
            if self.field == "raise":
                raise RuntimeError("no luck")
            out = reference.ops["chunk_kda"].forward(request, inputs)
            return out._replace(**{self.field: getattr(out, self.field) * 1.05})

        op = dataclasses.replace(reference.ops["chunk_kda"], forward=forward)
        return [dataclasses.replace(reference, name="spoiled", ops={"chunk_kda": op})]


@pytest.mark.parametrize("field", ["o", "final_state", "raise"])
def test_what_is_wrong_is_not_timed(field: str) -> None:
    REGISTRY.register(Wrong(field), "spoiled")
    found = runner.run_case("test", SMALL, "random", "cpu", ("spoiled",), QUICK)
    row = next(r for r in found.rows if r.contender == "kdacore spoiled")
    assert row.seconds is None and found.failed
    if field == "raise":
        assert (row.status, row.note) == ("FAILED", "RuntimeError('no luck')")
    else:
        assert (row.status, row.note) == ("wrong", f"{field} is off")


def test_wrong_gradients_are_not_timed() -> None:
    reference = REGISTRY.get("reference").backend

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            def backward(*args: Any) -> Any:
                grads = reference.ops["chunk_kda"].backward(*args)  # type: ignore[misc]
                return grads._replace(beta=grads.beta * -1)

            op = dataclasses.replace(reference.ops["chunk_kda"], backward=backward)
            return [dataclasses.replace(reference, name="spoiled", ops={"chunk_kda": op})]

    REGISTRY.register(Plugin(), "spoiled")
    case = dataclasses.replace(SMALL, phase="training", kind="torch")
    row = runner.run_case("test", case, "random", "cpu", ("spoiled",), QUICK).rows[0]
    assert (row.status, row.note, row.seconds) == ("wrong", "dbeta is off", None)


def test_a_backend_that_cannot_is_skipped_with_its_reasons() -> None:
    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [Backend(name="elsewhere", version="1", kinds=("jax",), ops={})]

    REGISTRY.register(Plugin(), "elsewhere")
    row = next(
        r
        for r in runner.run_case("test", SMALL, "random", "cpu", (), QUICK).rows
        if "elsewhere" in r.contender
    )
    assert row.status == "skipped" and "[array_kind]" in row.note and "[op]" in row.note


def test_figures_against_a_target_and_a_peer() -> None:
    case = dataclasses.replace(SMALL, goals={"reference": cases.Goal(1e-9), "another": cases.Goal(1e-9)})
    found = runner.run_case("test", case, "random", "cpu", (), QUICK)
    (figure,) = found.figures
    assert figure.met is False and found.missed == [figure]


def timed(preset: str, seconds: dict[tuple[str, str, str], float]) -> list[results.Row]:
    """Rows of (case, gates, backend) that took so long."""
    return [
        results.Row(
            preset=preset,
            case=case,
            phase="forward",
            contender=f"kdacore {backend}",
            backend=backend,
            gates=gates,
            status="ok",
            seconds=x,
        )
        for (case, gates, backend), x in seconds.items()
    ]


def test_each_backend_is_held_to_its_own_goal() -> None:
    """The fastest does not answer for the others."""
    case = next(c for c in PRESETS["h200-forward"] if c.name == "B1 T8192 H64")
    rows = timed("p", {(case.name, "init", name): x * 1e-3 for name, x in (("triton", 1.0), ("cuda", 0.7))})
    met = {
        f.name.rpartition(", ")[2]: (f.value, f.unit, f.want, f.met)
        for f in runner._figures("p", case, "init", rows)
    }
    assert met == {
        "triton": (pytest.approx(1.0), "ms", "<= 1.1 ms, aim 0.9", True),
        "cuda": (pytest.approx(700), "us", "<= 600 us, aim 280", False),
    }


def test_goals_that_are_multiples_of_another_case() -> None:
    usual, slow, gva = "B1 T8192 H64", "B1 T8192 H64 unbounded", "GVA B1 T8192 H32 HV64"
    times = {
        (usual, "init", "cuda"): 0.30,
        (slow, "init", "cuda"): 0.40,
        (gva, "init", "cuda"): 0.29,
        (usual, "init", "triton"): 0.1,
        (slow, "init", "triton"): 1.0,
        (slow, "random", "cuda"): 0.40,
    }
    preset = "h200-forward"
    found = runner.goals_of_other_cases(preset, PRESETS[preset], timed(preset, times))
    assert {f.name: f.met for f in found} == {
        f"{slow}, forward, init, cuda: over {usual}": False,
        f"{gva}, forward, init, cuda: over {usual}": True,
    }
    assert runner.goals_of_other_cases("another", PRESETS[preset], timed(preset, times)) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_goals_name_what_there_is(preset: str) -> None:
    names = {case.name for case in PRESETS[preset]}
    for case in PRESETS[preset]:
        for backend, goal in case.goals.items():
            assert backend in ("triton", "cuda")
            assert goal.aim is None or goal.aim < goal.must
            assert not goal.of or goal.of in names - {case.name}


def test_the_list_shows_every_goal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    out = " ".join(out.split())
    assert "triton 1.100 ms (900.00 us) 1.773 ms cuda 600.00 us (280.00 us)" in out
    assert "cuda 1.25 x (1.15 x) of B1 T8192 H64" in out


def test_time_must_not_depend_on_the_gates() -> None:
    fields = {
        "preset": "p",
        "case": "c",
        "phase": "forward",
        "contender": "kdacore x",
        "status": "ok",
        "auto": True,
    }
    rows = [
        results.Row(**fields, backend="x", gates=g, seconds=s) for g, s in (("random", 1.0), ("init", 1.5))
    ]
    (figure,) = runner.gate_dependence("p", rows)
    assert (figure.value, figure.met) == (1.5, False)
    assert runner.gate_dependence("p", rows[:1]) == runner.gate_dependence("another", rows) == []


def test_memory_is_held_against_its_bound() -> None:
    case = dataclasses.replace(SMALL, phase="training", memory=100.0)
    row = results.Row(
        preset="p",
        case="c",
        phase="training",
        contender="kdacore x",
        status="ok",
        seconds=1.0,
        peak_bytes=101,
    )
    assert [f.met for f in runner._figures("p", case, "init", [row])] == [False]


def test_samples_are_interleaved() -> None:
    order: list[str] = []
    steps = {name: lambda n=name: order.append(n) for name in "abc"}
    timings = clock.interleave(steps, clock.HostClock(), Budget(samples=3, seconds=5))
    assert "".join(order) == "abcbcacab"
    assert {t.samples for t in timings.values()} == {3}


def test_quartiles() -> None:
    assert clock.summary([5.0]) == clock.Timing(5.0, 5.0, 5.0, 1)
    assert clock.summary([1.0, 2.0, 3.0, 4.0, 5.0]) == clock.Timing(3.0, 2.0, 4.0, 5)


def test_the_gate_slices_exactly() -> None:
    """The oracle on a slice is the oracle on everything, there."""
    case = dataclasses.replace(SMALL, B=2, HV=4, T=20)
    arrays = made.make(case, "init", "cpu")
    part = gate.choose(case)
    assert (part.b, part.head, part.heads) == (1, 1, slice(2, 4))
    from kdacore import api

    o, state = api.chunk_kda(**arrays, **made.options(case), backend="reference")
    assert gate.judge(case, gate.expected(case, arrays), o, state).error < 1e-5
    o[1, 3, 3] += 1.0
    assert not gate.judge(case, gate.expected(case, arrays), o, state).ok


def test_the_gate_weighs_all_of_dg() -> None:
    """With gates as models begin dg is a few numbers: one rounded badly is no error, all of the others wrong are."""
    case = dataclasses.replace(SMALL, T=40, kind="torch", phase="training", gate="sigmoid")
    arrays = made.make(case, "init", "cpu")
    want = gate.expected(case, arrays, made.output_gradient(case, arrays))
    part = want.part

    def judged(change: Callable[[Any], Any]) -> gate.Verdict:
        def whole(x: Any, heads: slice) -> Any:
            full = np.zeros((case.B, case.T, case.value_heads, *x.shape[3:]))
            full[part.b : part.b + 1, part.rows, heads] = x
            return full

        exact = {**want.gradients, "g": change(want.gradients["g"])}
        heads = {name: slice(part.head, part.head + 1) if name in "qk" else part.heads for name in exact}
        gradients = {name: whole(x, heads[name]) for name, x in exact.items()}
        return gate.judge(case, want, whole(want.o, part.heads), None, gradients)

    dg = want.gradients["g"]
    largest = np.abs(dg) == np.abs(dg).max()
    assert judged(lambda x: x).error < 1e-12
    assert judged(lambda x: np.where(largest, x * (1 + 2 * judged(lambda x: x).bound), x)).ok
    assert not judged(lambda x: np.where(largest, x, x * 1.1)).ok


def test_cpu_preset_small() -> None:
    found = cpu.run_preset(dataclasses.replace(cpu.CASE, T=128, H=2, K=16, V=16), QUICK)
    assert [row.status for row in found.rows] == ["ok"] * 4
    assert {f.unit for f in found.figures} == {"x"} and len(found.figures) == 5
    assert found.rows[0].peak_bytes and found.rows[0].input_bytes


def test_dispatch_preset_small() -> None:
    before = set(REGISTRY.backends())
    found = dispatch.run_preset(calls=50)
    assert set(REGISTRY.backends()) == before, "the null backend is gone again"
    assert {row.backend for row in found.rows} == {dispatch.NAME}
    assert {f.name for f in found.figures if f.met is not None} == {
        f"dispatch, {op} {kind}" for op in ("chunk_kda", "fused_recurrent_kda") for kind in ("numpy", "torch")
    }


def test_import_preset_small() -> None:
    (row,) = imports.run_preset(processes=2).rows
    assert row.samples == 2 and 0 < (row.seconds or 0) < 5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_first_call_preset_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "h200-first-call", "--tiny", "--device", "cpu", "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    assert out.count("kdacore reference") == 2 and "skipped fla-core" in out


def test_stages_preset_small(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "h200-stages", "--tiny", "--device", "cpu", "--backend", "reference", "--samples", "2"]
    assert cli.main([*words, "--only", "T4096 HQK64", "--only", "T512 H64"]) == 0
    out = capsys.readouterr().out
    assert out.count("kdacore reference") == 6 and re.search(r"skipped fla-core( [\d.]+)? \(6 rows\)", out)
    assert out.count("copy of as many bytes") == 4


def test_stage_cases_are_those_asked_for() -> None:
    """512 to 32,768 tokens in twos, packs of 8 sequences with 8,192 to 65,536, each with 64 and 128 value heads."""
    dense = {(c.B, c.T, c.HV) for c in stages.CASES if not c.lengths}
    packs = {(sum(c.lengths), c.HV) for c in stages.CASES if c.lengths}
    assert dense == {(2, 2**n, HV) for n in range(9, 16) for HV in (64, 128)}
    assert packs == {(2**n, HV) for n in range(13, 17) for HV in (64, 128)}
    assert all(len(c.lengths) in (0, 8) and min(c.lengths, default=1) > 0 for c in stages.CASES)
    assert all((c.first, c.second) == ((1.3, 1.2) if c.T >= 4096 else (1.0, 1.0)) for c in stages.CASES)
    assert len({c.name for c in stages.CASES}) == len(stages.CASES)


def test_the_list_shows_stage_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    assert "    pack of 8, 65536 tokens HQK64 HV128\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Aqk", "u"])
def test_a_wrong_stage_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages._ours

    def off(work: str, x: Any, backend: str) -> dict[str, Any]:
        found = right(work, x, backend)
        if name in found:
            found[name][:, -1] *= 1.5  # the last token alone
        return found

    monkeypatch.setattr(stages, "_ours", off)
    rows = stages.run_case(stages.tiny(stages.CASES[0]), "cpu", ("reference",), QUICK).rows
    status = {
        row.case.rpartition(", ")[2]: row.status for row in rows if row.contender == "kdacore reference"
    }
    both = {stages.BOTH: "wrong", stages.SECOND: "wrong", stages.SECOND_Q: "wrong"}
    assert status == (both if name == "u" else {**both, stages.SECOND: "ok", stages.SECOND_Q: "ok"})


def test_what_no_stage_reads_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer leaves what is right of the diagonal as it found it: whatever the memory held before."""
    right = stages._ours

    def garbage(work: str, x: Any, backend: str) -> dict[str, Any]:
        found = right(work, x, backend)
        if "Aqk" in found:
            found["Aqk"][:, 5, :, 6:] = float("nan")
        return found

    monkeypatch.setattr(stages, "_ours", garbage)
    rows = stages.run_case(stages.tiny(stages.CASES[0]), "cpu", ("reference",), QUICK).rows
    assert {row.status for row in rows if row.contender == "kdacore reference"} == {"ok"}


def test_stage_figures() -> None:
    def timing(seconds: float) -> clock.Timing:
        return clock.Timing(seconds, seconds, seconds, 3)

    case, peer = stages.CASES[3], f"{stages.PEER} 1.0"
    times = {
        (stages.BOTH, "kdacore a"): timing(3.0),
        (stages.BOTH, peer): timing(8.0),
        (stages.SECOND, "kdacore a"): timing(1.0),
        (stages.SECOND, peer): timing(1.1),
        (stages.SECOND, stages.COPY): timing(0.5),
    }
    found = {f.name.rpartition(", ")[2].partition(":")[0]: f for f in stages._figures(case, times)}
    assert found["a plain copy"].value == pytest.approx(2.2) and found["a plain copy"].met is None
    assert found["intra"].value == pytest.approx(6.9 / 2.0) and found["intra"].met
    assert found["w/u"].value == pytest.approx(1.1) and found["w/u"].met is False
    assert stages._figures(case, {(stages.BOTH, "kdacore a"): timing(1.0)}) == []


def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "results.json"
    words = ["bench", "--shape", "1,80,2,2,16,16", "--kind", "numpy", "--samples", "3", "--json", str(path)]
    assert cli.main(words) == 0
    assert "kdacore reference" in capsys.readouterr().out
    found = results.read(path)
    assert found["schema"] == results.SCHEMA
    assert {row["backend"] for row in found["rows"] if row["status"] == "ok"} == {"reference"}
    assert found["versions"]["numpy"] and found["machine"] and len(found["load_average"]["before"]) == 3
    path.write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="schema 0; wanted 1"):
        results.read(path)


def interrupt() -> None:
    raise KeyboardInterrupt


def time_limit() -> None:
    """What ``timeout`` and batch systems send."""
    assert callable(signal.getsignal(signal.SIGTERM)), "the signal would end the tests"
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [interrupt, time_limit])
def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: Callable[[], None],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "results.json"
    real = runner.run_case
    done: list[str] = []

    def interrupted(preset: str, case: Case, *rest: Any) -> Any:
        if done:
            end()
        done.append(case.name)
        return real(preset, case, *rest)

    monkeypatch.setattr(runner, "run_case", interrupted)
    monkeypatch.setitem(PRESETS, "quick", (SMALL, SMALL))
    words = ["bench", "quick", "--samples", "3", "--device", "cpu", "--json", str(path)]
    assert cli.main(words) == 130
    found = results.read(path)
    assert not found["complete"] and {row["case"] for row in found["rows"]} == set(done)
    assert "interrupted" in capsys.readouterr().err
    path.unlink()
    assert cli.main(words) == 130 and not path.exists(), "nothing was timed, nothing is written"
    assert "interrupted before any case was done; nothing is written" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_time_limit_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` sends it to the process and to its group."""
    path = tmp_path / "results.json"
    real, done = runner.run_case, []

    def limited(*given: Any) -> Any:
        if done:
            time_limit()
        done.append(given)
        return real(*given)

    shielded = bench_command.not_terminated

    def again() -> Any:
        signal.raise_signal(signal.SIGTERM)
        return shielded()

    monkeypatch.setattr(runner, "run_case", limited)
    monkeypatch.setattr(bench_command, "not_terminated", again)
    monkeypatch.setitem(PRESETS, "quick", (SMALL, SMALL))
    assert cli.main(["bench", "quick", "--samples", "3", "--device", "cpu", "--json", str(path)]) == 130
    assert not results.read(path)["complete"]


def test_a_time_limit_while_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is timed by then; describing the machine takes seconds."""
    path = tmp_path / "results.json"
    real = results.document

    def late(*given: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(*given, **more)

    monkeypatch.setattr(results, "document", late)
    monkeypatch.setitem(PRESETS, "quick", (SMALL,))
    assert cli.main(["bench", "quick", "--samples", "3", "--device", "cpu", "--json", str(path)]) == 0
    assert results.read(path)["complete"]


def test_check_fails_on_a_missed_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hopeless = dataclasses.replace(SMALL, goals={"reference": cases.Goal(1e-9)}, gate_sets=("init",))
    monkeypatch.setitem(PRESETS, "quick", (hopeless,))
    assert cli.main(["bench", "quick", "--samples", "3"]) == 0
    assert "MISSED" not in capsys.readouterr().out, "nobody asked"
    assert cli.main(["bench", "quick", "--samples", "3", "--check"]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_the_bar_moves_within_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", (dataclasses.replace(SMALL, gate_sets=("init",)),))
    seen: list[float] = []
    update = progress.Bar._update
    monkeypatch.setattr(
        progress.Bar,
        "_update",
        lambda bar: (seen.append(bar.completed), update(bar)),  # type: ignore[func-returns-value]
    )
    assert cli.main(["bench", "quick", "--samples", "4", "--device", "cpu"]) == 0
    assert seen == sorted(seen) and seen[-1] == 1.0
    assert len({x for x in seen if 0.5 < x < 1}) >= 3 and any(0 < x < 0.5 for x in seen)


def test_work_without_a_bar_reports_to_nobody() -> None:
    progress.within(0.5)
    with progress.Bar("work", 2, show=False) as bar:
        progress.within(0.5)
        assert bar.completed == 0.5
        bar.within(0.25)
        assert bar.completed == 0.5
        bar.advance("1 failed")
        assert bar.completed == 1.0
    progress.within(0.9)
    assert bar.completed == 1.0


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_command, "version_of", lambda name: "")
    assert cli.main(["bench", "--samples", "3"]) == 0, "quick takes what there is"
    assert "kdacore reference" in capsys.readouterr().out
    assert cli.main(["bench", "h200-decode"]) == 2
    assert "h200-decode needs torch, which is not installed" in capsys.readouterr().err


def test_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    for name in (*PRESETS, *SPECIAL, *(c.name for p in PRESETS.values() for c in p)):
        assert name in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "no preset nonsense"),
        (["quick", "--shape", "1,8,1,1,16,16"], "not both"),
        (["quick", "--samples", "0"], "--samples must be positive"),
        (["quick", "--only", "nothing like it"], "no case is left"),
        (["quick", "--seconds", "-1"], "--seconds must be positive"),
        (["quick", "--backend", "reference,nonsense"], "no backend nonsense; there are reference"),
        (["h200-forward", "--peer", "nonsense"], "no peer nonsense; there are none, fla-core"),
        (["cpu", "--tiny", "--backend", "reference"], "cpu takes no --backend"),
        (["import", "--only", "x"], "import takes no --only"),
        (["quick", "--kind", "numpy", "--device", "cuda"], "numpy has no such device here"),
        (["h200-stages", "--device", "tpu"], "torch has no such device here"),
        (["--shape", "1,8,1,1,16,16", "--device", "tpu"], "torch has no such device here"),
    ],
)
def test_bad_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "quick", "--device", "cuda:x"])
    assert done.value.code == 2
    assert "'cuda:x' is no device" in capsys.readouterr().err


def test_an_array_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_command, "version_of", lambda name: "" if name in ("torch", "matplotlib") else "1"
    )
    for words in (["--shape", "1,8,1,1,16,16", "--kind", "torch"], ["h200-stages"]):
        assert cli.main(["bench", *words]) == 2
        assert "needs torch, which is not installed" in capsys.readouterr().err
    assert cli.main(["bench", "quick", "--plot", "x.svg"]) == 2
    assert "--plot: drawing needs matplotlib" in capsys.readouterr().err


def test_nothing_timed_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [Backend(name="elsewhere", version="1", kinds=("numpy",), ops={})]

    REGISTRY.register(Plugin(), "elsewhere")
    words = ["bench", "quick", "--tiny", "--kind", "numpy", "--backend", "elsewhere", "--samples", "3"]
    assert cli.main(words) == 1
    assert "nothing could be timed" in capsys.readouterr().err


def test_plot(tmp_path: Path) -> None:
    """An SVG where matplotlib is installed, and elsewhere the line that would make it so."""
    document = results.document(runner.run_case("test", SMALL, "init", "cpu", (), QUICK), ["test"], ())
    with pytest.raises(plot.PlotError, match=r"\.\[bench\]|no row"):
        plot.draw({**document, "rows": []}, tmp_path / "none.svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(plot.PlotError, match=r"pip install '\.\[bench\]'"):
            plot.draw(document, tmp_path / "one.svg")
    else:
        plot.draw(document, tmp_path / "one.svg")
        plot.draw(document, tmp_path / "two.svg")
        assert (tmp_path / "one.svg").read_text().startswith("<?xml")
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    ("phase", "contender", "group"),
    [
        ("maps", "segments maps", "B1 T64"),
        ("outputs", "segments maps", "B1 T64, outputs"),
        ("forward", "one forward", "B1 T64"),
        ("training", "one training", "B1 T64, training"),
        ("decode", "kdacore cuda", "B1 T64, decode"),
    ],
)
def test_a_picture_groups_the_launches_of_a_call_and_keeps_passes_apart(
    phase: str, contender: str, group: str
) -> None:
    row = {"case": "B1 T64", "phase": phase, "contender": contender, "gates": ""}
    assert plot._group(row) == group


def test_committed_results_can_be_read() -> None:
    names = ("cpu", "xla", "dispatch", "import")
    for path in [ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json" for name in names]:
        contents = results.read(path)
        assert contents["rows"] and contents["figures"] and all(run["commit"] for run in contents["runs"])
        assert all(row["status"] == "ok" for row in contents["rows"])


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.2325284, 0.248, "232.5 .. 248 ms"), (0.891, 1.1309, "0.891 .. 1.131 s"), (1e-5, 2e-5, "10 .. 20 us")],
)
def test_quartiles_share_a_unit(low: float, high: float, text: str) -> None:
    assert results.span(low, high) == text


def test_the_tables_of_the_cpu_preset_fit_100_columns() -> None:
    row = results.Row(
        preset="cpu",
        case="B1 T4096 H8",
        phase="forward",
        contender="recurrence, float64 (the oracle)",
        status="ok",
        gates="init",
        backend="reference",
        seconds=0.234,
        low=0.2332,
        high=0.2482,
        samples=7,
        error=3.5e-7,
        peak_bytes=230_000_000,
    )
    out = report.console()
    rows = [row, dataclasses.replace(row, contender="chunked forward")]
    lines = str(results.row_table(rows, out)).splitlines()
    assert lines[0] == "  B1 T4096 H8, gates init" and max(map(len, lines)) <= 100
    figure = results.Figure(
        preset="cpu",
        name="peak memory, inputs included: chunked forward and backward",
        value=4.149,
        unit="x",
        want="<= 6 x",
        met=True,
    )
    assert max(map(len, str(results.figure_table([figure], out, judged=True)).splitlines())) <= 100


def test_reasons_of_what_is_skipped_are_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "not here: jax is not installed; to get it: " + "a line that installs it, " * 5
    fields = {"preset": "p", "case": "c", "phase": "forward", "contender": "kdacore xla"}
    row = results.Row(**fields, status="skipped", note=reason)
    out = report.console()
    out.print(results.row_table([row], out), end="")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert " ".join(said.split()).endswith(f"skipped kdacore xla (c): {reason}".strip())
