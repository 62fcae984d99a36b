"""What the JAX backends decline, by reason code, and what the reason says. Nothing is compiled to find out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kdacore.types import Device, Reason, Request, TensorSpec
from kdacore_pallas import checks, pallas_checks, tpu_shapes
from kdacore_pallas.kernels import memory

SIZE = tpu_shapes.Size(T=256, H=4, HV=4)


def request(generation: str = "v5e", **changes: object) -> Request:
    """A chunk call on a TPU that is served."""
    return replace(tpu_shapes.chunk_request(SIZE, generation), **changes)


def reasons(found: Request, verifiers: tuple[Callable[[Request], Reason | None], ...]) -> dict[str, Reason]:
    return {r.code: r for r in (check(found) for check in verifiers) if r is not None}


def chunk(found: Request) -> dict[str, Reason]:
    return reasons(found, pallas_checks.CHUNK_CHECKS)


def test_a_production_call_is_served_on_every_generation() -> None:
    for generation in memory.VMEM:
        assert not chunk(tpu_shapes.chunk_request(tpu_shapes.Size(), generation)), generation
        decode = tpu_shapes.decode_request(generation)
        assert not reasons(decode, pallas_checks.DECODE_CHECKS), generation


def test_every_gate_is_served() -> None:
    for gate in ("log", "softplus", "sigmoid"):
        assert not chunk(request(gate=gate, lower_bound=-5.0 if gate == "sigmoid" else None))
    assert not chunk(request(scalar_gate=True, tensors=(("g", TensorSpec((1, 256, 4), "float32")),)))


@pytest.mark.parametrize(
    ("code", "changes", "said"),
    [
        ("platform", {"device": Device("cpu")}, "KDACORE_PALLAS_INTERPRET=1"),
        ("arch", {"device": Device("tpu", arch="v99")}, "v5e"),
        ("dtype", {"dtype": "float16"}, "bfloat16"),
        ("dtype", {"state_dtype": "float16"}, "bfloat16"),
        ("dtype", {"tensors": (("g", TensorSpec((1, 256, 4, 128), "float16")),)}, "bfloat16"),
        ("head_dim", {"K": 100}, "multiples of 8"),
        ("head_dim", {"V": 264}, "multiples of 8"),
        ("checkpoints", {"checkpoint_every": 128}, "0"),
        ("smem", {"T": 4_000_000}, "262144"),
    ],
)
def test_chunk_reasons(
    code: str, changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pallas_checks, "interpreted", lambda: False)
    found = chunk(request(**changes))
    assert set(found) == {code}
    assert said in found[code].want
    assert found[code].got


def test_the_vmem_need_is_said_in_numbers() -> None:
    """Many value heads on one q/k head: the step takes them all."""
    wide = tpu_shapes.Size(T=256, H=1, HV=32, K=256, V=256, dtype="float32")
    found = chunk(tpu_shapes.chunk_request(wide, "v4"))
    need = memory.forward_bytes(tpu_shapes.chunk_request(wide, "v4"), 1)
    assert set(found) == {"vmem"}
    assert found["vmem"].got == f"{need / memory.MIB:.1f} MiB"
    assert found["vmem"].want == "at most 16 MiB on v4"


def test_decode_reasons() -> None:
    wide = tpu_shapes.decode_request("v4", B=4, H=64, K=256)
    found = reasons(wide, pallas_checks.DECODE_CHECKS)
    assert set(found) == {"vmem"} and "MiB" in found["vmem"].got
    many = tpu_shapes.decode_request("v5e", B=20_000)
    assert set(reasons(many, pallas_checks.DECODE_CHECKS)) == {"smem"}


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("dtype", {"dtype": "float64"}),
        ("device", {"kind": "torch", "device": Device("cuda", arch="sm_90")}),
        ("traced", {"kind": "torch", "device": Device("cpu"), "traced": True}),
    ],
)
def test_xla_reasons(code: str, changes: dict[str, object]) -> None:
    verifiers = (checks.no_float64, checks.host_arrays_on_cpu, checks.not_captured)
    assert set(reasons(request(**changes), verifiers)) == {code}
    assert not reasons(request(), verifiers)
