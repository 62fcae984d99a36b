"""Which gate of ``.ci/run`` is next, how long each took, and when each last ran (``.ci/gates.json``).

``.ci/run`` calls this with plain Python, before anything is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gates.json")
UNKNOWN_MINUTES = 10.0
"""What a gate is expected to take that has never been recorded, of the clock and of the CPU."""

Gate = dict[str, Any]


def load(path: Path = FILE) -> list[Gate]:
    """The gates: name, what it is, whether it runs every time, and ``last``: date, commit, minutes, cpu_minutes; null
    where it was never recorded."""
    gates: list[Gate] = json.loads(path.read_text())
    return gates


def next_gate(
    gates: list[Gate], took: dict[str, tuple[float, float]], minutes: float, cpu_minutes: float
) -> str | None:
    """The gate to run now, None if there is none left that would end in time.

    Args:
        took: minutes of the clock and of the CPU of the gates that have run.
        minutes: what all may take together, of the clock.
        cpu_minutes: of the CPU.
    """
    left = [gate for gate in gates if gate["name"] not in took]
    for gate in left:
        if gate["always"]:
            return str(gate["name"])
    slowness = _slowness(gates, took)
    room = (minutes - sum(t[0] for t in took.values()), cpu_minutes - sum(t[1] for t in took.values()))
    for gate in sorted(left, key=lambda gate: gate["last"]["date"] if gate["last"] else ""):
        if all(slowness * expected <= rest for expected, rest in zip(_expected(gate), room, strict=True)):
            return str(gate["name"])
    return None


def _expected(gate: Gate) -> tuple[float, float]:
    last = gate["last"]
    return (last["minutes"], last["cpu_minutes"]) if last else (UNKNOWN_MINUTES, UNKNOWN_MINUTES)


def _slowness(gates: list[Gate], took: dict[str, tuple[float, float]]) -> float:
    """How much longer than recorded the gates have taken that have run; at least 1."""
    known = [
        (took[gate["name"]][0], _expected(gate)[0]) for gate in gates if gate["name"] in took and gate["last"]
    ]
    recorded = sum(expected for _, expected in known)
    return max(1.0, sum(measured for measured, _ in known) / recorded) if recorded else 1.0


def summary(gates: list[Gate], took: dict[str, tuple[float, float]]) -> list[str]:
    """Lines for people: what every gate took, and when those last ran that have not."""
    lines = [f"{'minutes':>8} {'CPU':>6}"]
    for gate in gates:
        if gate["name"] in took:
            clock, cpu = took[gate["name"]]
            lines.append(f"{clock:8.1f} {cpu:6.1f}  {gate['what']}")
    clock, cpu = (sum(times[i] for times in took.values()) for i in range(2))
    lines.append(f"{clock:8.1f} {cpu:6.1f}  together")
    missing = [gate for gate in gates if gate["name"] not in took]
    lines += ["not run:"] if missing else ["all gates ran"]
    for gate in missing:
        last = gate["last"]
        when = f"last ran on {last['date']} at {last['commit'][:12]}" if last else "never recorded"
        lines.append(f"  {gate['what']}: {when}")
    return lines


def record(gates: list[Gate], took: dict[str, tuple[float, float]], date: str, commit: str) -> list[Gate]:
    """The gates, with this run for those that ran."""
    return [
        gate
        if gate["name"] not in took
        else {
            **gate,
            "last": {
                "date": date,
                "commit": commit,
                "minutes": round(took[gate["name"]][0], 1),
                "cpu_minutes": round(took[gate["name"]][1], 1),
            },
        }
        for gate in gates
    ]


def write(gates: list[Gate], path: Path = FILE) -> None:
    """One line a gate."""
    path.write_text("[\n" + ",\n".join("  " + json.dumps(gate) for gate in gates) + "\n]\n")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def _tested_commit() -> str:
    """HEAD, if nothing but the record differs from it."""
    changed = [
        line for line in _git("status", "--porcelain").splitlines() if not line.endswith(".ci/gates.json")
    ]
    if changed:
        sys.exit("not recorded, for these files are not those of a commit:\n" + "\n".join(changed))
    return _git("rev-parse", "HEAD")


def read_times(path: Path) -> dict[str, tuple[float, float]]:
    """What ``.ci/run`` has noted: a line a gate that was green, its name, seconds of the clock and of the CPU."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {name: (float(clock) / 60, float(cpu) / 60) for name, clock, cpu in rows}


def main(words: list[str] | None = None) -> None:
    """The commands of ``.ci/run``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("next", "what", "summary", "record"))
    parser.add_argument("times", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--cpu-minutes", type=float, default=0.0)
    given = parser.parse_args(words)
    gates, took = load(), read_times(given.times)
    if given.command == "next":
        print(next_gate(gates, took, given.minutes, given.cpu_minutes) or "")
    elif given.command == "what":
        print(next(gate["what"] for gate in gates if gate["name"] == given.name))
    elif given.command == "summary":
        print("\n".join(summary(gates, took)))
    else:
        write(record(gates, took, datetime.date.today().isoformat(), _tested_commit()))


if __name__ == "__main__":
    main()
