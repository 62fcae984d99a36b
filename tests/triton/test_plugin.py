"""What the Triton backend says it serves, reason by reason, and that saying so imports nothing heavy."""

import subprocess
import sys
from dataclasses import replace

import pytest

import kdacore_triton
from kdacore.types import Device, Request, TensorSpec
from kdacore_triton import verifiers

pytestmark = pytest.mark.quick

H200 = Device("cuda", 0, "sm_90")
CALL = Request("chunk_kda", "torch", H200, 1, 64, 2, 2, 128, 128, 1, "bfloat16", "float32")
CHUNK = kdacore_triton.make_backend().ops["chunk_kda"]


def codes(request: Request) -> list[str]:
    found = [verify(request) for verify in CHUNK.verifiers]
    return [reason.code for reason in found if reason is not None]


def test_an_ordinary_call_is_served() -> None:
    assert codes(CALL) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_103a", "sm_120f"])
def test_nvidia_architectures_served(arch: str) -> None:
    assert codes(replace(CALL, device=Device("cuda", 0, arch))) == []


@pytest.mark.parametrize(
    ("version", "arch", "change", "code"),
    [
        ((3, 8), "sm_100", {"needs_grad": True}, ["compiler"]),
        ((3, 8), "sm_103a", {"dtype": "float32"}, ["compiler"]),
        ((3, 8), "sm_100", {}, []),
        ((3, 8), "sm_90", {"needs_grad": True, "dtype": "float32"}, []),
        ((3, 8), "sm_120", {"needs_grad": True}, []),
        ((3, 9), "sm_100", {"needs_grad": True, "dtype": "float32"}, []),
        ((3, 10), "sm_100", {"needs_grad": True}, []),
        ((), "sm_100", {"needs_grad": True}, []),
    ],
)
def test_tensor_memory_wants_a_triton_that_fits_into_it(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...],
    arch: str,
    change: dict[str, object],
    code: list[str],
) -> None:
    monkeypatch.setattr(verifiers, "triton_version", lambda: version)
    assert codes(replace(CALL, device=Device("cuda", 0, arch), **change)) == code  # type: ignore[arg-type]


def test_amd_is_served() -> None:
    assert codes(replace(CALL, device=Device("rocm", 0, "gfx942"))) == []


@pytest.mark.parametrize(
    "device", [Device("cuda", 0, "sm_75"), Device("cuda"), Device("xpu"), Device("rocm")], ids=str
)
def test_other_hardware_is_declined(device: Device) -> None:
    assert codes(replace(CALL, device=device)) == ["hardware"]


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(CALL, device=Device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert codes(request) == ["hardware"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert codes(request) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"tensors": (("g", TensorSpec((1, 64, 2, 128), "float64")),)}, "dtype"),
        ({"state_dtype": "float64"}, "state_dtype"),
        ({"K": 15}, "head_dim"),
        ({"K": 257}, "head_dim"),
        ({"V": 8}, "head_dim"),
        ({"V": 513}, "head_dim"),
        ({"T": 2**30}, "too_large"),
    ],
    ids=str,
)
def test_each_limit_has_its_reason(change: dict[str, object], code: str) -> None:
    assert codes(replace(CALL, **change)) == [code]  # type: ignore[arg-type]


@pytest.mark.parametrize(("K", "V"), [(16, 256), (60, 100), (96, 192), (256, 16), (256, 512)])
def test_head_dims_served(K: int, V: int) -> None:
    assert codes(replace(CALL, K=K, V=V)) == []


@pytest.mark.parametrize(("K", "V"), [(128, 128), (16, 32), (64, 64), (96, 192), (256, 16), (256, 512)])
def test_gradients_of_one_gate_per_head_are_served_at_any_head_dims(K: int, V: int) -> None:
    assert codes(replace(CALL, K=K, V=V, scalar_gate=True, needs_grad=True)) == []


def test_stages_without_values_mind_k_alone() -> None:
    assert verifiers.key_dim(replace(CALL, V=1)) is None
    reason = verifiers.key_dim(replace(CALL, K=8))
    assert reason is not None and reason.code == "head_dim"


def test_declaring_the_backend_imports_no_framework() -> None:
    code = (
        "import sys; from kdacore_triton import make_backend; b = make_backend();"
        "assert [r.probe() for r in b.requirements] == [None, None];"
        "assert not {'torch', 'triton', 'jax'} & set(sys.modules)"
    )
    path = ":".join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
