"""The suite's own machinery: rounding, poison, names, plans, random calls, the record."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdacore.calls.arrays import host_values
from kdacore.calls.description import options, specs
from kdacore.calls.values import GATES, Shape, to_kind
from kdacore.errors import ContractError
from kdacore.ops import OPS, STAGES
from kdacore.oracle.host_values import rounded
from kdacore.registry import REGISTRY
from kdacore.selfcheck.bounds import bound, rounds_to_tf32
from kdacore.testing import capabilities, random_cases, random_parts, random_stages
from kdacore.testing import verify as verification
from kdacore.testing.cases import Case
from kdacore.testing.checks import CHECKS
from kdacore.testing.checks.gradients import place_weights
from kdacore.testing.compare import Findings, bits
from kdacore.testing.expected import weights
from kdacore.testing.matrix import plan
from kdacore.testing.poisoned_arrays import place
from kdacore.testing.random_cases import calls_of, random_case, run_random
from kdacore.testing.serving import judge, request_of
from kdacore.testing.suite import run_case, summary
from kdacore.testing.variations import variations_of
from kdacore.testing.verify import Report, default_path, load_records, verify
from kdacore.types import Device

BASE = Case(
    check="accuracy", backend="reference", op="chunk_kda", shape=Shape(2, 9, 1, 2, 8, 12), initial_state=True
)
LAYOUTS = ("contiguous", "padded", "stepped", "transposed")


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.standard_normal(5000) * 10.0 ** rng.integers(-20, 20, 5000), [0.0, 1.00390625, -1.01171875]]
    )
    x = x.astype(np.float32)
    assert (rounded(x, "bfloat16") == x.astype(ml_dtypes.bfloat16).astype(np.float64)).all()


def test_bounds_are_the_contract_s() -> None:
    cpu, hopper, old = Device("cpu"), Device("cuda", 0, "sm_90"), Device("cuda", 0, "sm_75")
    assert bound("o", cpu, "float32") == bound("o", old, "float32") == 2e-5
    assert bound("o", hopper, "float32") == 5e-4
    assert bound("gradient", hopper, "float32") == 2e-3
    assert bound("state", hopper, "bfloat16", "float32") == 3.3e-3
    assert bound("gradient", cpu, "float32", "bfloat16") == 8e-3
    assert rounds_to_tf32(Device("cuda", 0, "sm_100a")) and not rounds_to_tf32(Device("tpu", 0, "v5e"))


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("op", OPS)
def test_values_are_shaped_as_the_signature_says(op: str) -> None:
    options_of = () if OPS[op].family != "gate" else options(lower_bound=-5.0)
    stage = OPS[op].family == "stage"
    case = Case(
        check="accuracy",
        backend="reference",
        op=op,
        shape=Shape(2, 16, 1, 2, 8, 12),
        options=options_of,
        A_log=not stage,
        dt_bias="",
    )
    values, wanted = host_values(case), specs(case)
    assert {n: x.shape for n, x in values.items()} == {n: s.shape for n, s in wanted.items()}
    assert request_of(case).op == op


@pytest.mark.parametrize("gates", GATES)
def test_raw_gates_decay_as_their_name_says(gates: str) -> None:
    from kdacore.testing.expected import expected

    case = Case(
        check="accuracy", backend="reference", op="kda_gate", shape=Shape(1, 50, 1, 2, 8, 8), gates=gates
    )
    decay = expected(case)["log_decay"]
    low, high = {
        "random": (-200.0, 0.0),
        "init": (-60.0, 0.0),
        "slow": (-1.1e-3, 0.0),
        "zero": (-1e-12, 0.0),
        "floor": (-5.1, -4.9),
        "mixed": (-61.0, 0.0),
        **dict.fromkeys(("still", "steep", "cliff"), (-LARGEST, 0.0)),
    }[gates]
    assert low <= decay.min() and decay.max() <= high
    if gates == "still":
        assert not decay[:, :, 0].any()
    if gates in ("steep", "cliff"):
        assert decay.min() == -LARGEST
    if gates == "mixed":
        assert decay.min() < -60 and decay.max() > -1e-10


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_lie_in_poison(kind: str, layout: str) -> None:
    case = dataclasses.replace(BASE, kind=kind, layout=layout)
    values = host_values(case)
    for name, p in place(case, values).items():
        assert (np.asarray(p.view, np.float64) == values[name]).all()
        memory = np.asarray(p.memory, np.float64)
        assert memory.size > values[name].size
        poison = ~np.isfinite(memory) | (memory > 1e29)
        assert poison.sum() == memory.size - values[name].size
        address = p.view.ctypes.data if kind == "numpy" else p.view.data_ptr()
        start = p.memory.ctypes.data if kind == "numpy" else p.memory.data_ptr()
        assert start <= address < start + memory.size * 4, "a view, not a copy"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_to_an_input_or_beside_it_is_seen(layout: str) -> None:
    for where in ("view", "memory"):
        p = place(dataclasses.replace(BASE, layout=layout))["v"]
        clean, dirty = Findings(), Findings()
        p.check(clean)
        getattr(p, where).reshape(-1)[-1:] = 7.0
        if where == "view" and layout != "contiguous":
            p.view[-1, -1, -1, -1] = 7.0
        p.check(dirty)
        assert not clean.failures and dirty.failures


def test_of_an_output_only_the_surroundings_count() -> None:
    p = place(dataclasses.replace(BASE, layout="padded"))["v"]
    p.view[...] = 3.0
    findings = Findings()
    p.check(findings, written=True)
    assert not findings.failures
    p.memory[0] = 3.0
    p.check(findings, written=True)
    assert findings.failures


def test_rows_of_a_strided_pool_lie_apart() -> None:
    case = Case(
        check="pool",
        backend="reference",
        op="fused_recurrent_kda",
        shape=Shape(4, 1, 1, 1, 8, 8),
        pool="inplace_strided",
    )
    view = place(case)["initial_state"].view
    assert view.strides[0] > 2 * view[0].nbytes


@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "given"])
def test_the_weight_of_a_final_state_is_of_its_dtype(given: bool) -> None:
    """Where no state is given, it is of float32 whatever dtype one would have; JAX takes no other cotangent."""
    case = Case(
        check="gradients",
        backend="xla",
        op="chunk_kda",
        kind="jax",
        shape=Shape(1, 5, 1, 1, 8, 8),
        index_dtype="int32",
        state_dtype="bfloat16",
        initial_state=given,
    ).having(output_final_state=True)
    placed = place_weights(case, weights(case))
    assert placed["dstate"].view.dtype.name == ("bfloat16" if given else "float32")
    result = run_case(case)
    assert result.status == "served", result.message


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_tell_zeros_apart(kind: str, dtype: str) -> None:
    a, b = (to_kind(np.array([x, 1.0]), kind, dtype) for x in (0.0, -0.0))  # type: ignore[arg-type]
    assert bits(a) != bits(b) and bits(a) == bits(to_kind(np.array([0.0, 1.0]), kind, dtype))  # type: ignore[arg-type]


def test_nan_never_passes() -> None:
    findings = Findings()
    nan = np.array([1.0, np.nan])
    findings.close("close", nan, nan, 1.0)
    findings.same("same", nan, nan)
    findings.close("shape", np.zeros((2, 1)), np.zeros(2), 1.0)
    assert len(findings.failures) == 3


# --- plans -----------------------------------------------------------------------------------------------------------


def test_every_variation_has_a_check_and_every_check_a_variation() -> None:
    used = {v.check for op, definition in OPS.items() for v in variations_of(op, definition.family)}
    assert used == set(CHECKS) - {"refusal"}, "which is what the front end does, and is drawn at random"


def test_full_contains_quick_and_names_are_unique() -> None:
    quick, full = (plan("reference", level=level, kinds=("numpy",)) for level in ("quick", "full"))  # type: ignore[arg-type]
    names = [c.id for c in full.cases]
    assert len(names) == len(set(names))
    assert {c.id for c in quick.cases} < set(names)


def test_every_planned_case_keeps_the_contract() -> None:
    """Judging builds the request, which raises when a case itself is wrong."""
    for case in plan("reference", level="full").cases:
        judge(case)


def test_a_device_that_is_not_here_is_a_note() -> None:
    found = plan("reference", device="tpu")
    assert not found.cases
    assert any("torch" in note for note in found.notes)


@pytest.mark.parametrize(
    ("types", "here", "chosen"),
    [
        (("cuda", "rocm", "cpu"), {"cuda", "cpu"}, "cuda"),
        (("cuda", "rocm", "cpu"), {"cpu"}, "cpu"),
        (("cuda",), {"cpu"}, "cuda"),
        (("*",), {"cuda", "cpu"}, "cpu"),
    ],
)
def test_the_suite_runs_where_the_backend_first_says_and_this_machine_can(
    types: tuple[str, ...], here: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = dataclasses.replace(REGISTRY.get("triton").backend, device_types=types)
    monkeypatch.setattr(capabilities.REGISTRY, "get", lambda name: SimpleNamespace(backend=declared))
    monkeypatch.setattr(capabilities, "has_device", lambda kind, device: device in here)
    assert capabilities.default_device("triton") == chosen


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ContractError, match="nowhere"):
        plan("nowhere")


# --- random calls and the record -------------------------------------------------------------------------------------


def test_a_seed_stands_for_one_call() -> None:
    assert random_case("reference", 5, "cpu") == random_case("reference", 5, "cpu")
    drawn = [random_case("reference", seed, "cpu") for seed in range(200)]
    assert len({dataclasses.replace(c, seed=0, note="") for c in drawn}) > 190
    assert {c.op for c in drawn} == {op for op in OPS if OPS[op].family != "stage"}
    assert {c.check for c in drawn} == {"accuracy", "gradients", "pool", "refusal"}
    assert any(c.shape.lengths for c in drawn) and any(c.layout != "contiguous" for c in drawn)


def test_random_calls_are_of_arrays_that_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ml_dtypes NumPy has no bfloat16."""
    for part in (random_cases, random_parts, random_stages):
        monkeypatch.setattr(part, "representable", lambda kind, dtype: (kind, dtype) != ("numpy", "bfloat16"))
    drawn = [random_case("reference", seed, "cpu", only=("numpy",)) for seed in range(60)]
    assert {c.kind for c in drawn} == {"numpy"}
    assert {c.dtype for c in drawn} == {"float32", "float16"}
    assert not any("bfloat16" in dataclasses.asdict(c).values() for c in drawn)


def test_a_seed_stands_for_one_call_of_a_stage() -> None:
    again = [random_case("reference", seed, "cpu", calls="stages") for seed in range(300)]
    drawn = [random_case("reference", seed, "cpu", calls="stages") for seed in range(300)]
    assert drawn == again and {c.op for c in drawn} == set(STAGES)
    assert len({dataclasses.replace(c, seed=0, note="") for c in drawn}) > 290
    assert {c.gates for c in drawn} == {*GATES, *random_parts.END_GATES} and {c.collinear for c in drawn} == {
        False,
        True,
    }
    assert {c.option("chunk_size", 64) for c in drawn} == {16, 32, 64}
    assert {c.stage_dtype for c in drawn} == {"", "float32"}
    lengths = {n for c in drawn for n in c.shape.lengths or (c.shape.T,)}
    assert lengths >= {0, 1, 63, 64, 65, 128}
    given = {name: [name in specs(c) for c in drawn] for name in ("q", "initial_state", "dt_bias")}
    recompute, state, gate = (
        [x for x, c in zip(given[name], drawn, strict=True) if c.op == op]
        for name, op in (
            ("q", "kda_recompute_w_u"),
            ("initial_state", "delta_rule_chunk_state"),
            ("dt_bias", "kda_chunk_gate"),
        )
    )
    assert {*recompute} == {*state} == {*gate} == {False, True}


def test_what_can_be_drawn_is_what_the_backend_has() -> None:
    assert calls_of("reference") == ("whole", "stages") and calls_of("pallas") == ("whole",)
    with pytest.raises(ValueError, match="stages on cpu"):
        random_case("pallas", 0, "cpu", calls="stages")


@pytest.mark.exhaustive
def test_random_calls_print_progress() -> None:
    out = io.StringIO()
    results = run_random("reference", 3, seed=100, stream=out)
    assert "3/3 random calls, 0 failed" in out.getvalue()
    assert summary(results)[0] == "3 served, 0 declined, 0 failed"


@pytest.fixture(scope="module")
def report() -> Report:
    return verify("reference", kinds=("numpy",), random=2, seed=7, progress=False)


def test_the_record_says_what_ran_and_where(report: Report, tmp_path: Path) -> None:
    assert report.ok, "\n".join(report.lines())
    assert report.served > 300 and not report.problems
    assert {"numpy", "kdacore"} <= set(report.versions) and report.machine["python"]
    assert len(report.commit.removesuffix("+")) == 40  # "+": this checkout has changes
    assert {row["status"] for row in report.cases} == {"served"}
    assert all("numpy" in row["id"] for row in report.cases), "random calls are of these kinds too"
    assert report.worst["accuracy"]["error"] < report.worst["accuracy"]["bound"]
    path = default_path(report, tmp_path)
    report.write(path)
    assert load_records(tmp_path) == [report]
    assert re.fullmatch(r"reference-cpu-quick-[\d-]{10}T\d{6}\.\d{6}\.json", path.name)
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


@pytest.mark.exhaustive
def test_several_processes_find_the_same(report: Report) -> None:
    """The table's first cases and random calls, in the table's order."""
    drawn = verification._Drawn("reference", "cpu", "quick", ("numpy",))
    items = [*plan("reference", kinds=("numpy",)).cases[:3], ("whole", 7), ("stages", 7)]
    one, two = (verification._results(drawn, items, n, lambda r: None) for n in (1, 2))
    assert [r.case.id for r in one] == [r.case.id for r in two]
    assert [r.worst for r in one] == [r.worst for r in two]
    assert [row["id"] for row in report.cases[:3]] == [r.case.id for r in two[:3]]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_an_interrupted_run_keeps_the_cases_that_have_run(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def advance(result: Any) -> None:
        seen.append(result.case.id)
        if len(seen) == 3:
            raise KeyboardInterrupt

    real = verification._results
    monkeypatch.setattr(verification, "_results", lambda drawn, items, n, _: real(drawn, items, n, advance))
    report = verify("reference", kinds=("numpy",), jobs=jobs, progress=False)
    assert sorted(row["id"] for row in report.cases) == sorted(seen) and len(seen) == 3
    assert report.interrupted and not report.ok and not report.problems
    assert "interrupted" in report.lines()[-1]


def test_a_record_of_another_schema_is_refused(report: Report, tmp_path: Path) -> None:
    record = json.loads(report.to_json()) | {"schema": 99}
    (tmp_path / "old.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="schema 99"):
        load_records(tmp_path)


def test_a_backend_that_cannot_run_here_is_a_problem_not_a_pass() -> None:
    from kdacore.registry import REGISTRY, missing

    absent = [n for n, r in REGISTRY.backends().items() if missing(r.backend)]
    for name in absent:
        found = verify(name, progress=False)
        assert not found.ok and "to get it:" in found.problems[0]


# --- the pytest plugin -----------------------------------------------------------------------------------------------


def test_loading_the_plugin_brings_in_nothing_heavy(tmp_path: Path) -> None:
    """It is loaded by every pytest run on a machine that has kdacore."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    heavy = ('torch', 'jax', 'numpy', 'kdacore.testing.matrix', 'kdacore_reference')\n"
        "    assert [m for m in heavy if m in sys.modules] == []\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["-p", "no:jaxtyping"]  # its plugin imports NumPy
    command += ["-W", "error", "--strict-markers", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kdacore conformance" not in done.stdout


@pytest.mark.parametrize("word", ["--kdacore-random=-4", "--kdacore-seed=-1", "--kdacore-kind=lists"])
def test_options_of_the_plugin_that_make_no_run(word: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", word], capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"argument {word.partition('=')[0]}: " in done.stderr


def test_a_case_is_all_it_takes_to_run_it_again() -> None:
    case = plan("reference", kinds=("numpy",)).cases[0]
    again = eval(repr(case), {"Case": Case, "Shape": Shape})
    assert again == case and run_case(again).status == "served"
