"""The common verifiers: each accepts what it says, and declines the rest with its documented code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kdacore import verifiers
from kdacore.types import Device, Request, TensorSpec, Verifier

BASE = Request(
    op="chunk_kda",
    kind="torch",
    device=Device("cuda", 0, "sm_90"),
    B=1,
    T=128,
    H=2,
    HV=4,
    K=64,
    V=64,
    N=1,
    dtype="bfloat16",
    state_dtype="float32",
    tensors=(("g", TensorSpec((1, 128, 4, 64), "float32")),),
    gate="sigmoid",
    lower_bound=-5.0,
)


@pytest.mark.parametrize(
    ("verifier", "change", "code"),
    [
        (verifiers.dtypes("bfloat16"), {"dtype": "float32"}, "dtype"),
        (verifiers.dtypes("bfloat16", "float32", arrays=("g", "beta")), {"dtype": "float16"}, "dtype"),
        (verifiers.state_dtypes("float32"), {"state_dtype": "bfloat16"}, "state_dtype"),
        (verifiers.head_dims((64, 128), equal=True), {"V": 128}, "head_dim"),
        (verifiers.head_dims(range(16, 257)), {"K": 257}, "head_dim"),
        (verifiers.key_dims((64,)), {"K": 60}, "head_dim"),
        (verifiers.compute_capability(80), {"device": Device("cuda", 0, "sm_75")}, "hardware"),
        (verifiers.compute_capability(80), {"device": Device("rocm", 0, "gfx942")}, "hardware"),
        (verifiers.architectures("sm_90"), {"device": Device("cuda", 0, "sm_100")}, "hardware"),
        (verifiers.grouped_heads(2), {"HV": 8}, "gva"),
        (verifiers.bounded_gates(), {"lower_bound": -6.0}, "gate"),
        (verifiers.bounded_gates(), {"gate": "softplus", "lower_bound": None}, "gate"),
        (verifiers.bounded_gates(), {"gate": "log"}, "gate"),
        (verifiers.lengths(128), {"T": 129}, "too_large"),
        (verifiers.lengths(1024, multiple=64), {"T": 100}, "length"),
    ],
)
def test_it_declines_with_its_code(verifier: Verifier, change: dict[str, Any], code: str) -> None:
    assert verifier(BASE) is None
    reason = verifier(dataclasses.replace(BASE, **change))
    assert reason is not None and reason.code == code and reason.got and reason.want


def test_further_arrays_are_checked_where_they_are_given() -> None:
    reason = verifiers.dtypes("bfloat16", arrays=("g", "beta"))(BASE)
    assert reason is not None and reason.got == "g: float32"


def test_a_promised_log_decay_is_bounded() -> None:
    promised = dataclasses.replace(BASE, gate="log", safe_gate=True)
    assert verifiers.bounded_gates()(promised) is None
