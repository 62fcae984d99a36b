"""Write docs/guide/features.md: ``python -m codegen.features_page``.

What each backend serves, asked of its declarations and verifiers as ``kdacore doctor`` asks them, on the devices that
it is for. A test fails when the page is not what this program would write.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from kdacore.feature_matrix import Answer, matrix
from kdacore.machine import Machine
from kdacore.ops import OPS
from kdacore.registry import OWN_DISTRIBUTION, REGISTRY, Registered

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "features.md"
FAMILIES = ("chunk", "recurrent", "decode", "commit", "gate")
HEAD = """# What each backend serves

Written by `python -m codegen.features_page` from the backends' declarations; do not edit. "yes": on every
device that the backend is chosen for. A list: only there. "no": declined, with the reason codes of
[Writing a backend](writing-a-backend.md#everything-else-verifiers). "-": the array library has no such call.
The ops of a table answer alike. `kdacore doctor NAME` prints the same of a backend of yours, and
`kdacore explain` answers for one call.

"""


def page() -> str:
    """The text of the page."""
    own = [_where_chosen(r) for r in REGISTRY.backends().values() if r.distribution == OWN_DISTRIBUTION]
    answers, raised = matrix(own, Machine((), (), ("numpy", "torch", "jax")))
    if raised:
        raise RuntimeError("\n".join(raised))
    names = [r.backend.name for r in own]
    tables: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for op, definition in OPS.items():
        if definition.family in FAMILIES:
            tables.setdefault(_rows([a for a in answers if a.op == op], names), []).append(op)
    return HEAD + "\n".join([_table(ops, names, rows) for rows, ops in tables.items()])


def _where_chosen(registered: Registered) -> Registered:
    """The backend without the devices that it serves on request alone, as an interpreter on a CPU."""
    backend = registered.backend
    if backend.auto_device_types is None:
        return registered
    return dataclasses.replace(
        registered, backend=dataclasses.replace(backend, device_types=backend.auto_device_types)
    )


def _rows(answers: Iterable[Answer], names: list[str]) -> tuple[tuple[str, ...], ...]:
    """A row for each feature: its name, and what each backend answers; empty where it does not have the op."""
    cells: dict[str, dict[str, str]] = {}
    for a in answers:
        cells.setdefault(a.feature, {})[a.backend] = a.text
    return tuple((feature, *(said.get(name, "") for name in names)) for feature, said in cells.items())


def _table(ops: list[str], names: list[str], rows: tuple[tuple[str, ...], ...]) -> str:
    there = [i for i, _ in enumerate(names, 1) if any(row[i] for row in rows)]
    title = ", ".join([f"`{op}`" for op in ops])
    head = ["feature", *[f"`{names[i - 1]}`" for i in there]]
    lines = [f"## {title}", "", _line(head), _line(["---"] * len(head))]
    return "\n".join([*lines, *[_line([row[0], *[row[i] for i in there]]) for row in rows], ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    text = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print(f"written: {PAGE.relative_to(PAGE.parents[2])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
