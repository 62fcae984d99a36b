"""Triton's decode step by warps and registers: ``python -m benchmarks.decode_tiles [--cases NAME...] [--samples N]``.

On an NVIDIA GPU, bfloat16, K = V = 128 unless named otherwise, a convolution of width 4. Every variant is held against
the reference backend first; then launches of a CUDA graph are timed, each on rows that the caches no longer hold, the
variants in turn. ``shipped`` is what :func:`kdacore_triton.decode_tiles.decode_tile` chooses. ``verify`` cases are four
candidates by records, of which the call before has had all accepted.

``--device cpu`` checks alone, in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import kdacore
from kdacore import contract
from kdacore.bench import graphs
from kdacore.bench.clock import Budget, Step, interleave
from kdacore.contract.records import PARTS
from kdacore.ops import OPS
from kdacore_triton import decode, decode_tiles

TAPS, CANDIDATES = 4, 4
MOST_LAUNCHES = 64
"""In a graph."""
BOUND = 9e-3
CHECKED = 6
"""Sequences that are held against the reference's."""
Arrays = dict[str, Any]


class Case(NamedTuple):
    """A decode step, with the microseconds that it should take."""

    op: str
    B: int
    H: int
    HV: int
    aim: float | None = None
    state: torch.dtype = torch.float32
    v_first: bool = False
    K: int = 128
    tokens: int = 1

    @property
    def options(self) -> Arrays:
        shared: Arrays = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "inplace_state": True}
        shared |= {"use_beta_sigmoid_in_kernel": True, "state_v_first": self.v_first}
        return shared if self.op == "gdn" else {**shared, "safe_gate": True, "lower_bound": -5.0}

    @property
    def bytes(self) -> int:
        """Of the states of all sequences."""
        return self.B * self.HV * self.K * self.K * int(self.state.itemsize)


CASES = {
    "kda-b1": Case("kda", 1, 32, 32, 4.2),
    "kda-b8": Case("kda", 8, 32, 32, 10.5),
    "kda-b32": Case("kda", 32, 32, 32, 37.5),
    "kda-b256": Case("kda", 256, 32, 32, 278),
    "kda-h24": Case("kda", 16, 24, 24),
    "kda-h6": Case("kda", 64, 6, 6, 15),
    "kda-v-first": Case("kda", 32, 32, 32, 37.5, v_first=True),
    "kda-k64": Case("kda", 32, 32, 32, K=64),
    "kda-bf16": Case("kda", 256, 32, 32, 145, torch.bfloat16),
    "gdn-h16": Case("gdn", 32, 16, 32, 37),
    "gdn-h2": Case("gdn", 128, 2, 8, 37),
    "verify-b32": Case("kda", 32, 32, 32, 42, tokens=CANDIDATES),
    "verify-gdn": Case("gdn", 32, 16, 32, tokens=CANDIDATES),
}
VARIANTS: dict[str, tuple[int, int] | None] = {
    "shipped": None,
    "w4": (4, 0),
    "w8": (8, 0),
    "w8 r128": (8, 128),
    "w16": (16, 0),
    "w16 r64": (16, 64),
}


@contextmanager
def tile_of(variant: tuple[int, int] | None) -> Iterator[None]:
    """Calls that are made for the first time take so many warps, and so many registers a thread."""
    chosen = decode_tiles.decode_tile

    def forced(request: Any) -> decode_tiles.Tile:
        tile = chosen(request)
        return tile if variant is None else decode_tiles.Tile(tile.BV, *variant)

    vars(decode)["decode_tile"] = forced
    decode._plan._forget()
    try:
        yield
    finally:
        vars(decode)["decode_tile"] = chosen
        decode._plan._forget()


def draw(case: Case, rows: int, device: str) -> Arrays:
    """Arrays of a call, with pools of so many rows."""
    make = torch.Generator(device).manual_seed(case.B + case.HV)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(dtype)

    B, H, HV, K, T = case.B, case.H, case.HV, case.K, case.tokens
    D, gate, wide = 2 * H * K + HV * K, (HV,) if case.op == "gdn" else (HV, K), torch.float32
    x: Arrays = {
        "x": normal(B, T, D), "g": normal(B, T, *gate), "beta": normal(B, T, HV), "z": normal(B, T, HV, K),
        "A_log": torch.log(1 + 15 * torch.rand(HV, generator=make, device=device)),
        "dt_bias": normal(*gate, dtype=wide) - 4.0, "conv_weight": normal(D, TAPS, dtype=wide) * 0.5,
        "norm_weight": 1 + normal(K, dtype=wide) * 0.1,
        "initial_state": (normal(rows, HV, K, K, dtype=wide) * 0.1).to(case.state),
        "conv_state": normal(rows, TAPS + T - 2, D).transpose(1, 2),
        "state_indices": torch.arange(B, dtype=torch.int32, device=device),
    }  # fmt: skip
    if T > 1:
        update, key = normal(rows, T, HV, K, dtype=wide) * 0.3, normal(rows, T, H, K, dtype=wide) / K**0.5
        decay = torch.sigmoid(normal(rows, T, *gate, dtype=wide) + 2)
        x |= {"records": (update, key, decay), "record_indices": x["state_indices"].clone()}
        x["num_replayed"] = torch.full_like(x["state_indices"], T)
    return x


def reference(case: Case, x: Arrays) -> torch.Tensor:
    op = kdacore.fused_decode_gated_delta_rule if case.op == "gdn" else kdacore.fused_decode_kda
    o, _ = op(**x, **case.options, backend="reference")
    return o


def step(case: Case, x: Arrays) -> torch.Tensor:
    """The backend's own function: the front end would remember the variant that it has seen first."""
    definition = OPS["fused_decode_gated_delta_rule" if case.op == "gdn" else "fused_decode_kda"]
    arrays = dict(x)
    arrays |= zip(PARTS, arrays.pop("records", ()), strict=False)
    inputs = definition.inputs(**arrays)
    options = tuple([case.options.get(o.name, o.default) for o in definition.option_arguments])
    request, _ = contract.build_request(definition, inputs, options)
    o: torch.Tensor = decode.forward(request, inputs).o
    return o


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def check(name: str, case: Case, device: str) -> None:
    """Hold what a call returns and writes against the reference. Raises AssertionError."""
    x = draw(case, case.B + 1, device)
    some = sorted({*range(min(case.B, CHECKED)), case.B - 1})
    by_sequence = ("x", "g", "beta", "z", "initial_state", "conv_state", "num_replayed")
    want: Arrays = {n: a[some].cpu() if n in by_sequence else a for n, a in x.items()}
    want |= {n: x[n].cpu() for n in ("A_log", "dt_bias", "conv_weight", "norm_weight")}
    want["state_indices"] = torch.arange(len(some), dtype=torch.int32)
    if "records" in x:
        want |= {
            "records": tuple(a[some].cpu() for a in x["records"]),
            "record_indices": want["state_indices"],
        }
    unused = x["initial_state"][case.B].clone()
    expected, got = reference(case, want), step(case, x)
    found = {"o": error(got[some], expected)}
    found["state"] = error(x["initial_state"][some], want["initial_state"])
    for i, part in enumerate(("update", "key", "decay") if "records" in x else ()):
        found[part] = error(x["records"][i][some], want["records"][i])
    wrong = {what: e for what, e in found.items() if not e < BOUND}
    if not torch.equal(x["conv_state"][some].cpu(), want["conv_state"]):
        wrong["conv_state"] = float("nan")
    if not torch.equal(x["initial_state"][case.B], unused):
        wrong["a row that no sequence names"] = float("nan")
    if wrong:
        raise AssertionError(f"{name}: not the reference's: {wrong}")


def capture(case: Case, x: Arrays, count: int) -> Step:
    """Replays of a graph of ``count`` launches, each with rows of its own."""
    steps = []
    for i in range(count):
        rows: Arrays = {n: x[n] + i * case.B for n in ("state_indices", "record_indices") if n in x}
        steps.append({**x, **rows})
    return graphs.record(lambda one: step(case, one), steps, warm_ups=3)


def measure(name: str, case: Case, samples: int) -> None:
    count = graphs.launches_of(case.bytes, MOST_LAUNCHES)
    x = draw(case, count * case.B, "cuda")
    replays = {}
    for variant, tile in VARIANTS.items():
        with tile_of(tile):
            check(f"{name}, {variant}", case, "cuda")
            replays[variant] = capture(case, x, count)
    timings = interleave(replays, lambda replay: graphs.seconds_of(replay, count), Budget(samples, 20.0))
    times = "  ".join(f"{variant} {1e6 * t.median:7.2f}" for variant, t in timings.items())
    rate = 2 * case.bytes / timings["shipped"].median / 1e12
    goal = "" if case.aim is None else f"  aim {case.aim:g}"
    print(f"{name:12} us: {times}  {rate:.2f} TB/s of states{goal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=int, default=25)
    args = parser.parse_args()
    with torch.no_grad():
        for name in args.cases:
            case = CASES[name]
            if args.device == "cpu":
                check(name, case._replace(B=min(case.B, 2), H=1, HV=case.HV // case.H), "cpu")
                print(f"{name}: right")
            else:
                measure(name, case, args.samples)


if __name__ == "__main__":
    main()
