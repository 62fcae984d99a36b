"""Cases of the recurrent op to compile ahead of time: a call for every rule of the shipped configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from kdacore.types import Device, RecurrentInputs, Request
from kdacore_triton import configs
from kdacore_triton.aot import MODEL_DIMS, AotCase, record
from kdacore_triton.recurrent import forward


def aot_cases(arch: str) -> list[AotCase]:
    """Both layouts and state dtypes, one token and several, at the head size each rule is for."""
    cases = []
    seen = set()
    for choice in configs.shipped_for(arch):
        if choice.kernel != "recurrent":
            continue
        config = choice.config
        for K, state, v_first, T in _shapes(choice.when):
            name = f"recurrent K{K} BV{config['BV']} w{config['num_warps']} {state} T{T}"
            name += " v_first" if v_first else ""
            if name in seen:
                continue
            seen.add(name)
            call = _meta_call(arch, T, state, v_first, K)
            slow = (K, state, T) != (128, "float32", 1) or "rows" in choice.when
            with configs.override("recurrent", config):
                cases += record(name, partial(forward, *call), slow=slow)
    for (K, V), T in product(MODEL_DIMS, (1, 4)):
        call = _meta_call(arch, T, "float32", False, K, V)
        cases += record(f"recurrent K{K} V{V} float32 T{T}", partial(forward, *call), slow=True)
    for T in (1, 4):
        call = _with_own_rows(*_meta_call(arch, T, "float32", False))
        cases += record(f"recurrent T{T}, rows written in another pool", partial(forward, *call), slow=True)
    return cases


def _with_own_rows(request: Request, x: RecurrentInputs) -> tuple[Request, RecurrentInputs]:
    """The same call as a server verifies candidates: the state after each token goes to a row of its own."""
    N, T = request.N, request.T

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = x._replace(
        state_indices=numbers(N, T), num_accepted_tokens=numbers(N), has_initial_state=numbers(N, dtype=torch.bool),
        write_indices=numbers(N, T), write_pool=x.initial_state,
    )  # fmt: skip
    rows = request.pool_size
    request = replace(request, state_indices_ndim=2, write_indices_ndim=2, write_pool_size=rows, null_index=0)
    return request, x


def _shapes(when: Any) -> Iterator[tuple[int, str, bool, int]]:
    """Head size, state dtype, layout and tokens: the value each rule is for, else every one."""
    K = when.get("K", [None, 128])[1] or 256
    for state in [when["state"]] if "state" in when else ["float32", "bfloat16"]:
        for v_first in [when["v_first"]] if "v_first" in when else [False, True]:
            for T in (1, 4):
                yield K, state, v_first, T


def _meta_call(
    arch: str, T: int, state: str, v_first: bool, K: int = 128, V: int | None = None
) -> tuple[Request, RecurrentInputs]:
    """A decode step as a serving engine makes it: pool, indices, everything fused, on ``meta`` tensors. V is K unless
    given."""
    B, H, V = 32, 32, V or K

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = RecurrentInputs(
        q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, H, V), g=empty(B, T, H, K), beta=empty(B, T, H),
        A_log=empty(H, dtype=torch.float32), dt_bias=empty(H, K, dtype=torch.float32),
        initial_state=empty(2 * B, H, *((V, K) if v_first else (K, V)), dtype=getattr(torch, state)),
        state_indices=empty(B, dtype=torch.int32),
    )  # fmt: skip
    request = Request(
        op="fused_recurrent_kda", kind="torch", device=Device("cuda", 0, arch), B=B, T=T, H=H, HV=H, K=K, V=V, N=B,
        dtype="bfloat16", state_dtype=state, gate="sigmoid", lower_bound=-5.0, safe_gate=True, scale=K**-0.5,
        qk_l2norm=True, beta_sigmoid=True, state_v_first=v_first, pool_size=2 * B, state_indices_ndim=1,
        inplace_state=True,
    )  # fmt: skip
    return request, x
