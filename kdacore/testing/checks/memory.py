"""Results have memory of their own: a caller who changes one changes no argument and no other result.

Dispatch looks at the first results of each kind of call. The suite looks at all of them, also at those of calls that
are recognised and of gradients that it asks a backend for itself.
"""

from __future__ import annotations

from typing import Any

from kdacore.arrays import memory_of
from kdacore.testing.cases import Case
from kdacore.testing.compare import Findings
from kdacore.testing.poisoned_arrays import Placed


def check_memory(case: Case, placed: dict[str, Placed], results: dict[str, Any], findings: Findings) -> None:
    """Results, and gradients, by name; nothing is found of JAX arrays, which nobody can change.

    ``out`` and a pool that the call writes are results too, and left out here.
    """
    written = {"o"} if "out" in placed else set()
    if case.family == "commit" or case.option("inplace_state", False):
        written |= {"final_state", "conv_state"}
    others = {name: memory for name, p in placed.items() if (memory := memory_of(p.view))}
    for name, x in results.items():
        memory = memory_of(x)
        if memory is None or name in written:
            continue
        findings.require(
            f"{name} overlaps itself nowhere", not memory.overlaps_itself(), "elements share memory"
        )
        shared = [other for other, theirs in others.items() if memory.overlaps(theirs)]
        findings.require(
            f"{name} has memory of its own", not shared, f"it shares some with {', '.join(shared)}"
        )
        others[f"result {name}"] = memory
