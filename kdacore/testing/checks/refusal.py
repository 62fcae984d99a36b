"""Calls that must be refused: the error names the argument at fault, and no bit of any argument has changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kdacore import config
from kdacore.calls.arrays import Values, host_values
from kdacore.calls.description import specs
from kdacore.errors import ContractError
from kdacore.ops import DIFFERENTIABLE
from kdacore.testing.cases import Case
from kdacore.testing.compare import Findings
from kdacore.testing.faults import arguments_of, bad_offsets, wants_gradients
from kdacore.testing.poisoned_arrays import Placed, arrays, place, place_one
from kdacore.testing.run_call import forward

_CALLS_UNTIL_RECOGNISED = 3


def refusal(case: Case, findings: Findings) -> None:
    """One call with a fault; for every third seed after valid ones like it, which dispatch recognises by then."""
    values = host_values(case)
    placed = with_fault(case, values)
    with _values_read(case):
        if case.seed % 3 == 0:
            for _ in range(_CALLS_UNTIL_RECOGNISED):
                forward(case, _given(case, place(case, values)))
        try:
            forward(case, _given(case, placed))
        except ContractError as error:
            wanted = arguments_of(case)
            text = f"it named {error.argument}, not {' or '.join(wanted)}: {error}"
            findings.require("argument named", error.argument in wanted, text)
        else:
            findings.require("refused", False, f"a call with the fault {case.fault} ran")
    for p in placed.values():
        p.check(findings)


def with_fault(case: Case, values: Values) -> dict[str, Placed]:
    """The call's arrays, the ones at fault among them."""
    placed, wanted = place(case, values), specs(case)
    kind, _, which = case.fault.partition(":")
    if kind == "offsets":
        bad: dict[str, Any] = {
            name: place_one(case, name, x, wanted[name].dtype) for name, x in bad_offsets(case).items()
        }
        return placed | bad
    how = replace(case, negated=(which,)) if kind == "negated" else replace(case, mode="inference", seed=0)
    placed[which] = place_one(how, which, values[which], wanted[which].dtype)
    return placed


def _given(case: Case, placed: dict[str, Placed]) -> dict[str, Any]:
    """What is passed: where gradients are wanted, of everything that can ask for one."""
    given = arrays(placed)
    if not wants_gradients(case):
        return given
    return {
        name: x.detach().requires_grad_() if name in DIFFERENTIABLE and not x.is_inference() else x
        for name, x in given.items()
    }


@contextlib.contextmanager
def _values_read(case: Case) -> Iterator[None]:
    """Offsets in host memory are read at every call, others under ``KDACORE_VALIDATE=values``."""
    if case.device == "cpu" or not case.fault.startswith("offsets:"):
        yield
        return
    name = "KDACORE_VALIDATE"
    was = os.environ.get(name)
    os.environ[name] = "values"
    config.refresh()
    try:
        yield
    finally:
        del os.environ[name]
        if was is not None:
            os.environ[name] = was
        config.refresh()
