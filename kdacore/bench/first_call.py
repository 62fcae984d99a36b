"""The first call in a fresh process: cold caches, then warm ones. The library's own import is timed apart."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from kdacore import machine
from kdacore.bench.cases import Case
from kdacore.bench.contenders import kdacore_contenders
from kdacore.bench.peers import fla
from kdacore.bench.results import Results, Row
from kdacore.bench.runner import judged, shape
from kdacore.machine import version_of

PEER = fla.PEER.distribution
SECONDS = 900.0
_CHILD = "from kdacore.bench.first_call import child; child()"


def run_preset(preset: str, cases: tuple[Case, ...], device: str, only: tuple[str, ...]) -> Results:
    """Run, for each backend, one process with empty caches and one that finds what the first left."""
    results = Results()
    cold, warm = cases
    for c in kdacore_contenders(cold, device, only):
        if c.refusal:
            results.rows.append(_row(preset, cold, device, c.name, status="skipped", note=c.refusal))
            continue
        backend = c.name.split()[-1]
        with tempfile.TemporaryDirectory() as caches:
            for case in (cold, warm):
                row = _measure(preset, case, device, backend, caches, c.auto)
                results.rows.append(row)
                goal = case.goals.get(backend)
                if row.seconds is not None and goal is not None:
                    name = f"{case.name}, {backend}"
                    results.figures.append(judged(preset, name, row.seconds, "s", 1.0, goal))
    why = f"70 s measured once on an H200; not repeated here ({version_of(PEER) or 'not installed'})"
    results.rows.append(_row(preset, cold, device, PEER, status="skipped", note=why))
    return results


def child() -> None:
    """Run in the fresh process: import the library, then kdacore, then make one call and wait for it."""
    import time

    case = Case(**{**json.loads(sys.argv[1]), "lengths": (), "gate_sets": (), "goals": {}})
    device, backend = sys.argv[2], sys.argv[3]
    from kdacore.bench.arrays import make, options
    from kdacore.bench.clock import waiter

    arrays, wait = make(case, "init", device), waiter(case.kind, device)
    wait()
    started = time.perf_counter()
    import kdacore

    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**arrays, **options(case), backend=backend)
        wait()
    seconds = time.perf_counter() - started
    print(
        "\n"
        + json.dumps(
            {"seconds": seconds, "ran": ran[-1].backend, "form": ran[-1].candidate(ran[-1].backend).form}
        )
    )


def _measure(preset: str, case: Case, device: str, backend: str, caches: str, auto: bool) -> Row:
    name = f"kdacore {backend}"
    environment = machine.child_environment(
        KDACORE_CACHE_DIR=os.path.join(caches, "kdacore"),
        TRITON_CACHE_DIR=os.path.join(caches, "triton"),
        CUDA_CACHE_PATH=os.path.join(caches, "cuda"),
    )
    words = [json.dumps(dataclasses.asdict(case)), device, backend]
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{machine.ENTRY}\n{_CHILD}", *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return _row(preset, case, device, name, status="FAILED", note=f"no answer within {SECONDS:g} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return _row(preset, case, device, name, status="FAILED", note=last[:300])
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = answer["seconds"]
    return _row(
        preset,
        case,
        device,
        name,
        status="ok",
        backend=answer["ran"],
        form=answer["form"],
        auto=auto,
        seconds=seconds,
        low=seconds,
        high=seconds,
        samples=1,
    )


def _row(preset: str, case: Case, device: str, contender: str, **known: Any) -> Row:
    about: dict[str, Any] = {
        "shape": shape(case),
        "dtype": case.dtype,
        "device": f"{case.kind} {device}",
        "gates": "init",
    }
    return Row(
        preset=preset,
        case=case.name,
        phase=case.phase,
        contender=contender,
        **about,
        **known,
    )
