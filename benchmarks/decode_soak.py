"""A million decode steps on a pool whose slots are freed and used again: ``python -m benchmarks.decode_soak``.

In every step each lane of the batch decodes a token of the sequence that it has, in the pool row that this sequence was
given, or is idle (``null_index``). A sequence lives 4,096 tokens at most; then its row is given to another one, which
starts from zeros (``has_initial_state``) whatever the row holds. On a GPU every other block of steps is the replay of
one CUDA graph, the others are eager calls. At the end the last life of every slot is held against the float64 oracle,
its outputs as far as they are still in the ring, and memory of host and device must not have grown.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import kdacore
from kdacore import device as devices
from kdacore import machine
from kdacore.argument_types import at_least
from kdacore.calls import requests
from kdacore.ops import OPS
from kdacore.selfcheck.bounds import bound
from kdacore.selfcheck.check import relative_error
from kdacore_reference import oracle

OP = "fused_recurrent_kda"
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
TOKENS = ("q", "k", "v", "g", "beta")
BLOCK = 64
"""Steps of a CUDA graph, and between two looks at the clock."""
IDLE = 32
"""Steps that a lane waits for its next sequence, at most."""
HOST_GROWTH, DEVICE_GROWTH = 8 << 20, 2 << 20
"""Bytes that may come and go: of the interpreter, and of what else runs on the device."""


@dataclass(frozen=True)
class Sizes:
    steps: int
    slots: int
    heads: int
    dim: int
    longest: int
    """Tokens of a life, at most."""

    @property
    def blocks(self) -> int:
        return -(-self.steps // BLOCK)

    @property
    def ring(self) -> int:
        """Tokens of a lane that are held: more than a life has, so that none sees one twice."""
        return BLOCK * (-(-self.longest // BLOCK) + 1)


class Life(NamedTuple):
    """A sequence: its lane, and the steps it decodes in."""

    lane: int
    start: int
    end: int


class Schedule(NamedTuple):
    rows: Any
    """``[steps, lanes]`` int32: the pool row of each lane, 0 for none."""
    fresh: Any
    """``[steps, lanes]`` bool: the first token of a sequence."""
    last: dict[int, Life]
    """The last life of each row."""
    lives: int


def schedule(sizes: Sizes, seed: int) -> Schedule:
    """Random lives. The row that has been free for longest is given out next, so rows change lanes."""
    rng = np.random.default_rng(seed)
    steps = sizes.blocks * BLOCK  # the lanes are idle behind the last
    rows = np.zeros((steps, sizes.slots), np.int32)
    fresh = np.zeros((steps, sizes.slots), bool)
    last: dict[int, Life] = {}
    waiting = [(int(rng.integers(IDLE)), lane) for lane in range(sizes.slots)]
    free = [(0, row) for row in range(1, sizes.slots + 1)]
    heapq.heapify(waiting)
    lives = 0
    while waiting:
        start, lane = heapq.heappop(waiting)
        if start >= sizes.steps:
            continue
        _, row = heapq.heappop(free)
        end = min(start + int(rng.integers(1, sizes.longest + 1)), sizes.steps)
        rows[start:end, lane] = row
        fresh[start, lane] = True
        last[row] = Life(lane, start, end)
        lives += 1
        heapq.heappush(free, (end, row))
        heapq.heappush(waiting, (end + int(rng.integers(IDLE)), lane))
    return Schedule(rows, fresh, last, lives)


class Server:
    """A pool, a ring of tokens and a ring of outputs; :meth:`block` decodes the next steps."""

    def __init__(self, sizes: Sizes, plan: Schedule, backend: str, device: str, seed: int) -> None:
        self.sizes, self.device = sizes, torch.device(device)
        made = torch.Generator(self.device).manual_seed(seed)
        shape = (sizes.ring, sizes.slots, 1, sizes.heads, sizes.dim)

        def normal(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, device=self.device, generator=made, dtype=torch.float32)

        self.tokens = {name: normal(shape).bfloat16() for name in ("q", "k", "v", "g")}
        self.tokens["beta"] = normal(shape[:-1]).bfloat16()
        # Decays that forget within tens to thousands of tokens.
        self.weights = {"A_log": 0.1 * normal((sizes.heads,))}
        self.weights["dt_bias"] = torch.linspace(-9, -3, sizes.heads * sizes.dim, device=self.device)
        self.outputs = torch.zeros(shape, device=self.device, dtype=torch.bfloat16)
        self.rows = torch.from_numpy(plan.rows).to(self.device)
        self.known = torch.from_numpy(~plan.fresh).to(self.device)
        self.step = torch.zeros((), device=self.device, dtype=torch.int64)
        self.pool = torch.full(
            (sizes.slots + 1, sizes.heads, sizes.dim, sizes.dim), torch.nan, device=self.device
        )
        self._offsets = torch.arange(BLOCK, device=self.device)
        buffers = {name: torch.empty_like(x[:BLOCK]) for name, x in self.tokens.items()}
        buffers |= {
            "state_indices": self.rows[:BLOCK].clone(),
            "has_initial_state": self.known[:BLOCK].clone(),
        }
        buffers["out"] = torch.empty_like(self.outputs[:BLOCK])
        self._buffers = buffers
        rest = {
            **OPTIONS, **self.weights, "initial_state": self.pool, "inplace_state": True, "null_index": 0,
            "backend": backend,
        }  # fmt: skip
        self._calls = [{name: x[i] for name, x in buffers.items()} | rest for i in range(BLOCK)]

    def block(self) -> None:
        """The next steps. What they read is found by a counter on the device, so a graph may do the same."""
        at = self.step + self._offsets
        place = at % self.sizes.ring
        for name, ring in self.tokens.items():
            torch.index_select(ring, 0, place, out=self._buffers[name])
        torch.index_select(self.rows, 0, at, out=self._buffers["state_indices"])
        torch.index_select(self.known, 0, at, out=self._buffers["has_initial_state"])
        for call in self._calls:
            kdacore.fused_recurrent_kda(**call)
        self.outputs.index_copy_(0, place, self._buffers["out"])
        self.step += BLOCK

    def restart(self) -> None:
        """Forget everything that was decoded. Rows hold NaN until their first life."""
        self.step.zero_()
        self.pool.fill_(torch.nan)

    def captured(self) -> Callable[[], None]:
        """A block as a CUDA graph, on a device that has them; else the block itself."""
        if self.device.type != "cuda":
            return self.block
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.block()
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: of the process, of torch's allocator, and of the whole device."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmRSS")
    used = {"host": 1024 * int(found[1])}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used["allocated"] = torch.cuda.memory_allocated(device)
        used["reserved"] = torch.cuda.memory_reserved(device)
        used["device"] = total - free
    return used


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What has grown by more than it may."""
    allowed = {"host": HOST_GROWTH, "allocated": 0, "reserved": 0, "device": DEVICE_GROWTH}
    return [
        f"{name} by {(after[name] - before[name]) / 2**20:.1f} MiB"
        for name in before
        if after[name] - before[name] > allowed[name]
    ]


# --- against the oracle ----------------------------------------------------------------------------------------------


class Error(NamedTuple):
    row: int
    tokens: int
    o: float
    """Error of the outputs that are still in the ring."""
    state: float


def hold(server: Server, plan: Schedule) -> list[Error]:
    """The last life of every row, token by token in float64. NumPy's threads run side by side."""
    host = {name: x.cpu() for name, x in (server.tokens | server.weights).items()}
    outputs, pool = server.outputs.cpu(), server.pool.cpu()

    def one(item: tuple[int, Life]) -> Error:
        row, life = item
        place = torch.arange(life.start, life.end) % server.sizes.ring
        x = {name: host[name][place, life.lane, 0][None] for name in TOKENS} | {
            name: host[name] for name in server.weights
        }
        want_o, want_state = exact(x)
        there = min(
            life.end - life.start, max(0, life.end - (server.sizes.blocks * BLOCK - server.sizes.ring))
        )
        got = outputs[place, life.lane, 0][None]
        tail = slice(life.end - life.start - there, None)
        o = relative_error(oracle.to_float64(got[:, tail]), want_o[:, tail]) if there else 0.0
        state = relative_error(oracle.to_float64(pool[row]), want_state[0])
        return Error(row, life.end - life.start, o, state)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(one, sorted(plan.last.items())))


def exact(x: dict[str, Any]) -> tuple[Any, Any]:
    """Outputs and final state of one sequence, float64."""
    given = {name: oracle.to_float64(a) for name, a in x.items()}
    request = requests.request_with(OP, {**given, **OPTIONS, "output_final_state": True})
    found = oracle.oracle_forward(request, OPS[OP].inputs(**given))
    return found.o, found.final_state


def bounds(device: torch.device) -> tuple[float, float]:
    """The bounds of outputs and states."""
    where = devices.torch_device(device.type, 0)
    return bound("o", where, "bfloat16", "bfloat16"), bound("state", where, "bfloat16", "float32")


# --- the run ---------------------------------------------------------------------------------------------------------


def soak(sizes: Sizes, backend: str, device: str, seed: int, progress: bool = True) -> dict[str, Any]:
    """Everything, and what is recorded of it: ``problems`` is empty when all was right."""
    plan = schedule(sizes, seed)
    with torch.no_grad():
        server = Server(sizes, plan, backend, device, seed)
        for _ in range(3):  # until dispatch recognises the calls
            server.restart()
            server.block()
        blocks = (server.block, server.captured())
        for block in blocks:
            server.restart()
            block()
        server.restart()
        server.synchronise()
        before, start = memory(server.device), time.perf_counter()
        for n in _shown(sizes.blocks, progress):
            blocks[n % 2]()
        server.synchronise()
        seconds, after = time.perf_counter() - start, memory(server.device)
        errors = hold(server, plan)
    allowed = bounds(server.device)
    problems = [f"memory grew: {text}" for text in grown(before, after)]
    problems += [
        f"row {e.row}: o {e.o:.2e} of {allowed[0]:.2e}, state {e.state:.2e} of {allowed[1]:.2e}"
        for e in errors
        if not (e.o <= allowed[0] and e.state <= allowed[1])
    ]
    return {
        "sizes": asdict(sizes), "backend": backend, "device": device, "seed": seed,
        "lives": plan.lives, "rows_held": len(errors), "tokens_held": sum(e.tokens for e in errors),
        "seconds": round(seconds, 2), "us_per_step": round(1e6 * seconds / sizes.steps, 3),
        "memory_before": before, "memory_after": after,
        "worst_o": max(e.o for e in errors), "bound_o": allowed[0],
        "worst_state": max(e.state for e in errors), "bound_state": allowed[1],
        "problems": problems,
    }  # fmt: skip


def _shown(blocks: int, progress: bool) -> Iterable[int]:
    """The numbers of the blocks, with a bar."""
    if not progress:
        return range(blocks)
    from rich.console import Console
    from rich.progress import track

    return track(range(blocks), "blocks of steps", console=Console(stderr=True))


def table(found: dict[str, Any]) -> str:
    rows = [
        ("steps", f"{found['sizes']['steps']:,} of {found['sizes']['slots']} lanes on {found['backend']}"),
        ("lives", f"{found['lives']:,}, of which the last of {found['rows_held']} rows were held"),
        ("time", f"{found['seconds']:.1f} s, {found['us_per_step']:.2f} us a step"),
        ("o", f"{found['worst_o']:.2e} of {found['bound_o']:.2e}"),
        ("state", f"{found['worst_state']:.2e} of {found['bound_state']:.2e}"),
    ]
    for name, was in found["memory_before"].items():
        now = found["memory_after"][name]
        rows.append((f"memory, {name}", f"{was / 2**20:.1f} MiB, then {now / 2**20:.1f} MiB"))
    rows += [("PROBLEM", text) for text in found["problems"]] or [("problems", "none")]
    return "\n".join(f"{name:18} {text}" for name, text in rows)


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=at_least(1), default=1_000_000)
    parser.add_argument("--slots", type=at_least(1), default=64)
    parser.add_argument("--heads", type=at_least(1), default=2)
    parser.add_argument("--dim", type=at_least(1), default=128, help="K and V (128)")
    parser.add_argument("--longest", type=at_least(1), default=4096, help="tokens of a life, at most (4096)")
    parser.add_argument("--backend", help="cuda on a GPU, reference elsewhere, unless told")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args(argv)
    sizes = Sizes(args.steps, args.slots, args.heads, args.dim, args.longest)
    backend = args.backend or ("cuda" if args.device.startswith("cuda") else "reference")
    found = soak(sizes, backend, args.device, args.seed)
    if args.json:
        record = {
            "schema": 1,
            "what": "decode steps on a pool whose slots are freed and used again, against the float64 oracle",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": machine.commit(),
            "machine": {row.name: row.value for row in machine.probe().rows},
            "versions": {row.name: row.value for row in machine.versions()},
        }
        args.json.write_text(json.dumps(record | found, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
