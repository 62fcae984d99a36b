"""Calls for the CUDA backend's tests: random inputs, the Request, the oracle and the comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kdacore import contract
from kdacore.ops import OPS
from kdacore.types import ChunkInputs, Outputs, RecurrentInputs, Request
from kdacore_reference.oracle import oracle_forward, to_float64

O_BOUND, STATE_BOUND = 4.5e-3, 3.3e-3
"""Contract section 4, 16-bit inputs."""


def request_of(op: str, inputs: Any, **options: Any) -> Request:
    """The validated Request of a call."""
    opdef = OPS[op]
    flags: dict[str, Any] = dict.fromkeys(opdef.options, False)
    flags |= dict.fromkeys(("scale", "lower_bound", "checkpoint_every", "cp", "null_index"))
    flags |= options
    return contract.build_request(opdef, inputs, tuple(flags[o] for o in opdef.options))[0]


MODEL: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
BOUNDED_MODEL: dict[str, Any] = MODEL | {"safe_gate": True, "lower_bound": -5.0}


class Draw:
    """Random arrays, reproducible by seed."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (
            torch.randn(shape, generator=self.rng).to(self.dtype if dtype is None else dtype).to(self.device)
        )

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=self.rng).to(dtype).to(self.device)

    def unit(self, *shape: int) -> torch.Tensor:
        x = torch.nn.functional.normalize(torch.randn(shape, generator=self.rng), dim=-1)
        return x.to(self.dtype).to(self.device)

    def gate(self, kind: str, B: int, T: int, HV: int, K: int) -> dict[str, torch.Tensor]:
        """``g`` and the gate's parameters. Kinds: ``random`` and ``init`` raw gates, else log decays."""
        if kind == "random":
            return {
                "g": self.normal(B, T, HV, K),
                "A_log": torch.log(1 + 15 * self.uniform(HV)),
                "dt_bias": 0.5 * self.normal(HV, K, dtype=torch.float32),
            }
        if kind == "init":
            dt = torch.exp(np.log(0.001) + np.log(100.0) * self.uniform(HV, K))
            return {
                "g": 0.5 * self.normal(B, T, HV, K),
                "A_log": torch.log(1 + 15 * self.uniform(HV)),
                "dt_bias": dt + torch.log(-torch.expm1(-dt)),
            }
        u = self.uniform(B, T, HV, K)
        log_decay = {
            "slow": -1e-3 * u,
            "fast": -5.0 * torch.ones_like(u),
            "spread": -5.0 * u**3,
            "mixed": torch.where(u < 0.5, 0.0, -60.0),
        }[kind]
        return {"g": log_decay}


def check_outputs(got: Outputs, want: Outputs, loose: float) -> None:
    """Within ``loose`` times the contract's bounds; short sequences are one of its hard cases."""
    assert error(got.o, want.o) < loose * O_BOUND
    for mine, exact in ((got.final_state, want.final_state), (got.checkpoints, want.checkpoints)):
        assert (mine is None) == (exact is None)
        if mine is not None:
            assert error(mine, exact) < loose * STATE_BOUND


def error(got: Any, want: Any) -> float:
    """Of arrays of any kind: relative error in the 2-norm; NaN stays NaN and so fails every bound."""
    want = np.asarray(want)
    assert got.shape == want.shape
    return float(np.linalg.norm(to_float64(got) - want)) / (float(np.linalg.norm(want)) or 1.0)


def oracle(request: Request, inputs: ChunkInputs | RecurrentInputs) -> Outputs:
    return oracle_forward(request, inputs)
