"""``kdacore doctor``: a healthy machine passes, and every thing it checks is broken here once."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import kdacore
from kdacore import config, integrations, machine, report
from kdacore.calls.description import CallDescription
from kdacore.cli import doctor, doctor_selfcheck
from kdacore.cli import main as cli
from kdacore.cli.doctor_summary import render as summary
from kdacore.cli.doctor_text import render
from kdacore.dispatch import cost_tables, plan
from kdacore.feature_matrix import Place
from kdacore.hookspecs import hookimpl
from kdacore.integrations.hooks import HookStatus
from kdacore.machine import Machine, Row
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Outputs, Reason, Request, Requirement

pytestmark = pytest.mark.usefixtures("requests_built_once")
Capture = pytest.CaptureFixture[str]


def diagnose(capsys: Capture, *words: str) -> dict[str, Any]:
    """The JSON report, its exit status checked against the command's."""
    status = cli.main(["doctor", "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit"] == status == (1 if found["problems"] else 0)
    assert list(faults(found, SCHEMA)) == []
    return found


SCHEMA = json.loads((Path(doctor.__file__).parent / doctor.SCHEMA_FILE).read_text())
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def faults(value: Any, schema: Any, where: str = "report") -> Iterator[str]:
    """Where a value is not as a JSON Schema says: the words that doctor.schema.json uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value not in allowed or (kinds and not any(isinstance(value, TYPES[kind]) for kind in kinds)):
        yield f"{where}: {value!r}"
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{where}[{i}]")
    if isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from [f"{where}: no {name}" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name not in named and others is False:
                yield f"{where}: {name} is not in the schema"
            rule = named.get(name, others)
            yield from faults(item, rule if isinstance(rule, dict) else {}, f"{where}.{name}")


def test_the_schema_is_published(capsys: Capture) -> None:
    assert cli.main(["doctor", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert SCHEMA["properties"]["schema"] == {"const": doctor.SCHEMA}
    assert SCHEMA["properties"]["exit"]["enum"] == [report.OK, report.BROKEN]
    wrong = {"schema": 2, "machine": [{"name": 1}], "other": None}
    assert {f.partition(":")[0] for f in faults(wrong, SCHEMA)} >= {"report.schema", "report.machine[0]"}


def test_the_summary_is_a_screen_and_begins_with_the_verdict(every_backend: None) -> None:
    found = doctor.collect(selfchecks=False)
    for made in ({}, {"force_terminal": True, "width": 100, "color_system": None}):
        text = io.StringIO()
        summary(found, Console(file=text, soft_wrap=True, highlight=False, markup=False, **made))
        lines = text.getvalue().splitlines()
        assert lines[0] == "all that is installed works (exit 0)"
        assert len(lines) <= 17
        assert max(len(line) for line in lines if "KDACORE_CACHE_DIR" not in line) <= 100
        assert all(f"  {name} " in text.getvalue() for name in REGISTRY.backends())


def test_problems_come_first(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_BACKEND", "nonsense")
    config.refresh()
    assert cli.main(["doctor", "--no-selfcheck"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "1 problem (exit 1)",
        "  environment variable KDACORE_BACKEND: names 'nonsense', which is no backend here",
    ]


def test_one_backend(every_backend: None, capsys: Capture) -> None:
    assert cli.main(["doctor", "--no-selfcheck", "cuda"]) == 0
    said = capsys.readouterr().out
    assert "has this op" not in said and "  cuda: takes torch, jax" in said and "chunk_kda" in said
    assert "triton" not in said.replace("kdacore_triton", "")
    assert cli.main(["doctor", "--no-selfcheck", "cdua"]) == 2
    assert "did you mean 'cuda'?" in capsys.readouterr().err


def test_tables_fold_to_the_width_of_a_terminal() -> None:
    text = io.StringIO()
    out = Console(file=text, force_terminal=True, width=60, color_system=None, soft_wrap=True)
    out.print(report.table(("name", "what"), [("a", "word " * 40), ("b", "ok")], out), end="")
    lines = text.getvalue().splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= 60 and lines[0].split() == ["name", "what"]
    assert text.getvalue().count("word") == 40


def only_problem(found: dict[str, Any]) -> str:
    """The one problem of a report, where and what."""
    assert len(found["problems"]) == 1, found["problems"]
    return f"{found['problems'][0]['where']}: {found['problems'][0]['what']}"


def add(**fields: Any) -> None:
    """Register a backend of these fields by hand."""
    backend = Backend(**{"version": "1.0", "kinds": ("numpy",), "ops": {}, **fields})

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [backend]

    REGISTRY.register(Plugin(), f"plugin of {backend.name}")


def reference_op(name: str) -> OpImpl:
    return REGISTRY.get("reference").backend.ops[name]


# --- health -------------------------------------------------------------------------------------------------------


def test_a_healthy_machine(capsys: Capture) -> None:
    found = diagnose(capsys)
    assert found["schema"] == doctor.SCHEMA == 1
    assert [b["name"] for b in found["backends"]] == ["reference"]
    assert {c["op"] for c in found["selfchecks"]} >= {"chunk_kda", "fused_recurrent_kda", "kda_gate"}
    assert {c["status"] for c in found["selfchecks"]} == {"ok"}
    assert {c["mark"] for c in found["selfchecks"]} == {"verified"}


def test_the_report_has_every_section(capsys: Capture) -> None:
    sections = (
        "schema machine versions environment integrations plugins backends features caches costs checks"
    )
    checked = {"selfchecks", "selfchecks_run", "refusals", "passed_over"}
    assert set(diagnose(capsys, "--no-selfcheck")) == {*sections.split(), "problems", "exit", *checked}


def test_integrations(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each host is told of kdacore, found without importing one; the doctor's own process calls none."""
    versions = {"fla-core": "0.6.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise integrations.metadata.PackageNotFoundError(name)
        return versions[name]

    def found() -> list[dict[str, Any]]:
        rows = {row["name"]: row for row in diagnose(capsys, "--no-selfcheck")["integrations"]}
        assert tuple(rows) == tuple(sorted(config.INTEGRATIONS))
        return [rows["fla"], rows["transformers"]]

    monkeypatch.setattr(integrations.metadata, "version", version)
    monkeypatch.setattr(integrations, "_imported", lambda name: None)
    fla, transformers = found()
    assert (fla["host"], fla["place"], fla["status"]) == ("fla-core 0.6.1", "fla.backends", "not active")
    assert "chunk_kda" in fla["functions"] and fla["hooks"] == []
    assert (transformers["host"], transformers["status"]) == ("", "host not installed")
    versions.update({"fla-core": "0.5.2", "transformers": "5.24.0"})
    fla, transformers = found()
    assert fla["place"] == "fla.ops.backends" and transformers["place"] == "the registry of fla"
    del versions["fla-core"]
    _, transformers = found()
    assert transformers["place"] == "the functions of transformers.models"
    monkeypatch.setenv("KDACORE_INTEGRATIONS", "fla")
    config.refresh()
    assert only_problem(diagnose(capsys, "--no-selfcheck")) == (
        "environment variable KDACORE_INTEGRATIONS: names 'fla', which is not installed"
    )


def test_calls_of_integrations_are_shown() -> None:
    found = doctor.collect(selfchecks=False)
    hook = HookStatus("chunk_kda", "fla.backends, registry of chunk_kda", 41, 2, "K=300")
    found["integrations"][0]["hooks"] = [dataclasses.asdict(hook)]
    text = io.StringIO()
    render(found, Console(file=text, width=200))
    assert re.search(r"chunk_kda +fla.backends, registry of chunk_kda +41 +2 +K=300", text.getvalue())


def test_absence_is_not_a_failure(capsys: Capture) -> None:
    gpu = Requirement("a quantum unit", lambda: "no quantum unit", "pip install 'quantum[unit]'")
    add(name="quantum", requirements=(gpu,), ops={"chunk_kda": reference_op("chunk_kda")})
    found = diagnose(capsys, "--no-selfcheck")
    row = next(b for b in found["backends"] if b["name"] == "quantum")
    assert row["status"] == "not available"
    assert row["missing"] == [
        {"name": "a quantum unit", "what": "no quantum unit", "remedy": "pip install 'quantum[unit]'"}
    ]
    answers = [a for a in found["features"] if a["backend"] == "quantum"]
    assert {a["answer"] for a in answers} > {"yes"}, "what it could do is shown all the same"


def test_a_call_can_be_explained_too(capsys: Capture) -> None:
    words = ["--op", "chunk_kda", "--shape", "1,64,2,2,16,16", "--kind", "numpy", "--device", "cpu"]
    found = diagnose(capsys, "--no-selfcheck", *words)
    assert found["call"]["backend"] == "reference"
    assert cli.main(["doctor", "--no-selfcheck", *words]) == 0
    said = capsys.readouterr().out
    assert all(
        " ".join(line.split()) in " ".join(said.split()) for line in found["call"]["text"].splitlines()
    )


def test_what_is_said_of_no_call(capsys: Capture) -> None:
    assert cli.main(["doctor", "--no-selfcheck", "--backend", "nosuch", "--kind", "numpy"]) == 2
    assert "--kind, --backend: about a call; --op says which" in capsys.readouterr().err


def test_a_call_under_a_bad_preference(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_BACKEND", "nonsense")
    config.refresh()
    words = ["--op", "chunk_kda", "--kind", "numpy", "--device", "cpu"]
    said = diagnose(capsys, "--no-selfcheck", *words)["call"]["text"]
    assert said.startswith("KDACORE_BACKEND='nonsense'; wanted one of reference")
    assert cli.main(["doctor", "--no-selfcheck", *words, "--dtype", "float99"]) == 2


def test_text_and_json_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fact of a report with problems of many kinds stands in the text."""
    monkeypatch.setenv("KDACORE_BACKEND", "nonsense,reference")
    config.refresh()
    gpu = Requirement("a quantum unit", lambda: "no quantum unit", "pip install quantum")
    chunk = dataclasses.replace(reference_op("chunk_kda"), verified_archs=frozenset({"sm_75"}))
    add(name="quantum", requirements=(gpu,), ops={"chunk_kda": chunk}, summary="for another day")
    add(name="wrong", ops={"chunk_kda": OpImpl(_copies_values, serves=FEATURES)})
    _add_checks([("kernels", False, "3 kernels are stale"), ("tables", True, "fresh")])
    found = doctor.collect(call=CallDescription(kind="numpy"))
    text = io.StringIO()
    render(found, report.console(text))
    lost = [leaf for leaf in _leaves(found) if not any(form in text.getvalue() for form in leaf)]
    assert not lost
    assert found["exit"] == 1 and len(found["problems"]) >= 3


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, ...]]:
    """Each fact, in the forms it may take in the text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    elif isinstance(value, str):
        for line in value.splitlines():
            yield (line.strip(),)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield (f"{value:.1e}", f"{value:.0e}", f"schema {value}", f"exit {value}", str(value))


UNREADABLE = "x" * 300
"""A folder that not even root can look into: no file system takes the name."""


def _a_call() -> None:
    """One whose plan is not cached yet, as in a fresh process."""
    cost_tables.forget()
    plan.clear()
    x = np.zeros((1, 4, 1, 8), np.float32)
    kdacore.chunk_kda(x, x, x, x, x[..., 0])


@pytest.mark.parametrize(
    ("name", "state"), [(UNREADABLE, "unreadable"), ("file", "not a folder"), ("file/x", "not a folder")]
)
def test_a_cache_folder_that_cannot_be_used(
    name: str, state: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs what would have been kept there, and no call."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path / name))
    config.refresh()
    _a_call()
    found = diagnose(capsys, "--no-selfcheck")
    assert found["caches"] == [{"path": str(tmp_path / name), "state": state, "files": 0, "bytes": 0}]


def test_states_of_a_cache_folder(capsys: Capture, tmp_path: Path) -> None:
    def states() -> list[str]:
        return [row["state"] for row in diagnose(capsys, "--no-selfcheck")["caches"]]

    assert states() == ["absent"]
    (tmp_path / "cache" / "cuda").mkdir(parents=True)
    assert states() == ["writable", "writable"]


# --- everything it checks, broken ---------------------------------------------------------------------------------


def _copies_values(request: Request, inputs: Any) -> Outputs:
    return Outputs(inputs.v, inputs.initial_state)


def _raises(request: Request, inputs: Any) -> Outputs:
    raise RuntimeError("the kernel caught fire")


def _not_finite(request: Request, inputs: Any) -> Outputs:
    return Outputs(inputs.v * float("nan"))


def no_state(request: Request) -> Reason | None:
    return (
        Reason("state", "no states") if request.has("initial_state") or request.output_final_state else None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "status", "said"),
    [
        (_copies_values, "wrong", "relative error"),
        (_raises, "FAILED", "the kernel caught fire"),
        (_not_finite, "wrong", "not finite"),
    ],
)
def test_wrong_results(forward: Callable[..., Outputs], status: str, said: str, capsys: Capture) -> None:
    add(name="liar", ops={"chunk_kda": OpImpl(forward, serves=FEATURES, verifiers=(no_state,))})
    found = diagnose(capsys)
    rows = [c for c in found["selfchecks"] if c["backend"] == "liar"]
    assert rows and {c["status"] for c in rows} == {status}
    assert all(p["where"] == "backend liar" and said in p["what"] for p in found["problems"])
    assert diagnose(capsys, "--no-selfcheck")["problems"] == []


def _log_decay(request: Request) -> Reason | None:
    return None if request.gate == "log" else Reason("gate", "the log decay only")


def _wrong_state(request: Request, inputs: Any) -> Outputs:
    out = reference_op("chunk_kda").forward(request, inputs)
    return out if out.final_state is None else out._replace(final_state=2 * out.final_state)


def _unasked_state(request: Request, inputs: Any) -> Outputs:
    out = reference_op("chunk_kda").forward(request, inputs)
    return out._replace(final_state=inputs.v) if out.final_state is None else out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "verifiers", "said"),
    [
        (_wrong_state, (_log_decay,), "relative error"),
        (_unasked_state, (no_state,), "final_state, which was not asked for"),
    ],
)
def test_wrong_states(
    forward: Callable[..., Outputs], verifiers: tuple[Any, ...], said: str, capsys: Capture
) -> None:
    """Also of a backend so narrow that none of the plain calls it serves asks for a state."""
    add(name="liar", ops={"chunk_kda": OpImpl(forward, serves=FEATURES, verifiers=verifiers)})
    assert said in only_problem(diagnose(capsys))


def test_a_compiled_only_backend_is_marked(capsys: Capture) -> None:
    add(
        name="untested",
        ops={"kda_gate": dataclasses.replace(reference_op("kda_gate"), verified_archs=frozenset())},
    )
    found = diagnose(capsys)
    assert {c["mark"] for c in found["selfchecks"] if c["backend"] == "untested"} == {"compiled only"}
    row = next(b for b in found["backends"] if b["name"] == "untested")
    assert row["ops"]["kda_gate"] == {"verified_on": [], "here": "compiled only"}


def test_a_probe_that_raises(capsys: Capture) -> None:
    def probe() -> str | None:
        raise OSError("the bus is gone")

    add(
        name="broken",
        requirements=(Requirement("bus", probe, "-"),),
        ops={"kda_gate": reference_op("kda_gate")},
    )
    said = only_problem(diagnose(capsys))
    assert said.startswith("backend broken: a probe raised OSError('the bus is gone')\nTraceback")


def test_a_verifier_that_raises(capsys: Capture) -> None:
    def verifier(request: Request) -> Reason | None:
        raise KeyError("arch")

    add(name="broken", ops={"kda_gate": OpImpl(print, serves=FEATURES, verifiers=(verifier,))})
    found = diagnose(capsys, "--no-selfcheck")
    assert "raised KeyError('arch')" in only_problem(found)
    answers = {a["answer"] for a in found["features"] if a["backend"] == "broken"}
    assert "no: verifier_error" in answers


def _add_checks(rows: list[tuple[str, bool, str]] | None) -> None:
    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return []

        @hookimpl
        def kdacore_doctor_checks(self) -> list[tuple[str, bool, str]]:
            if rows is None:
                raise ValueError("cannot look")
            return rows

    REGISTRY.register(Plugin(), "checker")


def test_rows_of_plugins(capsys: Capture) -> None:
    _add_checks([("kernels", True, "3 kernels"), ("tables", False, "a table is torn")])
    found = diagnose(capsys, "--no-selfcheck")
    assert found["checks"] == [
        {"plugin": "checker", "name": "kernels", "passed": True, "detail": "3 kernels"},
        {"plugin": "checker", "name": "tables", "passed": False, "detail": "a table is torn"},
    ]
    assert only_problem(found) == "plugin checker: check 'tables' failed: a table is torn"


def test_a_check_that_raises(capsys: Capture) -> None:
    _add_checks(None)
    assert "raised ValueError('cannot look')" in only_problem(diagnose(capsys, "--no-selfcheck"))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KDACORE_VALIDATE", "maybe", "is 'maybe'; wanted 'shapes' or 'values'"),
        ("KDACORE_SELFCHECK", "yes", "is 'yes'; wanted '0' or '1'"),
        ("KDACORE_PLUGIN_IMPORT_LIMIT", "soon", "is 'soon'; wanted a number of seconds"),
        ("KDACORE_BACKEND", "nonsense", "names 'nonsense', which is no backend here"),
    ],
)
def test_a_bad_environment_variable(
    variable: str, value: str, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(config, "_config", None)
    found = diagnose(capsys, "--no-selfcheck")
    assert only_problem(found) == f"environment variable {variable}: {said}"
    assert {"name": variable, "value": value, "meaning": config.VARIABLES[variable]} in found["environment"]
    assert found["backends"], "everything else is still looked at"


def test_an_unknown_variable_is_shown(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_BAKCEND", "triton")
    found = diagnose(capsys, "--no-selfcheck")
    meaning = "not a variable kdacore reads; did you mean 'KDACORE_BACKEND'?"
    assert {"name": "KDACORE_BAKCEND", "value": "triton", "meaning": meaning} in found["environment"]
    text = io.StringIO()
    summary(found, Console(file=text, soft_wrap=True, highlight=False, markup=False))
    assert f"KDACORE_BAKCEND=triton: {meaning}" in " ".join(text.getvalue().split())


def test_a_framework_that_does_not_import(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Machine(
        (Row("torch", "installed, does not work", "torch 9 fails to import: OSError: libfoo"),),
        (),
        ("numpy",),
    )
    monkeypatch.setattr(machine, "probe", lambda: broken)
    assert (
        only_problem(diagnose(capsys, "--no-selfcheck")) == "torch: torch 9 fails to import: OSError: libfoo"
    )


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('{}')", ""),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("import os; os.abort()", "crashed with signal 6"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("print('hello')", "answered 'hello'"),
    ],
)
def test_probes_in_a_child(code: str, problem: str) -> None:
    assert machine.child(code, 20.0 if "sleep" not in code else 0.5)[1] == problem


# --- plugins of other distributions -------------------------------------------------------------------------------

GOOD = """
    from kdacore.hookspecs import hookimpl
    from kdacore.types import Backend, OpImpl
    @hookimpl
    def kdacore_backends():
        return [Backend(name="{name}", version="1.0", kinds=("numpy",), ops={{}}{more})]
"""


def test_a_broken_plugin_is_shown_and_stops_nobody(distribution: Any, capsys: Capture) -> None:
    distribution("broken-one", "import no_such_module_at_all\n")
    distribution("good-one", GOOD.format(name="good", more=""))
    found = diagnose(capsys, "--no-selfcheck")
    row = next(p for p in found["plugins"] if p["name"] == "broken-one")
    assert (row["distribution"], row["status"]) == ("broken-one", "problem")
    assert "Traceback" in row["detail"] and "no_such_module_at_all" in row["detail"]
    assert only_problem(found).startswith(
        "plugin broken-one (broken-one): failed to import: ModuleNotFoundError"
    )
    assert [b["name"] for b in found["backends"]] == ["reference", "good"]


def test_a_slow_import(distribution: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_PLUGIN_IMPORT_LIMIT", "0.05")
    config.refresh()
    distribution("slow-one", "    import time; time.sleep(0.2)\n" + GOOD.format(name="slow", more=""))
    found = diagnose(capsys, "--no-selfcheck")
    assert "slow import: 0.2 s, more than the limit of 0.05 s" in only_problem(found)
    assert "slow" in [b["name"] for b in found["backends"]], "slow is still usable"


def test_a_name_clash_names_both(distribution: Any, capsys: Capture) -> None:
    distribution("first-one", GOOD.format(name="same", more=""))
    distribution("second-one", GOOD.format(name="same", more=""))
    said = only_problem(diagnose(capsys, "--no-selfcheck"))
    assert "name conflict: backend 'same' comes from both first-one and second-one" in said


def test_the_wrong_api_version(distribution: Any, capsys: Capture) -> None:
    distribution("old-one", GOOD.format(name="old", more=", api_version=0"))
    found = diagnose(capsys, "--no-selfcheck")
    assert "was written for plugin API 0; this kdacore has 2" in only_problem(found)


def test_a_disabled_plugin_is_no_problem(
    distribution: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDACORE_DISABLE_PLUGINS", "broken-one")
    config.refresh()
    distribution("broken-one", "import no_such_module_at_all\n")
    found = diagnose(capsys, "--no-selfcheck")
    assert [p["status"] for p in found["plugins"]] == ["ok", "disabled"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("good-plugin", "names 'good-plugin', which is no third-party plugin here"),
        ("good-one,reference", "names 'reference', which is no third-party plugin here"),
        ("good-one", ""),
        ("all", ""),
    ],
)
def test_disabling_a_plugin_that_is_not_there(
    named: str, said: str, distribution: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDACORE_DISABLE_PLUGINS", named)
    config.refresh()
    distribution("good-one", GOOD.format(name="good", more=""))
    found = diagnose(capsys, "--no-selfcheck")
    if said:
        assert only_problem(found) == f"environment variable KDACORE_DISABLE_PLUGINS: {said}"
    else:
        assert not found["problems"]


def test_disabling_a_plugin_by_its_distribution(
    distribution: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDACORE_DISABLE_PLUGINS", "good-one")
    config.refresh()
    distribution("good-one", GOOD.format(name="good", more=""), "good")
    said = only_problem(diagnose(capsys, "--no-selfcheck"))
    assert said.endswith("no third-party plugin here; the plugin of that distribution is named good")


def test_what_plugins_print_does_not_spoil_the_json(distribution: Any, capsys: Capture) -> None:
    more = ", requirements=(__import__('kdacore').types.Requirement('x', lambda: print('probing'), '-'),)"
    distribution("chatty-one", "    print('hello')\n" + GOOD.format(name="chatty", more=more))
    assert diagnose(capsys, "--no-selfcheck")["problems"] == []


def test_a_plugin_that_exits_at_import(distribution: Any, capsys: Capture) -> None:
    distribution("leaving-one", "import sys; sys.exit(3)\n")
    assert "failed to import: SystemExit(3)" in only_problem(diagnose(capsys, "--no-selfcheck"))


CRASHES = """
    import os
    from kdacore.hookspecs import hookimpl
    from kdacore.types import Backend, OpImpl
    def forward(request, inputs):
        os.abort()
    @hookimpl
    def kdacore_backends():
        gate = OpImpl(forward, serves=frozenset({"gate.bounded", "gate.unbounded"}))
        return [Backend(name="crash", version="1.0", kinds=("numpy",), ops={"kda_gate": gate})]
"""


def test_a_backend_that_crashes_the_process(distribution: Any, small_machine: Machine) -> None:
    distribution("crash-one", CRASHES)
    (row,) = doctor_selfcheck.run(REGISTRY.get("crash"), small_machine, in_child=True)
    assert (row.status, row.op) == ("FAILED", "kda_gate on cpu, numpy")
    assert row.detail == "crashed with signal 6"


def test_numpy_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the base dependencies alone NumPy has no bfloat16; the check uses float32 and passes."""
    monkeypatch.setattr(doctor_selfcheck, "version_of", lambda name: "")
    asked = doctor_selfcheck.requests(REGISTRY.get("reference"), [Place("numpy"), Place("torch")])
    assert {r.dtype for r in asked if r.kind == "numpy"} == {"float32"}
    assert {r.dtype for r in asked if r.kind == "torch"} == {"float32", "bfloat16"}


def test_a_child_reports_what_it_measured(small_machine: Machine) -> None:
    registered = REGISTRY.get("reference")
    here = doctor_selfcheck.run(registered, small_machine, in_child=False)
    there = doctor_selfcheck.run(registered, small_machine, in_child=True)
    assert [(c.op, c.call, c.status) for c in here] == [(c.op, c.call, c.status) for c in there]


def test_caches_are_measured(capsys: Capture) -> None:
    root = config.get().cache_dir
    (root / "selfcheck" / "cpu").mkdir(parents=True)
    (root / "selfcheck" / "cpu" / "a.json").write_text("12345")
    found = diagnose(capsys, "--no-selfcheck")
    assert [(c["path"], c["files"], c["bytes"]) for c in found["caches"]] == [
        (str(root), 1, 5),
        (str(root / "selfcheck"), 1, 5),
    ]


def test_kernels_that_were_refused_before_are_shown(capsys: Capture) -> None:
    record = config.get().cache_dir / "selfcheck" / "sm_120" / "other-make-chunk_kda-0123.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"error": 0.25, "bound": 0.018, "failure": "", "misfit": ""}))
    (found,) = diagnose(capsys, "--no-selfcheck")["refusals"]
    assert found == {
        "backend": "other-make",
        "op": "chunk_kda",
        "arch": "sm_120",
        "found": "2.5e-01, bound 1.8e-02",
        "file": str(record),
    }
    cli.main(["doctor", "-v", "--no-selfcheck"])
    said = capsys.readouterr().out
    assert "gave wrong results before" in said and "other-make" in said
    cli.main(["doctor", "--no-selfcheck"])
    assert "1 kernels gave wrong results here" in capsys.readouterr().out
    record.unlink()
    cli.main(["doctor", "-v", "--no-selfcheck"])
    assert "gave wrong results before" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_command_on_the_real_machine(tmp_path: Path) -> None:
    """Nothing replaced: every built-in plugin, the real probes."""
    import os
    import subprocess
    import sys

    env = {**os.environ, "KDACORE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kdacore", "doctor", "--json", "--no-selfcheck"],
        capture_output=True,
        text=True,
        env=env,
    )
    found = json.loads(done.stdout)
    assert done.returncode == found["exit"]
    assert [p["name"] for p in found["plugins"]][:4] == [
        f"kdacore_{name}" for name in ("reference", "triton", "cuda", "pallas")
    ]
    assert {row["name"] for row in found["machine"]} >= {"system", "cpu", "torch", "jax", "nvidia driver"}


def test_a_backend_verified_on_cpus_is_verified_on_a_cpu(
    every_backend: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suite of ``xla`` has passed on CPUs; ``pallas`` has run on no TPU, and there is none here."""
    cli.main(["doctor", "--json", "--no-selfcheck"])
    backends = {b["name"]: b["ops"]["chunk_kda"] for b in json.loads(capsys.readouterr().out)["backends"]}
    assert backends["xla"] == {"verified_on": ["CPUs"], "here": "verified"}
    assert backends["reference"] == {"verified_on": ["any hardware"], "here": "verified"}
    assert backends["pallas"] == {"verified_on": [], "here": "no device"}
    assert backends["triton"]["here"] == "no device"


WITHOUT_FRAMEWORKS = """
import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {"cuda", "jax", "jaxlib", "torch", "triton"}
        return None if absent else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
from kdacore.cli.main import main

sys.exit(main(["doctor", "--no-selfcheck"]))
"""


def test_where_no_framework_is_installed(tmp_path: Path) -> None:
    """As after ``pip install kdacore`` alone: missing packages are no problem of the backends."""
    import os
    import subprocess
    import sys

    env = {**os.environ, "KDACORE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_FRAMEWORKS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "torch is not installed and jax is not installed; to get it: pip install '.[cuda]' in a checkout of kdacore"
        in " ".join(done.stdout.split())
    )


@pytest.mark.usefixtures("every_backend")
def test_the_quick_checks_wait_for_no_compiled_gradient() -> None:
    """Without -v: what JAX would compile for a minute is left out, nothing of NumPy and torch is."""
    kinds = [Place("jax"), Place("numpy"), Place("torch")]
    xla = REGISTRY.get("xla")
    all_of_them, quick = (doctor_selfcheck.requests(xla, kinds, q) for q in (False, True))
    assert {r.kind for r in quick} == {"jax"} < {r.kind for r in all_of_them}
    assert any(r.needs_grad for r in all_of_them) and not any(r.needs_grad for r in quick)
    assert {r.op for r in quick} == {r.op for r in all_of_them}
    reference = REGISTRY.get("reference")
    own, others = [Place("numpy"), Place("torch")], [Place("jax")]
    assert doctor_selfcheck.requests(reference, own, True) == doctor_selfcheck.requests(reference, own)
    assert not doctor_selfcheck.requests(reference, others, True)
