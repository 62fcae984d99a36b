"""Measured cost tables: how long each backend took for a call of a given class, and a prediction from them.

Tables ship as ``kdacore/dispatch/profiles/<arch>.json``. A prediction scales the nearest measured row, so it is
trusted only near one.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources

from kdacore.types import Request

SCHEMA = 1
_FAR = math.log(4.0)
"""A row more than four times away in tokens, heads or sequences says too little to decide anything."""

_LIKE = {"fused_recurrent_gated_delta_rule": "fused_recurrent_kda"}
"""Op -> another whose rows tell of it too: both read and write the same states, which is what takes the time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: ``seconds`` for ``tokens`` tokens in ``sequences`` sequences and ``heads`` value heads."""

    backend: str
    op: str
    kind: str
    dtype: str
    grad: bool
    K: int
    V: int
    tokens: int
    sequences: int
    heads: int
    seconds: float


def parse(text: str) -> tuple[Row, ...]:
    """Rows of a table. ValueError when it is not one this version understands."""
    table = json.loads(text)
    if table.get("schema") != SCHEMA:
        raise ValueError(f"cost table schema {table.get('schema')!r}; wanted {SCHEMA}")
    return tuple(Row(**row) for row in table["rows"])


def dump(rows: tuple[Row, ...]) -> str:
    """The table as text, one row a line."""
    lines = ",\n".join("  " + json.dumps({f: getattr(r, f) for f in Row.__slots__}) for r in rows)
    return f'{{"schema": {SCHEMA}, "rows": [\n{lines}\n]}}\n'


@functools.cache
def table(arch: str) -> tuple[Row, ...]:
    """The table that ships for an architecture, else nothing."""
    shipped = resources.files("kdacore.dispatch").joinpath("profiles", f"{arch or 'cpu'}.json")
    return parse(shipped.read_text()) if shipped.is_file() else ()


def predict(backend: str, request: Request) -> float | None:
    """Predicted seconds, None when nothing near was measured."""
    best: Row | None = None
    nearest = math.inf
    for row in table(request.device.arch):
        if not _same_class(row, backend, request):
            continue
        apart = (
            abs(math.log(row.tokens / (request.B * request.T))),
            abs(math.log(row.heads / request.HV)),
            abs(math.log(row.sequences / request.N)),
        )
        if max(apart) <= _FAR and sum(apart) < nearest:
            best, nearest = row, sum(apart)
    if best is None:
        return None
    return best.seconds * (request.B * request.T * request.HV) / (best.tokens * best.heads)


def _same_class(row: Row, backend: str, request: Request) -> bool:
    return (
        row.backend == backend
        and row.op in (request.op, _LIKE.get(request.op))
        and row.kind == request.kind
        and row.dtype == request.dtype
        and row.grad == request.needs_grad
        and row.K == request.K
        and row.V == request.V
    )
