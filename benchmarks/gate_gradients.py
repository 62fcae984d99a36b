"""How exact the gradients of A_log and dt_bias are: ``python -m benchmarks.gate_gradients [--json FILE]``.

On a Hopper GPU, K = V = 128. Twenty draws of two heads for each number of tokens, kind of gate and distribution. The
cuda and the triton backend are held against the same recurrence in float64. A draw's error is relative, in the 2-norm
over its heads. dA_log is one number a head, so single draws say little: what counts is the root mean square over all.

The cuda backend computes the same draws in calls of 2, 20 and 40 heads: its forward then runs in segments, in dataflow
(gates without a bound) and fused, its backward in segments and in one chain for each head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import kdacore
from kdacore.bench import results
from kdacore.bench.results import Figure, Results
from kdacore.calls.values import Shape, tensors
from kdacore.errors import UnsupportedError

PRESET = "gate-gradients"
DRAWS, HEADS = 20, 2
MOST = 2.0
"""What cuda's root mean square error may be, relative to triton's."""
KINDS: dict[str, dict[str, Any]] = {
    "bounded": {"safe_gate": True, "lower_bound": -5.0},
    "unbounded": {},
}
SWITCHES = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
FLOAT32 = ("A_log", "dt_bias")
SEGMENT = 64
"""Tokens whose states the float64 recurrence holds at once."""

Arrays = dict[str, torch.Tensor]


def draw(
    T: int, gates: str, dtype: torch.dtype, heads: int, device: str, seed: int = 0
) -> tuple[Arrays, torch.Tensor]:
    """The inputs of all draws as heads of one call, and the gradient of the output."""
    given = tensors(Shape(1, T, heads, heads, 128, 128), seed, gates=gates, raw_gate=True, raw_beta=True)
    x = {
        name: torch.from_numpy(np.asarray(a)).to(device, torch.float32 if name in FLOAT32 else dtype)
        for name, a in given.items()
    }
    generator = torch.Generator().manual_seed(seed)
    return x, torch.randn(x["v"].shape, generator=generator).to(device, dtype)


def log_decay(x: Arrays, kind: str) -> torch.Tensor:
    raw, rate = x["g"] + x["dt_bias"], x["A_log"].exp()[:, None]
    if kind == "bounded":
        return KINDS[kind]["lower_bound"] * torch.sigmoid(rate * raw)
    return -rate * F.softplus(raw, threshold=100.0)


def walk(S: torch.Tensor, *tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over some tokens: the state behind them, and their outputs."""
    out = []
    for q, k, v, decay, beta in zip(*tokens, strict=True):
        S = decay[..., None] * S
        error = v - (k[..., None] * S).sum(-2)
        S = S + (beta[:, None] * k)[..., None] * error[:, None]
        out.append((q[..., None] * S).sum(-2))
    return S, torch.stack(out)


def exact(given: Arrays, do: torch.Tensor, kind: str) -> Arrays:
    """Gradients of A_log and dt_bias in float64."""
    x = {name: a.double().requires_grad_(name in FLOAT32) for name, a in given.items()}
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (x["q"], x["k"]))
    scale = q.shape[-1] ** -0.5
    tokens = [a[0] for a in (scale * q, k, x["v"], log_decay(x, kind).exp(), x["beta"].sigmoid())]
    S = q.new_zeros((q.shape[2], 128, 128))
    out = []
    for part in zip(*(a.split(SEGMENT) for a in tokens), strict=True):
        S, o = checkpoint(walk, S, *part, use_reentrant=False)
        out.append(o)
    found = torch.autograd.grad(torch.cat(out)[None], [x[name] for name in FLOAT32], do.double())
    return dict(zip(FLOAT32, found, strict=True))


def computed(given: Arrays, do: torch.Tensor, kind: str, backend: str, heads: int) -> Arrays:
    """The same gradients by a backend, in calls of so many heads."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in FLOAT32}
    for first in range(0, given["A_log"].shape[0], heads):
        own = slice(first, first + heads)
        leaves = {
            name: (a[own] if name in FLOAT32 else a[:, :, own]).contiguous().requires_grad_()
            for name, a in given.items()
        }
        o = kdacore.chunk_kda(**leaves, **dict.fromkeys(SWITCHES, True), **KINDS[kind], backend=backend)[0]
        o.backward(do[:, :, own].contiguous())
        for name in FLOAT32:
            found[name].append(leaves[name].grad)
    return {name: torch.cat(parts) for name, parts in found.items()}


def errors(got: Arrays, want: Arrays) -> dict[str, torch.Tensor]:
    """Error of each draw, by name of the argument."""

    def norms(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, HEADS, x[0].numel()).flatten(1).norm(dim=1)

    return {name: norms(got[name].double() - want[name]) / norms(want[name]) for name in FLOAT32}


CONTENDERS = {
    "triton": ("triton", HEADS),
    "cuda 2 heads": ("cuda", HEADS),
    "cuda 20 heads": ("cuda", 20),
    "cuda 40 heads": ("cuda", 40),
}
"""By name: a backend, and the heads of a call."""


def figures(T: int, kind: str, gates: str, dtype: torch.dtype) -> Iterator[Figure]:
    """Errors of one kind of call; prints a line for each contender."""
    given, do = draw(T, gates, dtype, DRAWS * HEADS, "cuda")
    want = exact(given, do, kind)
    call = f"T{T} {kind} {gates} {str(dtype).removeprefix('torch.')}"
    found: dict[str, dict[str, float]] = {}
    for name, (backend, heads) in CONTENDERS.items():
        try:
            apart = errors(computed(given, do, kind, backend, heads), want)
        except UnsupportedError:
            print(f"{call:34} {name:14} not served")
            continue
        found[name] = {x: float(e.square().mean().sqrt()) for x, e in apart.items()}
        shown = "   ".join(
            f"d{x} {found[name][x]:.1e} (largest {float(e.max()):.1e})" for x, e in apart.items()
        )
        print(f"{call:34} {name:14} {shown}")
        for x, e in apart.items():
            for what, value in (
                ("rms", found[name][x]),
                ("median", float(e.median())),
                ("largest", float(e.max())),
            ):
                yield Figure(
                    preset=PRESET,
                    name=f"{call}, {name}, d{x}, {what}",
                    value=value,
                    unit="",
                    want="",
                    met=None,
                )
    for name, mine in found.items():
        for x in FLOAT32 if name != "triton" and "triton" in found else ():
            ratio = mine[x] / found["triton"][x]
            yield Figure(
                preset=PRESET, name=f"{call}, {name} to triton, d{x}", value=ratio, unit="x",
                want=f"<= {MOST:g}", met=ratio <= MOST,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[80, 500, 2048])
    parser.add_argument("--gates", nargs="+", choices=("random", "init", "floor"), default=["random", "init"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16", "float16"]
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, found = results.load(), Results()
    for dtype in args.dtypes:
        for T in args.tokens:
            for kind in KINDS:
                for gates in args.gates:
                    if dtype == "float16" and min(args.tokens) != T:
                        continue  # which the cuda backend declines
                    found.figures += figures(T, kind, gates, getattr(torch, dtype))
                    if args.json:  # after each kind of call: a run may end early
                        results.write(args.json, results.document(found, [PRESET], load))
    print(f"\n{'root mean square of cuda, relative to triton':60} ratio")
    for figure in found.figures:
        if figure.met is not None:
            print(f"{figure.name:60} {figure.value:5.2f}{'' if figure.met else '  MORE THAN WANTED'}")
    if found.missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
