"""The order in which the machine code of the prepare kernels asks for a block's inputs.

Parameters (``A_log``, ``dt_bias``, ``beta``) must not be waited for before all rows have been asked for. The assembler
may reorder this; one request then came a whole memory latency late (docs/lab/cuda-segments.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from disassembly import disassemble

from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.build.packaged_cubins import CUBINS, FOLDER, row_name
from kdacore_cuda.forms.backward.kernels import prepare_kernel
from kdacore_cuda.forms.segments.kernels import segments_prepare_kernel
from kdacore_cuda.runtime.kernel import Kernel

_LOAD = re.compile(r"\b(LDG|LD)\.E\b")
_EXPONENTIAL = re.compile(r"\bMUFU\.EX2\b")
_GROUP = re.compile(r"\bLDGDEPBAR\b")
"""Ends a group of asynchronous copies."""
_WAIT = re.compile(r"\bDEPBAR\.LE SB0\b")


@pytest.mark.parametrize("float_gate", (False, True), ids=("bfloat16 gate", "float32 gate"))
@pytest.mark.parametrize(
    ("prepare", "groups"),
    (
        pytest.param(segments_prepare_kernel, 2, id="segments"),  # g, then k and q
        pytest.param(prepare_kernel, 1, id="backward"),  # v comes later, in a group of its own
    ),
)
def test_all_rows_are_asked_for_before_a_parameter_is_used(
    prepare: Callable[[bool, bool], Kernel], groups: int, float_gate: bool
) -> None:
    kernel = prepare(float_gate, True).source
    lines = disassemble(FOLDER / CUBINS.rows()[row_name(kernel, HOPPER)]["file"]).splitlines()
    asked = [i for i, line in enumerate(lines) if _GROUP.search(line)][groups - 1]
    waited = next(i for i, line in enumerate(lines) if i > asked and _WAIT.search(line))
    assert not any(_EXPONENTIAL.search(line) for line in lines[:asked])
    assert not any(_LOAD.search(line) for line in lines[asked:waited])
