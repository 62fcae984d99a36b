"""Launches that read before they wait follow the launches that they may follow, in every program."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, request_of
from gated_delta_calls import draw as draw_gated_delta

from kdacore.types import InputGrads, Request
from kdacore_cuda import choice
from kdacore_cuda.build.kernel_source import CSRC
from kdacore_cuda.forms import chunk_launches
from kdacore_cuda.forms.backward import launches as backward_launches
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.slices import by_op
from kdacore_cuda.runtime import device_figures
from kdacore_cuda.runtime.launch_order import AHEAD, OTHER_WORK, check_order
from kdacore_cuda.runtime.program import Clear, InPlace, Launch, Program


@pytest.mark.parametrize(
    "entries",
    [
        ("prepare", "maps", "chain", "output"),
        ("prepare_marked", "maps", "chain", "output"),
        ("prepare", "maps", "output"),
        ("slice_starts", "output"),
        ("slice_starts", "walk_later_segments"),
        ("slice_chain", "walk_inner_segments"),
        ("prepare", "maps", "transition"),
        ("prepare_units", "walk"),
        ("chunk_records_beside", "walk_records_beside"),
        (OTHER_WORK, "prepare", "maps"),
        ("chunk_forward", "checkpoint_tail"),
        ("recurrent",),
    ],
)
def test_orders_that_are_right(entries: tuple[str, ...]) -> None:
    check_order(entries)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (("walk",), "walk reads .* expected prepare_units right before it, got no launch of this program"),
        (("prepare", "walk"), "got prepare"),
        (
            ("chunk_records", "walk_records_beside"),
            "expected chunk_records_beside right before it, got chunk_records",
        ),
        (("prepare_units", OTHER_WORK, "walk"), "got no launch"),
        (("maps",), "expected prepare or prepare_marked right before it, got no launch"),
        (("prepare", "chain", "maps", "output"), "maps reads .* got chain"),
        (("output",), "expected chain or maps or slice_starts right before it, got no launch"),
        (("prepare", "output"), "got prepare"),
        (("prepare", "maps", "transition", "output"), "got transition"),
        (("prepare", OTHER_WORK, "maps", "output"), "maps reads"),
    ],
)
def test_orders_that_are_wrong(entries: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_order(entries)


@pytest.mark.parametrize("entry", ["output", "walk_later_segments"])
def test_which_wait_first_where_sequences_have_one_segment(entry: str) -> None:
    check_order(("prepare", entry), one_segment=True)
    check_order((entry,), one_segment=True)
    with pytest.raises(ValueError, match=f"{entry} reads"):
        check_order((entry,))
    with pytest.raises(ValueError, match="maps reads"):
        check_order(("maps", entry), one_segment=True)


WANTED = InputGrads(*[True] * len(InputGrads._fields))


def planned(monkeypatch: pytest.MonkeyPatch, T: int = 4096, **options: Any) -> Request:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    return request_of("chunk_kda", draw(T, 2, 2), **(BOUNDED_MODEL | options))


def test_programs_in_another_order_are_refused(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped, without a launch, with something between."""
    program = chunk_launches.launches_of(planned(monkeypatch)).program
    steps, given = list(program.steps), (program.arrays, program.numbers)
    assert [x.name for x in steps if isinstance(x, Launch)] == ["prepare", "maps", "output"]
    Program(steps, *given)
    for wrong in (steps[::-1], steps[1:], steps[2:], [steps[0], steps[2]]):
        with pytest.raises(ValueError, match="reads memory before it waits"):
            Program(wrong, *given)
    for step in (Clear("o", "T"), InPlace("v", "o", "T")):
        Program([step, *steps], *given)
        with pytest.raises(ValueError, match="got no launch of this program"):
            Program([steps[0], step, *steps[1:]], *given)


def check_launches(made: Launches) -> None:
    """The order of those that a call makes: executors leave out launches of no blocks."""
    steps = made.program.steps
    blocks = {x.name: made.numbers[x.grid] for x in steps if isinstance(x, Launch)}
    entries = [
        x.kernel.source.entry if isinstance(x, Launch) else OTHER_WORK
        for x in steps
        if not isinstance(x, Launch) or blocks[x.name]
    ]
    check_order(entries, one_segment=made.program.one_segment)


def test_a_launch_of_no_blocks_is_none(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = chunk_launches.launches_of(planned(monkeypatch))
    with pytest.raises(ValueError, match="maps reads"):
        check_launches(made._replace(numbers=made.numbers | {"prepare_blocks": 0}))
    check_launches(made._replace(numbers=dict.fromkeys(made.numbers, 0)))


@pytest.mark.parametrize("form", ["segments", "dataflow", "fused"])
@pytest.mark.parametrize("T", [1, 64, 640, 8192])
def test_whole_calls(emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int, form: str) -> None:
    """Launches follow in every call, whatever its lengths."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: form == "segments")
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: form == "dataflow")
    request = planned(monkeypatch, T, output_final_state=True)
    assert chosen(request).form == form
    check_launches(chunk_launches.launches_of(request))
    for made in backward_launches.launches_of(request, WANTED):
        check_launches(made)


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("T", [1, 64, 640, 8192])
def test_slices(emulated: list[str], T: int, options: dict[str, Any]) -> None:
    """Both parts of a slice are programs of their own, with whatever another library launches between."""
    request = request_of("chunk_kda", draw(T, 1, 1), output_final_state=True, **options)
    made = by_op.forward_launches(request)
    assert made.finish is not None
    check_launches(made.begin)
    check_launches(made.finish)
    begin, scan, second, _ = by_op.backward_launches(request, WANTED)
    assert scan is not None
    for part in (begin, scan, second):
        check_launches(part)


@pytest.mark.parametrize("T", [1, 64, 640, 8192])
def test_slices_of_the_gated_delta_rule(emulated: list[str], T: int) -> None:
    request = request_of("chunk_gated_delta_rule", draw_gated_delta(T), output_final_state=True, **MODEL)
    made = by_op.forward_launches(request)
    assert made.finish is not None
    begin, scan, gradients, _ = by_op.backward_launches(request, WANTED)
    assert scan is None
    for part in (made.begin, made.finish, begin, gradients):
        check_launches(part)


def test_every_kernel_that_reads_before_it_waits_is_named() -> None:
    """Of all others the wait is a statement that every thread reaches. test_compiled.py asks the machine code."""
    late = set()
    for path in CSRC.rglob("*.cu"):
        text = path.read_text()
        body = text[text.index("KDA_KERNEL(") :]
        found = re.search(r"(\w+)\(KDA_PARAM", body)
        assert found is not None
        waits = next(line for line in body.splitlines() if "wait_for_inputs()" in line)
        if not waits.startswith("  wait_for_inputs();"):
            late.add(found[1])
    assert late == AHEAD.keys()
