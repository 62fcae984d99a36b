"""Write the tables and pictures of docs/performance.md and of the README from the committed results.

``python -m benchmarks.performance_page`` writes them; ``--check`` exits 1 where they are not what it would write.
A table stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. A new measurement replaces the rows of earlier
ones in the record of its preset: ``python -m benchmarks.current_records``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bar_charts import Bar, Group, draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"

FORWARD = "h200/h200-forward"
TRAINING = "h200/h200-training"
HEADS = "h200/h200-heads"
CHOICE = "h100/h200-choice"
DECODE, DECODE_GRAPH = "h200/h200-decode", "h200/h200-decode-graph"
FUSED_DECODE = "h200/fused-decode"
GATED_DELTA, GATED_DELTA_TRAINING = "h200/h200-gdn", "h200/h200-gdn-training"
STAGES = "h200/h200-stages"
HOST = "h200/h200-host"
FIRST_CALL = "h200/h200-first-call"
CPU = ("cpu/cpu", "cpu/xla", "cpu/dispatch", "cpu/import")
MEMORY_RATE = "h200/memory-rates"
XLA, XLA_GRADIENT, JAX_CALLS = "h200/xla", "h200/xla-grad", "h200/jax-calls"
TPU = "tpu-compiler/report"

OURS = {"cuda": "kdacore cuda", "triton": "kdacore triton"}
PEERS = {
    "fla-core": "fla-core",
    "flash-kda": "FlashKDA",
    "nvidia-cudnn-frontend": "cuDNN frontend",
    "flash-qla": "FlashQLA",
}
SHOWN_STAGES = (
    "B2 T512 H64",
    "B2 T8192 H64",
    "B2 T32768 H64",
    "pack of 8, 65536 tokens, ",
    "B2 T8192 HQK64",
    "pack of 8, 65536 tokens HQK64",
)
"""The record has 22 sizes; these are enough for the page."""
GATES_DIFFER = 0.02
"""Times on the two gate sets that differ by more than this are both shown."""


@dataclass
class Time:
    """Seconds of one contender by gate set; None where its result was wrong."""

    by_gates: dict[str, float | None] = field(default_factory=dict)
    peak: int | None = None

    @property
    def timed(self) -> list[float]:
        return [seconds for seconds in self.by_gates.values() if seconds is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.timed) / len(self.timed) if self.timed else None

    def text(self, unit: float) -> str:
        if not self.by_gates:
            return ""
        fastest = min(self.timed, default=0.0)
        alike = all(s is not None and s - fastest <= GATES_DIFFER * fastest for s in self.by_gates.values())
        if alike:
            return _number((self.mean or 0) / unit)
        ordered = [self.by_gates[gates] for gates in ("random", "init") if gates in self.by_gates]
        return " / ".join("wrong" if s is None else _number(s / unit) for s in ordered)


@dataclass
class Case:
    name: str
    shape: str
    times: dict[str, Time] = field(default_factory=dict)

    def size(self, letter: str) -> int:
        found = re.search(rf"\b{letter}(\d+)", self.shape)
        if found is None:
            raise ValueError(f"no {letter} in {self.shape!r}")
        return int(found[1])

    def time(self, contender: str) -> Time:
        return self.times.get(contender, Time())

    @property
    def ours(self) -> tuple[str, float]:
        """Our faster backend and its time."""
        times = {name: self.time(contender).mean for name, contender in OURS.items()}
        times["cuda"] = times["cuda"] or self.time("fused").mean
        timed = {name: seconds for name, seconds in times.items() if seconds is not None}
        best = min(timed, key=lambda name: timed[name])
        return best, timed[best]

    @property
    def peer(self) -> float | None:
        """The best time of a peer on either gate set."""
        times = [s for name, time in self.times.items() if name in PEERS.values() for s in time.timed]
        return min(times, default=None)


class Records:
    """The results files, and what was taken from each."""

    def __init__(self) -> None:
        self.contents: dict[str, dict[str, Any]] = {}
        self.used: dict[tuple[str, int], set[str]] = {}
        """What of the page was taken from each run of a record."""
        self.versions: dict[str, set[str]] = {name: set() for name in PEERS.values()}

    def read(self, name: str, part: str, run: int = 0) -> dict[str, Any]:
        """A record; ``part`` of the page is from its run of this number."""
        if name not in self.contents:
            self.contents[name] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        if part:
            self.used.setdefault((name, run), set()).add(part)
        return self.contents[name]

    def run(self, name: str, number: int) -> dict[str, Any]:
        """What a record says of one of its runs; a record of one run has it at the top."""
        record = self.contents[name]
        run: dict[str, Any] = record["runs"][number] if "runs" in record else record
        return run

    def cases(self, part: str, name: str, phase: str) -> dict[str, Case]:
        """The cases of one phase."""
        cases: dict[str, Case] = {}
        for row in self.read(name, "")["rows"]:
            if row["phase"] != phase or row["status"] not in ("ok", "wrong"):
                continue
            contender = self._contender(row["contender"])
            case = cases.setdefault(row["case"], Case(row["case"], row["shape"]))
            time = case.times.setdefault(contender, Time())
            time.by_gates[row["gates"]] = row["seconds"]
            time.peak = max(time.peak or 0, row["peak_bytes"] or 0) or None
            self.read(name, f"{part} ({contender.removeprefix('kdacore ')})", row["run"])
        return cases

    def _contender(self, name: str) -> str:
        for prefix, peer in PEERS.items():
            if name.startswith(prefix):
                self.versions[peer].add(name[len(prefix) :].strip())
                return peer
        return name

    def heading(self, peer: str) -> str:
        return f"{peer} {', '.join(sorted(self.versions[peer]))}".strip()


# --- floors ---------------------------------------------------------------------------------------


def memory_rate(records: Records) -> float:
    """Bytes a second of ``copy_`` on the longest input of the record."""
    rows = [r for r in records.read(MEMORY_RATE, "floors")["rows"] if r["name"] == "copy_"]
    return float(max(rows, key=lambda row: row["T"])["tbs"]) * 1e12


def forward_bytes(case: Case) -> int:
    """q, k, v, g and beta read once and o written once, bfloat16."""
    K, V, H, HV = (case.size(letter) for letter in ("K", "V", "H", "HV"))
    return case.size("B") * case.size("T") * 2 * (2 * K * H + (2 * V + K + 1) * HV)


def prompt_bytes(case: Case) -> int:
    """The forward, and the float32 states that are written, and read where the prompt goes on from one."""
    sequences = case.size("N") if " N" in case.shape else case.size("B")
    states = 2 if case.name.endswith("from a state") else 1
    return forward_bytes(case) + states * 4 * sequences * case.size("HV") * case.size("K") * case.size("V")


def training_bytes(case: Case) -> int:
    """The forward, and the backward: the inputs and do read once, every gradient written once."""
    K, V, H, HV = (case.size(letter) for letter in ("K", "V", "H", "HV"))
    backward = 2 * (4 * K * H + (3 * V + 2 * K + 2) * HV)
    return forward_bytes(case) + case.size("B") * case.size("T") * backward


def gated_delta_bytes(case: Case) -> int:
    """As :func:`forward_bytes`, with one gate a head."""
    K, V, H, HV = (case.size(letter) for letter in ("K", "V", "H", "HV"))
    return case.size("B") * case.size("T") * 2 * (2 * K * H + (2 * V + 2) * HV)


def gated_delta_training_bytes(case: Case) -> int:
    """As :func:`training_bytes`, with one gate a head."""
    K, V, H, HV = (case.size(letter) for letter in ("K", "V", "H", "HV"))
    backward = 2 * (4 * K * H + (3 * V + 4) * HV)
    return gated_delta_bytes(case) + case.size("B") * case.size("T") * backward


def fused_decode_bytes(case: Case) -> int:
    """Of bfloat16 channels and a convolution of width 4: states and windows read and written; x, the gate, z and o."""
    K, B, H = 128, case.size("B"), case.size("H")
    HV = case.size("HV") if " HV" in case.shape else H
    channels, state = (2 * H + HV) * K, 4 if "float32" in case.shape else 2
    gate = HV if case.shape.startswith("gdn") else HV * K
    return B * (2 * state * HV * K * K + 2 * (2 * 3 * channels + channels + gate + 2 * HV * K))


def decode_bytes(case: Case) -> int:
    """A float32 state of each sequence and head read once and written once."""
    return 2 * 4 * case.size("B") * case.size("HV") * case.size("K") * case.size("V")


@dataclass(frozen=True)
class Part:
    cases: dict[str, Case]
    floors: dict[str, float]


# --- tables ---------------------------------------------------------------------------------------


def compare(records: Records, cases: dict[str, Case], floors: dict[str, float], unit: float) -> str:
    """One row a case: the floor, ours, the peers, and both ratios."""
    shown = [peer for peer in PEERS.values() if any(peer in case.times for case in cases.values())]
    lines = []
    for case in cases.values():
        name, seconds = case.ours
        cells = [case.name, _number(floors[case.name] / unit)]
        for backend, contender in OURS.items():
            text = case.time(contender).text(unit)
            cells.append(f"**{text}**" if backend == name else text)
        cells += [case.time(peer).text(unit) for peer in shown]
        cells.append(f"{seconds / floors[case.name]:.1f}")
        cells.append(f"{case.peer / seconds:.1f}" if case.peer else "")
        lines.append(cells)
    headings = ["case", "floor", *OURS, *(records.heading(peer) for peer in shown)]
    return _table([*headings, "ours over floor", "best peer over ours"], lines)


def fused_decode_table(cases: dict[str, Case], floors: dict[str, float]) -> str:
    lines = []
    for case in cases.values():
        times = [case.time(name).text(1e-6) for name in ("fused", "chain", "recurrent")]
        lines.append([case.shape, _number(floors[case.name] * 1e6), f"**{times[0]}**", *times[1:]])
    return _table(["case", "floor", "fused", "chain", "recurrence alone"], lines)


def training_table(records: Records, cases: dict[str, Case], floors: dict[str, float]) -> str:
    memory = [
        f"{case.name}: "
        + ", ".join(
            f"{name.removeprefix('kdacore ')} {time.peak / 2**30:.2f}"
            for name, time in case.times.items()
            if time.peak
        )
        for case in cases.values()
        if case.peer
    ]
    return (
        compare(records, cases, floors, 1e-3)
        + "\nPeak memory beyond the inputs, GiB. "
        + "; ".join(memory)
        + ".\n"
    )


def stage_table(records: Records, cases: dict[str, Case]) -> str:
    """The intra stage's time is that of both stages less that of recompute, which alone has a copy beside it."""
    both, recompute = ", intra and w/u", ", w/u"
    lines = []
    for case in cases.values():
        if not case.name.startswith(SHOWN_STAGES):
            continue
        times = {name: case.time(name).mean or 0.0 for name in (OURS["cuda"], "fla-core")}
        name = case.name
        if case.name.endswith(both):
            size = case.name.removesuffix(both)
            times = {name: t - (cases[size + recompute].time(name).mean or 0.0) for name, t in times.items()}
            name = f"{size}, intra"
        ours, peer = times.values()
        copy = case.time("copy of as many bytes").text(1e-3)
        lines.append([name, _number(ours * 1e3), _number(peer * 1e3), copy, f"{peer / ours:.2f}"])
    return _table(["case", "cuda", records.heading("fla-core"), "copy", "fla-core over ours"], lines)


def choice_table(records: Records) -> str:
    """How many choices were the fastest, and those that were not within 5 %."""
    record = records.read(CHOICE, "automatic choice")
    *choices, share, worst = [f for f in record["figures"] if f["preset"] == "h200-choice"]
    said = f"{share['name'][0].upper()}{share['name'][1:]}: {share['value']:.1f} %. Worst: {worst['value']:.2f}x.\n"
    slower = sorted((c for c in choices if c["value"] > 1.05), key=lambda c: -c["value"])
    lines = [[*c["name"].split(": ", 1), f"{c['value']:.2f}"] for c in slower]
    return said + ("\n" + _table(["call", "", "chosen over fastest"], lines) if lines else "")


def host_table(records: Records, host: dict[str, Case], first: dict[str, Case]) -> str:
    columns = [*OURS.values(), "fla-core"]
    lines = []
    for cases, unit, suffix in ((host, 1e-6, ", us"), (first, 1.0, ", s")):
        for case in cases.values():
            lines.append([case.name + suffix, *(case.time(column).text(unit) for column in columns)])
    return _table(["what", *OURS, records.heading("fla-core")], lines)


def cpu_table(records: Records) -> str:
    lines = []
    for name in CPU:
        record = records.read(name, "CPU")
        for row in record["rows"]:
            if row["seconds"] is not None:
                what = ", ".join(part for part in (row["case"], row["contender"]) if part != "kdacore")
                lines.append([row["preset"], what, _duration(row["seconds"])])
    return _table(["preset", "what", "median"], lines)


def jax_table(records: Records, parts: dict[str, Part]) -> str:
    """Calls from JAX: the backends that serve them, and the same cases from torch."""
    part = "JAX on a GPU"
    cuda = {
        row["case"]: row["seconds"]
        for row in records.read(JAX_CALLS, part)["rows"]
        if row["contender"] == "jax"
    }
    xla = records.read(XLA, part)["rows"]
    gradient = next(r for r in records.read(XLA_GRADIENT, part)["rows"] if r["what"].startswith("gradient"))
    size = "B1 T8192 H64"
    passes = (("forward", "forward", "forward"), ("training", "forward and backward", "gradient"))
    lines = []
    for name, title, what in passes:
        for gate, suffix in (("safe", ""), ("unbounded", " unbounded")):
            times = [
                row["milliseconds"]
                for row in (xla if what == "forward" else [gradient])
                if row["gate"] == gate and row["what"].startswith(what) and row.get("default", True)
            ]
            # The record of the cuda backend has unbounded gates.
            own = cuda[f"{title}, {size}"] * 1e3 if gate == "unbounded" else None
            mean = sum(times) / len(times) if times else None
            lines.append([f"{title}, {size}{suffix}", *_jax_cells(parts[name], f"{size}{suffix}", own, mean)])
    for way in ("in a jitted loop", "a call each"):
        case = f"decode, B32 H32, {way}"
        lines.append([case, *_jax_cells(parts["decode"], "decode B32 H32", cuda[case] * 1e3, None)])
    heading = records.heading("fla-core")
    return _table(["case", "floor", "cuda (JAX)", "xla (JAX)", "cuda (torch)", f"{heading} (torch)"], lines)


def _jax_cells(part: Part, name: str, cuda: float | None, xla: float | None) -> list[str]:
    """The floor, milliseconds of both backends from JAX, and those of the same case from torch."""
    case = part.cases[name]
    ours = ["" if time is None else _number(time) for time in (cuda, xla)]
    return [
        _number(part.floors[name] * 1e3),
        *ours,
        case.time(OURS["cuda"]).text(1e-3),
        case.time("fla-core").text(1e-3),
    ]


def tpu_table(records: Records) -> str:
    lines = []
    for row in records.read(TPU, "TPU compiler")["rows"]:
        if row["what"] in ("forward", "backward") and "bundles_per_head_and_128_tokens" in row:
            bytes_moved = [
                f"{row[key]:.0f}" for key in ("hbm_bytes_per_token_head", "least_bytes_per_token_head")
            ]
            counts = [str(row["bundles_per_head_and_128_tokens"]), str(row["spill_stores"])]
            memory = f"{row['vmem_need_bytes'] / 2**20:.1f} of {row['vmem_bytes'] / 2**20:.0f}"
            lines.append([row["generation"], row["what"], *bytes_moved, *counts, memory])
    heading = [
        "generation",
        "pass",
        "HBM bytes a token and head",
        "floor",
        "bundles",
        "spill stores",
        "VMEM, MiB",
    ]
    return _table(heading, lines)


def records_table(records: Records) -> str:
    lines = []
    for name, number in sorted(records.used):
        record = records.run(name, number)
        machine, versions = record.get("machine") or {}, record.get("versions") or {}
        gpu = machine.get("nvidia driver", "") if name.startswith("h200") else ""
        where = gpu or (record.get("device") or machine.get("cpu") or "no device")
        if name.startswith("h200") and where.startswith("16 cores"):
            where = "NVIDIA H200"
        wanted = ("jax", "libtpu") if name in (XLA, XLA_GRADIENT, JAX_CALLS, TPU) else ("torch", "triton")
        wanted = ("numpy", "jax") if name in CPU else wanted
        libraries = ", ".join(f"{key} {versions[key]}" for key in wanted if key in versions)
        commit = (record.get("commit") or "")[:7]
        cells = [f"`benchmarks/results/{name}.json`", f"`{commit}`" if commit else ""]
        lines.append(
            [*cells, (record.get("when") or "")[:10], where, libraries, _parts(records.used[name, number])]
        )
    return _table(["record", "commit", "date", "machine", "libraries", "used for"], lines)


def _parts(used: set[str]) -> str:
    """``forward (cuda), forward (triton)`` as ``forward (cuda, triton)``."""
    grouped: dict[str, list[str]] = {}
    for part in sorted(used):
        found = re.fullmatch(r"(.*?) \((.*)\)", part)
        name, inside = (found[1], found[2]) if found else (part, "")
        grouped.setdefault(name, []).append(inside)
    return "; ".join(n + (f" ({', '.join(i)})" if any(i) else "") for n, i in grouped.items())


def _table(headings: list[str], lines: list[list[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _number(value: float) -> str:
    """Three digits; four for what begins with a one."""
    digits = 4 if 1 <= value < 2 else 3
    text = f"{value:#.{digits}g}".rstrip(".")
    return f"{value:.0f}" if "e" in text else text


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{_number(seconds / scale)} {unit}"
    return f"{_number(seconds * 1e6)} us"


# --- the headline ---------------------------------------------------------------------------------

HEADLINE = (
    ("forward", "B1 T8192 H64", "forward, 64 heads"),
    ("forward", "B1 T8192 H64 unbounded", "the same, unbounded gate"),
    ("forward", "B1 T8192 H16", "forward, 16 heads"),
    ("forward", "B1 T8192 H8", "forward, 8 heads"),
    ("forward", "B16 T512 H32", "forward, 16 x 512 tokens, 32 heads"),
    ("forward", "packed 6 uneven H64", "forward, 6 packed sequences, 64 heads"),
    ("forward", "GVA B1 T8192 H32 HV64", "forward, 32 key and 64 value heads"),
    ("training", "B1 T8192 H64", "forward + backward, 64 heads"),
    ("training", "B1 T8192 H64 unbounded", "the same, unbounded gate"),
    ("decode", "decode B8 H32", "decode, 8 sequences, 32 heads"),
    ("decode", "decode B256 H32", "decode, 256 sequences, 32 heads"),
    (
        "gated delta rule",
        "B1 T8192 H16 HV32, decay given",
        "gated delta rule, decay given, 16 key and 32 value heads",
    ),
    ("gated delta rule, training", "B1 T8192 H16 HV32, decay given", "the same, forward + backward"),
    ("fused decode", "kda-b32", "fused decode step (convolution, KDA, gated norm), 32 sequences, 32 heads"),
)
"""Part, case, and what the README calls it."""
IN_PICTURE = (0, 2, 4, 5, 7, 8, 10)
"""The rows that are drawn."""


def headline_table(records: Records, parts: dict[str, Part]) -> str:
    lines = []
    for part, name, title in HEADLINE:
        case, floor = parts[part].cases[name], parts[part].floors[name]
        backend, seconds = case.ours
        cells = [title, _number(floor * 1e3), f"**{_number(seconds * 1e3)}** ({backend})"]
        cells += [case.time(peer).text(1e-3) for peer in PEERS.values()]
        lines.append([*cells, f"{case.peer / seconds:.1f}x" if case.peer else ""])
    headings = ["milliseconds", "floor", "kdacore", *(records.heading(p) for p in PEERS.values())]
    return _table([*headings, "best peer over ours"], lines)


def picture(title: str, rows: Iterable[tuple[str, Case, float]], together: bool, unit: str) -> str:
    """Bars of every contender; ``together`` takes our faster backend alone."""
    scale = {"ms": 1e-3, "us": 1e-6}[unit]
    groups = []
    for name, case, floor in rows:
        times = {contender: case.time(contender).mean for contender in (*OURS.values(), *PEERS.values())}
        if together:
            mine: float | None = case.ours[1]
            times = {"kdacore": mine, **{peer: times[peer] for peer in PEERS.values()}}
        bars = tuple(
            Bar(
                series,
                max(seconds / floor, 1.0),
                f"{_number(seconds / scale)} {unit}, {seconds / floor:.1f}x",
            )
            for series, seconds in times.items()
            if seconds is not None
        )
        groups.append(Group(name, bars))
    return draw(title, groups)


# --- the files ------------------------------------------------------------------------------------


def fill(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the markers of ``name``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the markers of {name} must stand in the page once")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{block}{end}{rest.split(end)[1]}"


def files() -> dict[Path, str]:
    """Every file that is written, with its contents."""
    records = Records()
    rate = memory_rate(records)
    parts = {}
    for part, name, phase, count in (
        ("forward", FORWARD, "forward", forward_bytes),
        ("training", TRAINING, "training", training_bytes),
        ("prompts", HEADS, "forward", prompt_bytes),
        ("few heads", HEADS, "training", training_bytes),
        ("decode", DECODE, "decode", decode_bytes),
        ("decode in a graph", DECODE_GRAPH, "graph", decode_bytes),
        ("fused decode", FUSED_DECODE, "graph", fused_decode_bytes),
        ("gated delta rule", GATED_DELTA, "forward", gated_delta_bytes),
        ("gated delta rule, training", GATED_DELTA_TRAINING, "training", gated_delta_training_bytes),
    ):
        cases = records.cases(part, name, phase)
        parts[part] = Part(cases, {case: count(of) / rate for case, of in cases.items()})
    forward, training = parts["forward"], parts["training"]
    decode, graph = parts["decode"], parts["decode in a graph"]
    prompts, heads = parts["prompts"], parts["few heads"]
    gdn, gdn_training = parts["gated delta rule"], parts["gated delta rule, training"]
    blocks = {
        "rate": f"Memory rate: {rate / 1e12:.2f} TB/s (`benchmarks/results/{MEMORY_RATE}.json`).\n",
        "forward": compare(records, forward.cases, forward.floors, 1e-3),
        "training": training_table(records, training.cases, training.floors),
        "prompts": compare(records, prompts.cases, prompts.floors, 1e-3),
        "heads": compare(records, heads.cases, heads.floors, 1e-3),
        "choice": choice_table(records),
        "decode": compare(records, decode.cases, decode.floors, 1e-6),
        "graph": compare(records, graph.cases, graph.floors, 1e-6),
        "fused": fused_decode_table(parts["fused decode"].cases, parts["fused decode"].floors),
        "gdn": compare(records, gdn.cases, gdn.floors, 1e-3),
        "gdn-training": compare(records, gdn_training.cases, gdn_training.floors, 1e-3),
        "stages": stage_table(records, records.cases("stages", STAGES, "stage")),
        "host": host_table(
            records,
            records.cases("host", HOST, "host") | records.cases("host", HEADS, "host-training"),
            records.cases("first call", FIRST_CALL, "first-call"),
        ),
        "jax": jax_table(records, parts),
        "tpu": tpu_table(records),
        "cpu": cpu_table(records),
    }
    blocks["records"] = records_table(records)
    page = PAGE.read_text(encoding="utf-8")
    for name, block in blocks.items():
        page = fill(page, name, block)
    headline = headline_table(records, parts)
    readme = fill(README.read_text(encoding="utf-8"), "headline", _headline(headline))
    chosen = [HEADLINE[i] for i in IN_PICTURE]
    title = (
        "One NVIDIA H200, bfloat16, K = V = 128: time over the memory floor (log scale, shorter is better)"
    )
    rows = [(name, parts[part].cases[case], parts[part].floors[case]) for part, case, name in chosen]
    pictures = {"headline": picture(title, rows, True, "ms")}
    for part, unit in (("forward", "ms"), ("training", "ms"), ("decode", "us")):
        every = [(name, case, parts[part].floors[name]) for name, case in parts[part].cases.items()]
        text = f"{part.capitalize()} on one NVIDIA H200: time over the memory floor (log scale)"
        pictures[f"performance-{part}"] = picture(text, every, False, unit)
    written = {PAGE: page, README: readme}
    return written | {IMAGES / f"{name}.svg": svg for name, svg in pictures.items()}


def _headline(table: str) -> str:
    return (
        "\n![time over the memory floor, kdacore beside its peers](docs/images/headline.svg)\n\n"
        "**On one NVIDIA H200**, bfloat16, `K = V = 128`, 8192 tokens unless said. *Floor*: the bytes of inputs\n"
        "and outputs at the measured memory rate. *wrong*: the result failed the correctness check. Two times\n"
        "in a cell are of two gate sets. All rows, records and versions are on\n"
        "[docs/performance.md](docs/performance.md).\n\n"
        f"{table}\n"
    )


def main() -> int:
    """Write the files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    check = parser.parse_args().check
    stale = []
    for path, text in files().items():
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if old == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{'stale' if check else 'written'}: {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
