"""What the decode kernel is compiled for ahead of time."""

from __future__ import annotations

from functools import partial

import torch

from kdacore.types import Device, RecurrentInputs, Request
from kdacore_triton import configs
from kdacore_triton.aot import AotCase, record
from kdacore_triton.recurrent import forward


def aot_cases(arch: str) -> list[AotCase]:
    """The decode kernel under every shipped configuration: both layouts and state dtypes, one token and several."""
    cases = []
    for i, config in enumerate(_shipped(arch)):
        with configs.override("recurrent", config):
            for v_first in (False, True):
                for state in ("float32", "bfloat16"):
                    for T in (1, 4):
                        name = (
                            f"recurrent BV{config['BV']} w{config['num_warps']} {state} T{T}"
                            + " v_first" * v_first
                        )
                        slow = i > 0 or state == "bfloat16"
                        call = _meta_call(arch, T, state, v_first)
                        cases += record(name, partial(forward, *call), slow=slow)
    return cases


def _shipped(arch: str) -> list[configs.Config]:
    """Distinct configurations that this architecture may be given, the catch-all's first."""
    choices = [c for c in configs.shipped_for(arch) if c.kernel == "recurrent"]
    found: list[configs.Config] = []
    for choice in reversed(choices):
        if choice.config not in found:
            found.append(choice.config)
    return found


def _meta_call(arch: str, T: int, state: str, v_first: bool) -> tuple[Request, RecurrentInputs]:
    """A decode step as a serving engine makes it: pool, indices, everything fused. No memory behind it."""
    B, H, K = 32, 32, 128

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = RecurrentInputs(
        q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, H, K), g=empty(B, T, H, K), beta=empty(B, T, H),
        A_log=empty(H, dtype=torch.float32), dt_bias=empty(H, K, dtype=torch.float32),
        initial_state=empty(2 * B, H, K, K, dtype=getattr(torch, state)), state_indices=empty(B, dtype=torch.int32),
    )  # fmt: skip
    request = Request(
        op="fused_recurrent_kda", kind="torch", device=Device("cuda", 0, arch), B=B, T=T, H=H, HV=H, K=K, V=K, N=B,
        dtype="bfloat16", state_dtype=state, gate="sigmoid", lower_bound=-5.0, safe_gate=True, scale=K**-0.5,
        qk_l2norm=True, beta_sigmoid=True, state_v_first=v_first, pool_size=2 * B, state_indices_ndim=1,
        inplace_state=True,
    )  # fmt: skip
    return request, x
