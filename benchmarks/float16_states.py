"""Final states of the gated delta rule in float16: ``python -m benchmarks.float16_states``.

Drawn as flash-linear-attention's tests draw them (all keys point to one side, gates are slow), on a GPU, against the
float64 oracle. The error is theirs: the root mean square of the difference over that of the oracle's result. They
allow 5e-3; more is an AssertionError.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, normalize

import kdacore
from kdacore.compat import fla

ALLOWED = 5e-3


class Case(NamedTuple):
    name: str
    T: int
    H: int
    """Heads of q and k; v has 4."""
    D: int
    scale: float
    gate_in_kernel: bool
    l2norm: bool


CASES = (
    Case("B2 T1500 H4 D128 scale 0.1, normalizer 10, no l2norm", 1500, 4, 128, 0.1, False, False),
    Case("B2 T256 Hq2 H4 D64, gate in the kernel", 256, 2, 64, 0.1, True, False),
    Case("the same with l2norm", 256, 2, 64, 1.0, True, True),
)
B, HV = 2, 4


def draw(case: Case, seed: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, and the options, of one call."""
    torch.manual_seed(seed)
    half = {"dtype": torch.float16, "device": device}
    q, k, v = (torch.rand(B, case.T, heads, case.D, **half) for heads in (case.H, case.H, HV))
    if not case.l2norm:
        q, k = normalize(q.float(), dim=-1).half(), normalize(k.float(), dim=-1).half()
    x: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": torch.rand(B, case.T, HV, device=device).sigmoid()}
    x["initial_state"] = torch.zeros(B, HV, case.D, case.D, device=device)
    if case.gate_in_kernel:
        x["g"] = torch.rand(B, case.T, HV, **half)
        x["A_log"] = torch.log(1 + 15 * torch.rand(HV, device=device))
        x["dt_bias"] = torch.rand(HV, device=device) - 4
    else:
        x["g"] = logsigmoid(torch.rand(B, case.T, HV, device=device)) / 10
    return x, {
        "scale": case.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": case.gate_in_kernel,
    }


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double().cpu(), want.double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for case in CASES:
            x, options = draw(case, seed, args.device)
            o, state = fla.chunk_gated_delta_rule(**x, **options)
            on_host = {name: tensor.cpu() for name, tensor in x.items()}
            want = kdacore.chunk_gated_delta_rule(**on_host, **options, backend="reference")
            rows.append(
                {
                    "case": case.name,
                    "seed": seed,
                    "o": error(o, want[0]),
                    "final_state": error(state, want[1]),
                }
            )
            print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"what": __doc__, "cases": rows}, indent=1) + "\n")
    if worst := [row for row in rows if not (row["o"] < ALLOWED and row["final_state"] < ALLOWED)]:
        raise AssertionError(f"beyond {ALLOWED}: {worst}")


if __name__ == "__main__":
    main()
