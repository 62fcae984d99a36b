"""Make the package's table of recorded times of calls: ``python -m benchmarks.recorded_costs``.

``kdacore tune`` measures little training, no fused decode step, no call from JAX and few sizes of long calls. The
committed records of an H200 have some of each, and of kernels as they are now: they are written to
``kdacore/dispatch/profiles/recorded/sm_90.json``, which counts beside the table of ``kdacore tune`` that ships; where
both have a size, the table with the newer date counts. This one has the date of the newest record.
``--check`` writes nothing, and fails if the table differs.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import packaged_table
from kdacore.calls.description import CallDescription, options
from kdacore.calls.pools import Pool
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.dispatch import cost, cost_tables
from kdacore.dispatch.cost_tables import Columns, Group, Table, Variant
from kdacore.registry import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ARCH, DEVICE = "sm_90", "NVIDIA H200"
TABLE = ROOT / "kdacore" / "dispatch" / "profiles" / "recorded" / f"{ARCH}.json"
DIGITS = 4
"""Significant digits of a time; quartiles are further apart."""
MODEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUNDED = {**MODEL, "safe_gate": True, "lower_bound": -5.0}
"""What every timed call has the kernels do."""
Record = dict[str, Any]


class Timed(NamedTuple):
    """A call, the backend that computed it and the seconds it took."""

    call: CallDescription
    backend: str
    seconds: float


def _call(op: str, sizes: str, given: dict[str, Any], **fields: Any) -> CallDescription:
    """The call of a row, whose ``sizes`` are written as ``B1 T8192 H64``."""
    size = {letters: int(number) for letters, number in re.findall(r"\b(B|T|H|HV|K|V)(\d+)\b", sizes)}
    H = size["H"]
    shape = Shape(size["B"], size.get("T", 1), H, size.get("HV", H), size.get("K", 128), size.get("V", 128))
    fields = {"kind": "torch", "state_dtype": "float32", **fields}
    return CallDescription(
        op=op,
        device="cuda",
        arch=ARCH,
        shape=shape,
        dtype="bfloat16",
        gate_dtype="bfloat16",
        beta_dtype="bfloat16",
        index_dtype="int32",
        options=options(**given),
        **fields,
    )


def _rows(record: Record) -> Iterator[Record]:
    return (row for row in record["rows"] if row["status"] == "ok")


def fused_decode(record: Record) -> Iterator[Timed]:
    """Steps of one token, and of candidates by records or by states."""
    pools = {
        "": Pool(inplace=True),
        "records": Pool(inplace=True, records=True),
        "states": Pool(indices=2, inplace=True),
    }
    for row in _rows(record):
        if row["contender"] != "fused":
            continue
        shape = row["shape"]
        by = re.search(r" by (\w+)", shape)
        kda = shape.startswith("kda ")
        yield Timed(
            _call(
                "fused_decode_kda" if kda else "fused_decode_gated_delta_rule",
                shape,
                {**(BOUNDED if kda else MODEL), "inplace_state": True},
                state_dtype="bfloat16" if "bfloat16 state" in shape else "float32",
                pool=pools[by[1] if by else ""],
                norm="vector",
                z=True,
            ),
            row["backend"],
            row["seconds"],
        )


def jax_calls(record: Record) -> Iterator[Timed]:
    """Jitted calls of the backend that automatic choice takes."""
    decoding = {
        **MODEL,
        "inplace_state": True,
        "output_final_state": True,
    }
    for row in _rows(record):
        case = row["case"]
        if row["contender"] != "jax" or case.endswith("beside a busy thread"):
            continue
        if row["phase"] in ("forward", "forward and backward"):
            grad = row["phase"] != "forward"
            call = _call("chunk_kda", case, MODEL, kind="jax", requires_grad=grad)
        elif case.endswith("in a jitted loop"):
            call = _call("fused_recurrent_kda", case, decoding, kind="jax", pool=Pool(inplace=True))
        else:
            continue
        yield Timed(call, row["backend"], row["seconds"])


def xla(record: Record) -> Iterator[Timed]:
    """The forward, the mean of both gate sets and runs."""
    sizes = re.search(r"B\d+ T\d+ H\d+", record["what"])
    if sizes is None:
        raise ValueError("the record does not name the sizes of its call")
    for gate, given in (("safe", BOUNDED), ("unbounded", MODEL)):
        times = [r["milliseconds"] for r in record["rows"] if r["default"] and r["gate"] == gate]
        call = _call("chunk_kda", sizes[0], given, kind="jax")
        yield Timed(call, "xla", sum(times) / len(times) * 1e-3)


def xla_gradient(record: Record) -> Iterator[Timed]:
    """Forward and backward in one program."""
    sizes = re.search(r"B\d+ T\d+ H\d+", record["what"])
    if sizes is None:
        raise ValueError("the record does not name the sizes of its call")
    for row in record["rows"]:
        if row["what"].startswith("gradient"):
            call = _call("chunk_kda", sizes[0], BOUNDED, kind="jax", requires_grad=True)
            yield Timed(call, "xla", row["milliseconds"] * 1e-3)


def _ours(record: Record, call_of: Callable[[Record], CallDescription | None]) -> Iterator[Timed]:
    """Calls of our backends, the mean of the gate sets; those of which ``call_of`` makes one."""
    times: dict[tuple[CallDescription, str], list[float]] = {}
    for row in _rows(record):
        call = call_of(row) if row["contender"].startswith("kdacore ") else None
        if call is not None:
            times.setdefault((call, row["backend"]), []).append(row["seconds"])
    for (call, backend), found in times.items():
        yield Timed(call, backend, sum(found) / len(found))


def _dense(row: Record) -> bool:
    """Whether a row's calls are dense, from no state, with as many key as value heads."""
    return re.fullmatch(r"B\d+ T\d+ H\d+( unbounded)?", row["case"]) is not None


def forward(record: Record) -> Iterator[Timed]:
    """Dense calls with as many key as value heads."""

    def call_of(row: Record) -> CallDescription | None:
        given = MODEL if row["case"].endswith(" unbounded") else BOUNDED
        return _call("chunk_kda", row["shape"], given) if _dense(row) else None

    return _ours(record, call_of)


def gated_delta(record: Record) -> Iterator[Timed]:
    """Dense calls from no state that compute their decays."""

    def call_of(row: Record) -> CallDescription | None:
        if not re.fullmatch(r"B\d+ T\d+ H\d+ HV\d+", row["case"]):
            return None
        return _call("chunk_gated_delta_rule", row["shape"], MODEL)

    return _ours(record, call_of)


def decode(record: Record) -> Iterator[Timed]:
    """Calls of one token a sequence, whose states lie in a pool and are written there."""
    given = {**BOUNDED, "inplace_state": True, "output_final_state": True}
    pool = Pool(inplace=True)
    return _ours(record, lambda row: _call("fused_recurrent_kda", row["shape"], given, pool=pool))


def training(record: Record) -> Iterator[Timed]:
    """Dense calls that keep nothing for their backward, with as many key as value heads."""

    def call_of(row: Record) -> CallDescription | None:
        given = MODEL if row["case"].endswith(" unbounded") else BOUNDED
        return _call("chunk_kda", row["shape"], given, requires_grad=True) if _dense(row) else None

    return _ours(record, call_of)


def gated_delta_training(record: Record) -> Iterator[Timed]:
    """Calls that compute their decays."""

    def call_of(row: Record) -> CallDescription | None:
        if row["case"].endswith(", decay given"):
            return None
        return _call("chunk_gated_delta_rule", row["shape"], MODEL, requires_grad=True)

    return _ours(record, call_of)


SOURCES: dict[str, Callable[[Record], Iterator[Timed]]] = {
    "h200/fused-decode.json": fused_decode,
    "h200/jax-calls.json": jax_calls,
    "h200/xla.json": xla,
    "h200/xla-grad.json": xla_gradient,
    "h200/h200-forward.json": forward,
    "h200/h200-gdn.json": gated_delta,
    "h200/h200-decode.json": decode,
    "h200/h200-training.json": training,
    "h200/h200-gdn-training.json": gated_delta_training,
}
"""The records that are read, and how. No two have times of one variant."""


def table(folder: Path = RESULTS) -> Table:
    """The table, from the records in ``folder``.

    Raises:
        ValueError: two records have times of the same variant, or a record is not what it should be.
    """
    times: dict[tuple[str, Group], dict[Variant, dict[int, dict[float, list[float]]]]] = {}
    sources: dict[tuple[str, Group, Variant], str] = {}
    when = ""
    for name, read in SOURCES.items():
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        when = max([when, *[str(run["when"])[:10] for run in record.get("runs", [record])]])
        source = f"benchmarks/results/{name}"
        for call, backend, seconds in read(record):
            request = request_of(call)
            key, variant = (backend, cost.group_of(request)), cost.variant_of(request)
            if sources.setdefault((*key, variant), source) != source:
                raise ValueError(f"{name} and {sources[(*key, variant)]} both have {key}, {variant}")
            column = times.setdefault(key, {}).setdefault(variant, {}).setdefault(request.N * request.HV, {})
            column.setdefault(cost.tokens_of(request), []).append(seconds)
    return Table(
        arch=ARCH,
        device=DEVICE,
        when=when,
        backends={name: REGISTRY.get(name).backend.version for name in sorted({b for b, _ in times})},
        times=MappingProxyType(
            {
                key: {variant: _columns(columns) for variant, columns in variants.items()}
                for key, variants in times.items()
            }
        ),
        sources=MappingProxyType(sources),
    )


def _columns(columns: dict[int, dict[float, list[float]]]) -> Columns:
    """Means: calls may share their sizes, as 32 sequences of 32 heads and 128 of 8 do."""
    return {
        items: tuple(
            [
                (tokens, float(f"{statistics.mean(found):.{DIGITS}g}"))
                for tokens, found in sorted(column.items())
            ]
        )
        for items, column in sorted(columns.items())
    }


def main() -> int:
    return packaged_table.main(__doc__, lambda: cost_tables.dump(table()), TABLE, ROOT)


if __name__ == "__main__":
    sys.exit(main())
