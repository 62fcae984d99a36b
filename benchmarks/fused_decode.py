"""The decode step in one launch, and as a chain: ``python -m benchmarks.fused_decode [--cases NAME...] [--json FILE]``.

On an NVIDIA GPU, bfloat16, K = V = 128, a convolution of width 4. ``fused`` is ``fused_decode_kda`` or
``fused_decode_gated_delta_rule``; ``chain`` is the convolution and the gated norm in torch's own operations around
``fused_recurrent_*``, which alone is ``recurrent``. Launches of a CUDA graph, each on states and windows that the
caches no longer hold. Before anything is timed, results are held against the reference backend's on the CPU.

``verify`` cases take several candidates a sequence, all of which the next call accepts: by records (``num_replayed``
of them precede each call), or by states (one written after each candidate). They have no chain.

``--slices`` has every value head divided among that many blocks, whatever the number of heads, and ``--warps``
says how many warps a block has, to find where that pays. ``--device cpu`` checks the chain alone, and verification by
the reference backend.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

import kdacore
from kdacore.bench import graphs, results
from kdacore.bench.clock import Budget, Step, busy_seconds, interleave
from kdacore.bench.results import Figure, Results, Row

PRESET = "fused-decode"
K, TAPS = 128, 4
O_BOUND, STATE_BOUND = 9e-3, 6.6e-3
CHECKED = 6
"""Sequences whose results are held against the reference's."""
Arrays = dict[str, Any]


class Case(NamedTuple):
    """A decode step, with microseconds that the fused op has to reach and should reach."""

    op: str
    B: int
    H: int
    HV: int
    must: float | None = None
    aim: float | None = None
    state: str = "float32"
    candidates: int = 1
    """Tokens of a sequence."""
    by: str = ""
    """How candidates are kept: ``records`` or ``states``."""

    @property
    def shape(self) -> str:
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H} HV{self.HV}"
        tokens = f" T{self.candidates} by {self.by}" if self.by else ""
        return f"{self.op} B{self.B}{tokens} {heads} {self.state} state"

    @property
    def scalar(self) -> bool:
        return self.op == "gdn"

    @property
    def options(self) -> Arrays:
        shared = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }
        return shared if self.scalar else {**shared, "safe_gate": True, "lower_bound": -5.0}

    @property
    def slots(self) -> int:
        """Rows of pools that a sequence has."""
        return self.candidates if self.by == "states" else 1

    @property
    def state_bytes(self) -> int:
        """Of all sequences, in all of their slots."""
        return self.B * self.slots * self.HV * K * K * (4 if self.state == "float32" else 2)

    @property
    def moved_bytes(self) -> int:
        """States that are read, one for each sequence, and written."""
        return self.state_bytes // self.slots + self.state_bytes


CASES: dict[str, Case] = {
    "kda-b1": Case("kda", 1, 32, 32, 4.8, 4.2),
    "kda-b2": Case("kda", 2, 32, 32),
    "kda-b4": Case("kda", 4, 32, 32),
    "kda-b8": Case("kda", 8, 32, 32, 12, 10.5),
    "kda-b32": Case("kda", 32, 32, 32, 39.5, 37.5),
    "kda-b256": Case("kda", 256, 32, 32, 287, 278),
    "kda-h24": Case("kda", 16, 24, 24),
    "kda-h6": Case("kda", 64, 6, 6, 17, 15),
    "gdn-h16": Case("gdn", 32, 16, 32, 40, 37),
    "gdn-h2": Case("gdn", 128, 2, 8, 41, 37),
    "kda-bf16": Case("kda", 256, 32, 32, 155, 145, "bfloat16"),
    "gdn-b1": Case("gdn", 1, 16, 32),
    "kda-h12": Case("kda", 1, 12, 12),
    "verify-records": Case("kda", 32, 32, 32, 46, 42, candidates=4, by="records"),
    "verify-states": Case("kda", 32, 32, 32, candidates=4, by="states"),
}
PARTS = ("update", "key", "decay")
CANDIDATES = ("num_accepted_tokens", "records", "record_indices", "num_replayed")
"""Arguments of calls with candidates."""


def draw(case: Case, sequences: int, device: str) -> Arrays:
    """Arrays of a call, with pools for so many sequences."""
    make = torch.Generator(device).manual_seed(case.B + case.HV)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(dtype)

    B, T, H, HV, rows = case.B, case.candidates, case.H, case.HV, sequences * case.slots
    D, gate = 2 * H * K + HV * K, (HV,) if case.scalar else (HV, K)
    # Channels of a window lie side by side, as servers have them.
    conv = normal(rows, TAPS - 1 + T - 1, D).transpose(1, 2)
    pool = torch.empty(rows, HV, K, K, device=device, dtype=getattr(torch, case.state))
    slots = torch.arange(B * case.slots, dtype=torch.int32, device=device)
    more: Arrays = {}
    if case.by == "states":
        more = {"num_accepted_tokens": torch.full((B,), T, dtype=torch.int32, device=device)}
        slots = slots.view(B, T)
    elif case.by == "records":
        sizes = zip(PARTS, ((HV, K), (H, K), gate), strict=True)
        parts = {name: normal(sequences, T, *size, dtype=torch.float32) for name, size in sizes}
        parts = {
            "update": 0.1 * parts["update"],
            "key": 0.1 * parts["key"],
            "decay": parts["decay"].sigmoid(),
        }
        replayed = torch.full((B,), T, dtype=torch.int32, device=device)
        more = {"records": tuple(parts.values()), "record_indices": slots, "num_replayed": replayed}
    return {
        "x": normal(B, T, D),
        "g": normal(B, T, *gate),
        "beta": normal(B, T, HV),
        "z": normal(B, T, HV, K),
        "A_log": torch.log(1 + 15 * torch.rand(HV, generator=make, device=device)),
        "dt_bias": normal(*gate, dtype=torch.float32) - 4.0,
        "conv_weight": normal(D, TAPS, dtype=torch.float32) * 0.5,
        "norm_weight": 1 + normal(K, dtype=torch.float32) * 0.1,
        "initial_state": pool.normal_(0, 0.1, generator=make),
        "conv_state": conv,
        "state_indices": slots,
        **more,
    }


def fused(case: Case, x: Arrays, backend: str | None) -> torch.Tensor:
    op = kdacore.fused_decode_gated_delta_rule if case.scalar else kdacore.fused_decode_kda
    o, _ = op(**x, **case.options, inplace_state=True, backend=backend)
    return o


def recurrent(case: Case, x: Arrays, q: Any, k: Any, v: Any, backend: str | None) -> torch.Tensor:
    op = kdacore.fused_recurrent_gated_delta_rule if case.scalar else kdacore.fused_recurrent_kda
    names = ("g", "beta", "A_log", "dt_bias", "initial_state", "state_indices", *CANDIDATES)
    given = {name: x[name] for name in names if name in x}
    o, _ = op(q, k, v, **given, **case.options, inplace_state=True, backend=backend)
    return o


def split_channels(case: Case, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes = (case.H, case.H, case.HV)
    parts = y.split([heads * K for heads in sizes], dim=-1)
    return tuple(
        part.unflatten(-1, (heads, K)).contiguous() for part, heads in zip(parts, sizes, strict=True)
    )


def chain(case: Case, x: Arrays, backend: str | None) -> torch.Tensor:
    """The same step, part by part."""
    rows = x["state_indices"]
    line = torch.cat([x["conv_state"][rows], x["x"].transpose(1, 2)], dim=2)
    x["conv_state"][rows] = line[:, :, 1:]
    y = silu((line * x["conv_weight"]).sum(2)).bfloat16()[:, None]
    q, k, v = split_channels(case, y)
    o = recurrent(case, x, q, k, v, backend).float()
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * x["norm_weight"]
    z = x["z"].float()
    return (o * (silu(z) if case.scalar else z.sigmoid())).bfloat16()


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def check(case: Case, name: str, call: Callable[[Arrays], torch.Tensor], device: str) -> None:
    """Holds what a call returns and writes against the reference. Raises AssertionError."""
    x = draw(case, case.B + 1, device)
    some = sorted({*range(min(case.B, CHECKED)), case.B - 1})
    few, slots = case._replace(B=len(some)), case.slots
    rows = [slots * n + i for n in some for i in range(slots)]
    tokens = {n: x[n][some].cpu() for n in ("x", "g", "beta", "z")}
    shared = {n: x[n].cpu() for n in ("A_log", "dt_bias", "conv_weight", "norm_weight")}
    pools = {n: x[n][rows].cpu() for n in ("initial_state", "conv_state")}
    numbers = {n: a for n, a in draw(few, len(some), "cpu").items() if n in ("state_indices", *CANDIDATES)}
    if "records" in x:
        numbers["records"] = tuple(part[some].cpu() for part in x["records"])
    want = fused(few, {**tokens, **shared, **pools, **numbers}, "reference")
    beyond = x["initial_state"][case.B * slots :].clone()
    got = call(x)[some]
    errors = {
        "o": (apart(got, want), O_BOUND),
        "state": (apart(x["initial_state"][rows], pools["initial_state"]), STATE_BOUND),
    }
    for what, (error, bound) in errors.items():
        if not error < bound:
            raise AssertionError(
                f"{case.shape}: {name}: {what} is {error:.1e} from the reference's, not {bound:.1e}"
            )
    if not torch.equal(x["conv_state"][rows].cpu(), pools["conv_state"]):
        raise AssertionError(f"{case.shape}: {name}: windows of the convolution")
    if not torch.equal(x["initial_state"][case.B * slots :], beyond):
        raise AssertionError(f"{case.shape}: {name}: a row that no sequence names has changed")


def capture(case: Case, call: Callable[[Arrays], Any], x: Arrays, count: int) -> Step:
    """A step that replays a graph of ``count`` launches, each with rows of its own."""
    rows = {"state_indices": case.B * case.slots, "record_indices": case.B}
    own = {name: step for name, step in rows.items() if name in x}
    return graphs.record(
        call,
        [{**x, **{name: x[name] + i * step for name, step in own.items()}} for i in range(count)],
    )


def measure(found: Results, name: str, case: Case, samples: int) -> None:
    count = graphs.launches_of(case.state_bytes)
    x = draw(case, count * case.B, "cuda")
    q, k, v = split_channels(case, x["x"])
    calls: dict[str, Callable[[Arrays], torch.Tensor]] = {
        "fused": lambda given: fused(case, given, "cuda"),
        "chain": lambda given: chain(case, given, "cuda"),
        "recurrent": lambda given: recurrent(case, given, q, k, v, "cuda"),
    }
    if case.by:
        del calls["chain"]
    for whose in calls.keys() - {"recurrent"}:
        check(case, whose, calls[whose], "cuda")
    steps = {whose: capture(case, call, x, count) for whose, call in calls.items()}
    timings = interleave(steps, lambda step: graphs.seconds_of(step, count), Budget(samples, 20.0))
    chosen = kdacore.explain(op_of(case), **x, **case.options, inplace_state=True, backend="cuda")
    form = chosen.candidate("cuda").form
    host = 1e6 * statistics.median(
        busy_seconds(lambda: calls["fused"](x), torch.cuda.synchronize) for _ in range(30)
    )
    rate = case.moved_bytes / timings["fused"].median / 1e12
    goal = "" if case.must is None else f"  must {case.must:g}, aim {case.aim:g}"
    times = "  ".join(f"{whose} {1e6 * t.median:8.2f}" for whose, t in timings.items())
    print(
        f"{name:14} {case.shape:44} {times} us  {rate:.2f} TB/s of states  host {host:.1f} us{goal}",
        flush=True,
    )
    print(f"{'':14} {form}", flush=True)
    for whose, t in timings.items():
        found.rows.append(
            Row(
                preset=PRESET, case=name, phase="graph", contender=whose, status="ok", backend="cuda",
                form=form if whose == "fused" else "", shape=case.shape, dtype="bfloat16", device="cuda",
                seconds=t.median, low=t.low, high=t.high, samples=t.samples,
            )
        )  # fmt: skip
    us = 1e6 * timings["fused"].median
    met = None if case.must is None else us <= case.must
    want = "" if case.must is None else f"<= {case.must:g}"
    found.figures.append(
        Figure(preset=PRESET, name=f"{name}: fused", value=us, unit="us", want=want, met=met, note=form)
    )
    found.figures.append(
        Figure(preset=PRESET, name=f"{name}: host", value=host, unit="us", want="", met=None)
    )


def op_of(case: Case) -> str:
    return "fused_decode_gated_delta_rule" if case.scalar else "fused_decode_kda"


def force_division(slices: int | None, warps: int | None) -> None:
    """Every value head of a call for one token is divided among so many blocks, where there is such a kernel; by blocks
    of so many warps."""
    from kdacore_cuda import choice

    plain = choice.decode_split

    def forced(r: Any, mode: Any, items: int, device: Any) -> Any:
        allowed = choice.decode_splits(mode, r.state_dtype, device.arch)
        fitting = [x for x in allowed if x.slices == slices and r.HV // r.H % x.heads == 0]
        split = max(fitting, key=lambda x: x.heads) if fitting else plain(r, mode, items, device)
        return split._replace(four_warps=warps == 4) if warps and split.four_warps else split

    choice.decode_split = forced
    if warps == 8:  # several tokens are left to the kernel for every call
        choice._has_kernel_for_tokens = lambda *given: False


def check_on_cpu(name: str, case: Case) -> None:
    whose, call = ("fused", fused) if case.by else ("chain", chain)
    check(case, whose, lambda x: call(case, x, "reference"), "cpu")
    print(f"{name}: {whose} is right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--slices", type=int, choices=(1, 2, 4))
    parser.add_argument("--warps", type=int, choices=(4, 8))
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, found = results.load(), Results()
    if args.slices or args.warps:
        force_division(args.slices, args.warps)
    with torch.no_grad():
        for name in args.cases:
            case = CASES[name]
            if args.device == "cpu":
                check_on_cpu(name, case._replace(B=min(case.B, 2)))
            else:
                measure(found, name, case, args.samples)
    if args.json:
        results.write(args.json, results.document(found, [PRESET], load))


if __name__ == "__main__":
    main()
