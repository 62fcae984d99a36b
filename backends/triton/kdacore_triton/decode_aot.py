"""Cases of the decode step to compile ahead of time: calls of serving engines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kdacore.types import CommitInputs, DecodeInputs, Device, Request, TensorSpec
from kdacore_triton.aot import AotCase, record
from kdacore_triton.commit import commit_records
from kdacore_triton.decode import forward

_B = 32
_COUNTED = ("sm_90",)
"""Architectures whose spills the list below has counted: one token is given no more than 128 registers there."""


def aot_cases(arch: str) -> list[AotCase]:
    """One token and several, one gate a channel and one a head, groups of value heads, records, and windows."""
    cases = []
    for name, sizes, spills in (
        ("KDA K128", {}, 0),
        ("KDA K128 T4", {"T": 4}, 0),
        ("KDA K128 v_first", {"v_first": True}, 48),
        ("KDA K128 bfloat16 state", {"state": "bfloat16"}, 8),
        ("KDA K128 float16 state", {"state": "float16"}, 8),
        ("KDA K64", {"K": 64}, 0),
        ("KDA K128 T4 records", {"T": 4, "records": True}, 0),
        ("KDA K128 T4 records and windows", {"T": 4, "records": True, "windows": True}, 0),
        ("GDN K128", {"scalar": True, "H": 16, "HV": 32}, 48),
        ("GDN K128 HV8", {"scalar": True, "H": 2, "HV": 8}, 48),
        ("GDN K128 V256", {"scalar": True, "V": 256}, 0),
        ("GDN K128 T4 records", {"scalar": True, "H": 16, "HV": 32, "T": 4, "records": True}, 32),
    ):
        run = partial(forward, *meta_call(arch, **sizes))
        cases += record(
            f"decode {name}", run, slow=name != "KDA K128", max_spills=spills if arch in _COUNTED else 96
        )
    cases += record("commit K128", partial(_commit, arch), slow=True)
    return cases


def _commit(arch: str) -> None:
    """Records applied to states and windows."""
    request, x = meta_call(arch, T=4, records=True)
    given = {name: getattr(x, name) for name in CommitInputs._fields}
    inputs = CommitInputs(**given)
    arrays = tuple(t for t in request.tensors if t[0] in given)
    commit_records(replace(request, op="commit_records", tensors=arrays), inputs)


def meta_call(
    arch: str,
    *,
    T: int = 1,
    H: int = 32,
    HV: int = 32,
    K: int = 128,
    V: int = 0,
    state: str = "float32",
    v_first: bool = False,
    scalar: bool = False,
    records: bool = False,
    windows: bool = False,
) -> tuple[Request, DecodeInputs]:
    """A decode step as a serving engine makes it, on ``meta`` tensors. V is K unless given."""
    V = V or K
    D, wide = 2 * H * K + HV * V, torch.float32

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def numbers() -> torch.Tensor:
        return empty(_B, dtype=torch.int32)

    arrays: dict[str, Any] = {
        "x": empty(_B, T, D), "g": empty(_B, T, HV) if scalar else empty(_B, T, HV, K), "beta": empty(_B, T, HV),
        "initial_state": empty(2 * _B, HV, *((V, K) if v_first else (K, V)), dtype=getattr(torch, state)),
        "A_log": empty(HV, dtype=wide), "dt_bias": empty(*((HV,) if scalar else (HV, K)), dtype=wide),
        "conv_weight": empty(D, 4, dtype=wide), "conv_state": empty(2 * _B, D, 2 + T if records else 3),
        "z": empty(_B, T, HV, V), "norm_weight": empty(V, dtype=wide), "state_indices": numbers(),
    }  # fmt: skip
    if records:
        arrays |= {
            "record_update": empty(_B, T, HV, V, dtype=wide), "record_key": empty(_B, T, H, K, dtype=wide),
            "record_decay": empty(_B, T, HV, *(() if scalar else (K,)), dtype=wide),
            "record_indices": numbers(), "num_replayed": numbers(),
        }  # fmt: skip
    if windows:
        arrays["conv_windows"] = empty(_B, T, 3, D)
    gate: dict[str, Any] = {"gate": "softplus"}
    if not scalar:
        gate = {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True}
    specs = tuple(
        (name, TensorSpec(tuple(a.shape), str(a.dtype).removeprefix("torch."))) for name, a in arrays.items()
    )
    request = Request(
        op="fused_decode_gated_delta_rule" if scalar else "fused_decode_kda", kind="torch",
        device=Device("cuda", 0, arch), B=_B, T=T, H=H, HV=HV, K=K, V=V, N=_B, dtype="bfloat16", state_dtype=state,
        tensors=specs, scalar_gate=scalar, scale=K**-0.5, qk_l2norm=True, beta_sigmoid=True, state_v_first=v_first,
        pool_size=2 * _B, state_indices_ndim=1, null_index=0, inplace_state=True, norm_eps=1e-5,
        norm_activation="silu" if scalar else "sigmoid", **gate,
    )  # fmt: skip
    return request, DecodeInputs(**arrays)
