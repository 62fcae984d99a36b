"""What the JAX backends decline, by reason code, and what the reason says. Nothing is compiled to
find out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kdacore.registry import REGISTRY
from kdacore.types import Device, Reason, Request, TensorSpec
from kdacore_pallas import make_pallas, make_xla
from kdacore_pallas.tpu import report_calls, verifiers, vmem

pytestmark = pytest.mark.quick

SIZE = report_calls.Size(T=256, H=4, HV=4)
CHUNK = make_pallas().ops["chunk_kda"].verifiers
RECURRENT = make_pallas().ops["fused_recurrent_kda"].verifiers


def request(generation: str = "v5e", **changes: object) -> Request:
    """A chunk call on a TPU that is served."""
    return replace(report_calls.chunk_request(SIZE, generation), **changes)


def reasons(found: Request, declared: tuple[Callable[[Request], Reason | None], ...]) -> dict[str, Reason]:
    return {r.code: r for r in (verify(found) for verify in declared) if r is not None}


def chunk(found: Request) -> dict[str, Reason]:
    return reasons(found, CHUNK)


def test_a_production_call_is_served_on_every_generation() -> None:
    for generation in vmem.VMEM:
        assert not chunk(report_calls.chunk_request(report_calls.Size(), generation)), generation
        recurrent = report_calls.recurrent_request(generation)
        assert not reasons(recurrent, RECURRENT), generation


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
        ("smem", {"T": 4_000_000}, "262144"),
    ],
)
def test_chunk_reasons(
    code: str, changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers, "interpreted", lambda: False)
    found = chunk(request(**changes))
    assert set(found) == {code}
    assert said in found[code].want
    assert found[code].got


def test_the_vmem_reason_has_numbers() -> None:
    """Many value heads on one q/k head: the step takes them all."""
    wide = report_calls.Size(T=256, H=1, HV=32, K=256, V=256, dtype="float32")
    found = chunk(report_calls.chunk_request(wide, "v4"))
    need = vmem.chunk_forward_bytes(report_calls.chunk_request(wide, "v4"), 1)
    assert set(found) == {"vmem"}
    assert found["vmem"].got == f"{need / vmem.MIB:.1f} MiB"
    assert found["vmem"].want == "at most 16 MiB on v4"


def test_a_step_takes_whole_registers_of_heads_and_channels() -> None:
    """Of heads, for beta; of channels, as those of a step's heads lie side by side. Or all heads."""
    assert vmem.head_blocks(32, 32, 128, 128) == [8, 16, 32]
    assert vmem.head_blocks(16, 64, 64, 64) == [8, 16]
    assert vmem.head_blocks(32, 32, 8, 24) == [16, 32]
    assert vmem.head_blocks(6, 6, 128, 128) == [6]


@pytest.mark.parametrize(
    ("generation", "heads", "forward", "backward"),
    [("v6e", 32, 4, 2), ("v4", 32, 4, 2), ("v6e", 6, 2, 2), ("v6e", 3, 1, 1)],
)
def test_heads_side_by_side_divide_those_of_a_step_and_fit(
    generation: str, heads: int, forward: int, backward: int
) -> None:
    request = report_calls.chunk_request(report_calls.Size(H=heads, HV=heads), generation)
    hb = vmem.heads_per_step(request)
    assert vmem.heads_together(request, "forward", hb) == forward
    assert vmem.heads_together(request, "backward", hb) == backward
    assert vmem.chunk_backward_bytes(request, hb, backward) <= vmem.VMEM[generation]


def test_recurrent_reasons() -> None:
    wide = report_calls.recurrent_request("v4", B=4, H=64, K=256)
    found = reasons(wide, RECURRENT)
    assert set(found) == {"vmem"} and "MiB" in found["vmem"].got
    many = report_calls.recurrent_request("v5e", B=20_000)
    assert set(reasons(many, RECURRENT)) == {"smem"}


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("dtype", {"dtype": "float64"}),
        ("device", {"kind": "torch", "device": Device("cuda", arch="sm_90")}),
        ("traced", {"kind": "torch", "device": Device("cpu"), "traced": True}),
    ],
)
def test_xla_reasons(code: str, changes: dict[str, object]) -> None:
    declared = make_xla().ops["chunk_kda"].verifiers
    assert set(reasons(request(**changes), declared)) == {code}
    assert not reasons(request(), declared)


def test_checkpoints_are_not_listed() -> None:
    """The kernels write none, so the front end declines calls that ask for them."""
    asked = {"checkpoints", "checkpoint_offsets"}
    assert not asked & REGISTRY.get("pallas").backend.ops["chunk_kda"].serves
    assert asked <= REGISTRY.get("xla").backend.ops["chunk_kda"].serves
