"""``OpImpl.form``: asked for where somebody asks, shown beside the backend; a plugin's fault where it is no text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore import plugin_faults, registry
from kdacore.calls.description import CallDescription
from kdacore.calls.requests import request_of
from kdacore.cli import main as cli
from kdacore.dispatch import selection
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import Backend, OpImpl, Outputs, Reason, Request, Requirement, SliceFunctions

CPU = ["chunk_kda", "--kind", "numpy", "--device", "cpu", "--dtype", "float32"]
HOPPER = ["chunk_kda", "--device", "cuda", "--arch", "sm_90"]


def zeros(request: Request, inputs: Any) -> Outputs:
    state = np.zeros(request.state_shape, np.float32) if request.output_final_state else None
    return Outputs(np.zeros_like(inputs.v), state)


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference alone."""
    monkeypatch.setattr(registry, "BUILTIN_PLUGINS", ("kdacore_reference",))
    monkeypatch.setattr(registry, "third_parties", lambda: ([], []))
    REGISTRY.reset()
    yield
    monkeypatch.undo()
    REGISTRY.reset()


def register(form: Any, name: str = "several", **fields: Any) -> None:
    """A backend whose ``chunk_kda`` has a form."""
    impl = OpImpl(zeros, serves=FEATURES, form=form, verified_archs=frozenset({"*"}), **fields.pop("op", {}))
    backend = Backend(name, "1", ("numpy", "torch"), {"chunk_kda": impl}, **{"rank": 9, **fields})

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [backend]

    REGISTRY.register(Plugin(), name)


def arguments(T: int = 5) -> dict[str, Any]:
    x = np.ones((1, T, 2, 4), np.float32)
    return {"q": x, "k": x, "v": x, "g": -x, "beta": x[..., 0]}


def by_tokens(request: Request) -> str:
    return f"long: {request.T} tokens" if request.T > 8 else f"short: {request.T} tokens"


def tensors() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(x) for name, x in arguments().items()}


# --- where it is shown --------------------------------------------------------------------------------------------


def test_explain_shows_the_form_of_the_calls_own_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    register(by_tokens)
    for T, text in ((5, "short: 5 tokens"), (9, "long: 9 tokens")):
        found = kdacore.explain("chunk_kda", **arguments(T))
        assert found.candidate("several").form == text and not found.candidate("reference").form
        assert f"     form {text}\n" in str(found)
        assert str(found).endswith(f"chosen: several, {text} (highest rank)")
        assert cli.main(["explain", *CPU, "--shape", f"1,{T},2,2,4,4", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {c["backend"]: c["form"] for c in told["candidates"]} == {"reference": "", "several": text}
        assert f"several, {text}" in told["text"]
        forced = kdacore.explain("chunk_kda", **arguments(T), backend="reference")
        assert forced.candidate("several").form == text and "chosen: reference (" in str(forced)


def test_who_cannot_serve_a_call_is_not_asked() -> None:
    asked: list[Request] = []
    register(lambda r: asked.append(r) or "one", op={"verifiers": (lambda r: Reason("no", "never"),)})
    assert kdacore.explain("chunk_kda", **arguments()).candidate("several").form == ""
    assert not asked


def test_recorded_calls_have_it_when_they_are_read() -> None:
    asked: list[int] = []

    def form(request: Request) -> str:
        asked.append(request.T)
        return by_tokens(request)

    register(form)
    with kdacore.record_selections() as ran:
        for T in (5, 5, 9):
            for _ in range(3):
                kdacore.chunk_kda(**arguments(T))
        assert len(ran) == 9 and not asked
    assert ran[0].candidate("several").form == "short: 5 tokens" == ran[0].candidate("several").form
    assert asked == [5]
    assert [s.candidate("several").form for s in ran] == ["short: 5 tokens"] * 6 + ["long: 9 tokens"] * 3
    assert (
        ran[-1].candidate("several").form == next(reversed(ran)).candidate("several").form == "long: 9 tokens"
    )
    assert [s.request.T for s in ran[5:7]] == [5, 9]
    assert kdacore.selection_of("chunk_kda", **arguments()).candidate("several").form == ""


def test_no_call_asks_for_it() -> None:
    def form(request: Request) -> str:
        raise AssertionError("a call asked")

    register(form)
    for _ in range(4):
        kdacore.chunk_kda(**arguments())
    assert not plugin_faults.faults()


def test_doctor_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    register(by_tokens)
    cli.main(["doctor", "--no-selfcheck", "--op", *CPU, "--shape", "1,5,2,2,4,4", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert "several, short: 5 tokens" in json.dumps(told)


def test_benchmark_rows_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    from kdacore import report
    from kdacore.bench import runner
    from kdacore.bench.cases import Case
    from kdacore.bench.clock import Budget
    from kdacore.bench.results import row_table

    register(by_tokens)
    case = Case(name="tiny", op="chunk_kda", kind="numpy", dtype="float32", B=1, T=5, H=2, K=4, V=4)
    rows = {r.contender: r for r in runner.run_case("test", case, "random", "cpu", (), Budget(2, 0.1)).rows}
    assert rows["kdacore several"].form == "short: 5 tokens" and rows["kdacore reference"].form == ""
    assert re.search(r"several, short", str(row_table(list(rows.values()), report.console())))


# --- slices -------------------------------------------------------------------------------------------------------


def test_a_slice_has_a_form_of_its_own() -> None:
    def slices(request: Request) -> SliceFunctions:
        return SliceFunctions(print, print, print, print, form=lambda r: f"slice: {r.T} tokens")

    register(by_tokens, op={"slices": slices})
    found = kdacore.explain("chunk_kda", **tensors(), cp=2)
    assert found.candidate("several").form == "slice: 5 tokens"
    assert "chosen: several, slice: 5 tokens (" in str(found)


def test_a_slice_without_one_has_none() -> None:
    register(by_tokens, op={"slices": lambda r: SliceFunctions(print, print, print, print)})
    assert kdacore.explain("chunk_kda", **tensors(), cp=2).candidate("several").form == ""


def test_a_form_of_a_slice_that_is_no_function() -> None:
    register(
        by_tokens,
        op={"slices": lambda r: SliceFunctions(print, print, print, print, form="slices")},  # type: ignore[arg-type]
    )
    with pytest.warns(RuntimeWarning, match="has form = 'slices', no function or None"):
        kdacore.explain("chunk_kda", **tensors(), cp=2)


# --- a plugin's faults --------------------------------------------------------------------------------------------


def leaves(request: Request) -> str:
    raise SystemExit("enough")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda r: 3, "a form is a line of text; got 3"),
        (lambda r: None, "a form is a line of text; got None"),
        (lambda r: "", "a form is a line of text; got ''"),
        (lambda r: "two\nlines", "a form is a line of text"),
        (lambda r: 1 / 0, "ZeroDivisionError"),
        (leaves, "SystemExit: enough"),
    ],
)
def test_one_that_is_no_text_is_reported(form: Callable[[Request], Any], said: str) -> None:
    """Once, and the answer goes on without it; calls never notice."""
    register(form)
    with pytest.warns(RuntimeWarning, match="backend several: form of chunk_kda raised") as caught:
        for _ in range(2):
            found = kdacore.explain("chunk_kda", **arguments())
    assert len(caught) == 1 and said in str(caught[0].message)
    assert found.backend == "several" and found.candidate("several").form == ""
    (fault,) = plugin_faults.faults()
    assert fault.where == "backend several"
    assert kdacore.chunk_kda(**arguments())[0].shape == (1, 5, 2, 4)


def test_an_interrupt_passes() -> None:
    def form(request: Request) -> str:
        raise KeyboardInterrupt

    register(form)
    with pytest.raises(KeyboardInterrupt):
        kdacore.explain("chunk_kda", **arguments())


# --- hardware that is not here ------------------------------------------------------------------------------------


def needs(**fields: Any) -> None:
    register(
        by_tokens,
        requirements=(
            Requirement("board", lambda: "no board", "buy one", hardware=True),
            Requirement("library", lambda: "no library", "pip install library"),
        ),
        op={
            "verifiers": (
                lambda r: Reason("unavailable", "has no compiler", r.device.arch, "pip install cc"),
            )
        },
        **fields,
    )


def test_assumed_hardware_is_answered_for_with_packages_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """What would run, and the lines that install what it needs."""
    needs()
    assert cli.main(["explain", *HOPPER]) == 0
    lines = capsys.readouterr().out.splitlines()
    lacking = ["no board", "no library; to get it: pip install library"]
    lacking.append("has no compiler (got sm_90; wanted pip install cc)")
    assert [line for line in lines if "not here" in line] == [f"     assumed, not here: {x}" for x in lacking]
    assert lines[-4:] == [
        "chosen: several, long: 4096 tokens (highest rank)",
        "on sm_90: several, long, no time measured",
        "to get it: pip install library",
        "to get it: pip install cc",
    ]
    assert cli.main(["explain", *HOPPER, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert next(c["lacking"] for c in told["candidates"] if c["backend"] == "several") == lacking


def test_calls_that_are_made_need_it_all() -> None:
    needs()
    found = kdacore.explain("chunk_kda", **arguments())
    assert found.backend == "reference"
    assert {r.code for r in found.candidate("several").reasons} == {"unavailable"}
    assert len(found.candidate("several").reasons) == 3 and not found.candidate("several").form


def test_a_program_for_elsewhere_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled here, by them."""
    from kdacore import device

    needs()
    monkeypatch.setattr(device, "compiled_for_elsewhere", lambda request: True)
    traced = CallDescription(device="cuda", arch="sm_90", kind="jax", dtype="bfloat16", traced=True)
    judged = selection.judge(REGISTRY.get("several"), request_of(traced))
    assert "no board" in judged.lacking
    assert "no library; to get it: pip install library" in [r.message for r in judged.reasons]
