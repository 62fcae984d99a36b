"""Launches that read before they wait follow the launches that they may follow, in every program."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, request_of

from kdacore_cuda.build.kernel_source import CSRC
from kdacore_cuda.forms import chunk_forward_launches
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_cuda.forms.slices import launches as chunk_slices_launches
from kdacore_cuda.runtime import device_figures
from kdacore_cuda.runtime.launch_order import AHEAD, OTHER_WORK, check_order
from kdacore_cuda.runtime.launch_program import Clear, InPlace, make_program
from kdacore_cuda.runtime.launch_sequence import LaunchSequence, PlannedLaunch, check_launches


@pytest.mark.parametrize(
    "entries",
    [
        ("prepare", "maps", "chain", "output"),
        ("prepare_marked", "maps", "chain", "output"),
        ("prepare", "maps", "output"),
        ("slice_starts", "output"),
        ("prepare", "maps", "transition"),
        ("prepare_units", "walk"),
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


def test_output_waits_first_where_sequences_have_one_segment() -> None:
    check_order(("prepare", "output"), one_segment=True)
    check_order(("output",), one_segment=True)
    with pytest.raises(ValueError, match="maps reads"):
        check_order(("maps", "output"), one_segment=True)


def planned(
    monkeypatch: pytest.MonkeyPatch, T: int = 4096, **options: Any
) -> tuple[Any, list[PlannedLaunch]]:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    request = request_of("chunk_kda", draw(T, 2, 2), **(BOUNDED_MODEL | options))
    return request, list(chunk_forward_launches.launches_of(request).launches)


def test_programs_in_another_order_are_refused(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of cached calls, and programs for JAX: swapped, without a launch, with something between."""
    _, launches = planned(monkeypatch)
    names = tuple({name for x in launches for name, _ in x.arrays.values()})
    assert [x.name for x in launches] == ["prepare", "maps", "output"]
    LaunchSequence(launches, names)
    wrong = (launches[::-1], launches[1:], launches[2:], [*launches[:1], launches[2]])
    for steps in wrong:
        with pytest.raises(ValueError, match="reads memory before it waits"):
            LaunchSequence(steps, names)
        with pytest.raises(ValueError, match="reads memory before it waits"):
            make_program(steps, names, (), "sm_90a", 90, 132)
    for step in (Clear("o", 16), InPlace("v", "o", 16)):
        check_launches([step, *launches])
        with pytest.raises(ValueError, match="got no launch of this program"):
            make_program([launches[0], step, *launches[1:]], names, (), "sm_90a", 90, 132)


def test_a_launch_of_no_blocks_is_none(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, launches = planned(monkeypatch)
    with pytest.raises(ValueError, match="maps reads"):
        check_launches([launches[0]._replace(grid=0), *launches[1:]])
    check_launches([x._replace(grid=0) for x in launches])


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("T", [1, 64, 640, 8192])
def test_slices(emulated: list[str], T: int, options: dict[str, Any]) -> None:
    """Both parts of a slice are programs of their own, with whatever another library launches between."""
    request = request_of("chunk_kda", draw(T, 1, 1), output_final_state=True, **options)
    chunk_forward_slices.plan_of(request)
    made = chunk_slices_launches.forward_launches(request)
    check_launches(made.begin)
    check_launches(made.finish)


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
