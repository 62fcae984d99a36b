"""Many launches of the fused forward beside other work: ``python -m benchmarks.launch_stress [--json FILE]``.

Results that differ from the first launch's bits are counted, by head and by chunk of 32 tokens, which tells what went
wrong. On a Hopper GPU. Several processes side by side make more kinds of timing; exits with 1 where a launch differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kdacore
from kdacore_cuda import choice

CHUNK = 32


class Kind(NamedTuple):
    """A way to divide a call among clusters."""

    cluster: int
    resident: int
    helpers: int
    """Clusters whose blocks prepare steps for the others."""
    heads: int
    tokens: int


KINDS = {
    "twos": Kind(2, 0, 0, 48, 700),
    "twos, cut": Kind(2, 66, 0, 80, 400),
    "twos, helped": Kind(2, 0, 18, 48, 700),
    "fours": Kind(4, 0, 0, 28, 700),
    "fours, helped": Kind(4, 0, 6, 24, 700),
}
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
    "backend": "cuda",
}
GATES: dict[str, dict[str, Any]] = {"bounded": {"safe_gate": True, "lower_bound": -5.0}, "unbounded": {}}


def force(kind: Kind) -> None:
    """Every call of ``chunk_kda`` from now on is divided like this."""
    changes: dict[str, Any] = {
        "use_segments": lambda *given: False,
        "use_dataflow": lambda *given: False,
        "cluster_size": lambda *given: kind.cluster,
        "resident_clusters": lambda *given: kind.resident,
        "preparing_clusters": lambda *given: kind.helpers,
    }
    for name, function in changes.items():
        setattr(choice, name, function)


def draw(kind: Kind) -> dict[str, torch.Tensor]:
    """Random inputs of a call, by a seed of its own."""
    torch.manual_seed(kind.heads + kind.tokens)
    shape = (1, kind.tokens, kind.heads, 128)
    x = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v", "g")}
    x["beta"] = torch.randn(shape[:3], device="cuda", dtype=torch.bfloat16)
    x["A_log"] = torch.log(1 + 15 * torch.rand(kind.heads, device="cuda"))
    x["dt_bias"] = torch.randn(kind.heads, 128, device="cuda")
    return x


def stress(kind: Kind, gate: str, seconds: float) -> dict[str, Any]:
    """Launches made, how many differed, and where."""
    x, options = draw(kind), {**OPTIONS, **GATES[gate]}
    first, first_state = kdacore.chunk_kda(**x, **options)
    other, memory = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
    chunks = -(-kind.tokens // CHUNK)
    where = torch.zeros(kind.heads, chunks, dtype=torch.int64, device="cuda")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    launches, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        for i in range(200):
            if i % 8 == 0:  # copies on another stream, so that blocks wait for memory at different times
                with torch.cuda.stream(other):
                    for _ in range(4):
                        memory.copy_(memory.flip(0))
            o, state = kdacore.chunk_kda(**x, **options)
            wrong = (o != first).any(-1)[0].T
            wrong = torch.nn.functional.pad(wrong, (0, -kind.tokens % CHUNK)).view(kind.heads, chunks, CHUNK)
            where += wrong.any(-1)
            differing += wrong.any() | (state != first_state).any()
        launches += 200
        torch.cuda.synchronize()
    heads = {str(h): row.tolist() for h, row in enumerate(where.cpu()) if row.any()}
    return {"gate": gate, "launches": launches, "differing": int(differing), "chunks by head": heads}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_stress", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each kind and gate (60)")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for name in args.only:
        force(KINDS[name])  # plans are cached by request, and each kind has another request
        for gate in GATES:
            found.append({"kind": name, **stress(KINDS[name], gate, args.seconds)})
            print(*(f"{key}: {value}" for key, value in found[-1].items()), sep=", ", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(x["differing"] for x in found))


if __name__ == "__main__":
    sys.exit(main())
