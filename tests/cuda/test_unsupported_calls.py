"""Every rejection of the CUDA backend has its code; what it serves has no objection."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cuda_calls import BOUNDED_MODEL, Draw, request_of

import kdacore_cuda
from kdacore import feature_matrix, lazy
from kdacore.cli import main as cli
from kdacore.ops import OPS
from kdacore.registry import REGISTRY, missing
from kdacore.types import ChunkInputs, Device, Request
from kdacore_cuda import _driver_missing, make_backend, unsupported_calls

pytestmark = pytest.mark.quick

BACKEND = make_backend()


def request(op: str = "chunk_kda", **changes: Any) -> Request:
    d = Draw(0)
    inputs = ChunkInputs(
        q=d.normal(1, 4, 1, 64),
        k=d.normal(1, 4, 1, 64),
        v=d.normal(1, 4, 1, 64),
        beta=d.normal(1, 4, 1),
        **d.gate("random", 1, 4, 1, 64),
    )
    base = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    return dataclasses.replace(base, **({"op": op, "device": Device("cuda", 0, "sm_90")} | changes))


def codes(r: Request) -> set[str]:
    return {reason.code for v in BACKEND.ops[r.op].verifiers if (reason := v(r)) is not None}


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "fused_recurrent_gated_delta_rule"])
def test_serves(op: str) -> None:
    assert codes(request(op)) == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"device": Device("cuda", 0, "sm_75")}, "hardware"),
        ({"device": Device("cuda", 0, "")}, "hardware"),
        ({"K": 60, "V": 60}, "head_dim"),
        ({"K": 192, "V": 192}, "head_dim"),
        ({"dtype": "float32"}, "dtype"),
        ({"state_dtype": "float64"}, "state_dtype"),
        ({"N": 2**29, "HV": 2}, "too_large"),
        ({"T": 2**30}, "too_large"),
    ],
)
def test_rejects(changes: dict[str, Any], code: str) -> None:
    assert codes(request(**changes)) == {code}


def test_without_nvrtc_only_packaged_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported_calls, "_has_compiler", lambda: False)
    assert codes(request(device=Device("cuda", 0, "sm_80"))) == {"unavailable"}
    assert codes(request(device=Device("cuda", 0, "sm_90"))) == set()
    monkeypatch.setattr(unsupported_calls, "_has_cubins", lambda: False)  # as of the wheel for every machine
    assert codes(request(device=Device("cuda", 0, "sm_90"))) == {"unavailable"}


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "find_spec", lambda name: None)
    assert (
        "torch or JAX",
        "torch is not installed and jax is not installed",
        "pip install '.[cuda]' in a checkout of kdacore",
    ) in missing(kdacore_cuda.make_backend(), hardware=False)


def test_recurrent_takes_every_small_float() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert codes(request("fused_recurrent_kda", dtype=dtype)) == set()
    assert codes(request("fused_recurrent_kda", dtype="float64")) == {"dtype"}


@pytest.mark.parametrize("op", ["fused_recurrent_kda", "fused_recurrent_gated_delta_rule", "commit_records"])
def test_float16_states_of_the_recurrent_ops_need_a_compiler(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert codes(request(op, state_dtype="float16")) == set()
    monkeypatch.setattr(unsupported_calls, "_has_compiler", lambda: False)
    assert codes(request(op, state_dtype="float16")) == {"unavailable"}
    assert codes(request(op, state_dtype="bfloat16")) == set()


def test_float64_gate_is_rejected() -> None:
    r = request()
    tensors = tuple((n, dataclasses.replace(s, dtype="float64") if n == "g" else s) for n, s in r.tensors)
    assert codes(dataclasses.replace(r, tensors=tensors)) == {"dtype"}


TRAINED = {"needs_grad": True, "K": 128, "V": 128}


def test_gradients_are_served_where_there_is_a_backward() -> None:
    assert codes(request(**TRAINED)) == set()
    assert codes(request("chunk_gated_delta_rule", **TRAINED)) == set()
    differentiated = [name for name, op in BACKEND.ops.items() if op.backward is not None]
    assert differentiated == ["chunk_kda", "chunk_gated_delta_rule"]
    assert all(BACKEND.ops[name].fast_gradients is not None for name in differentiated)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": Device("cuda", 0, "sm_100")},
        {"device": Device("cuda", 0, "sm_80")},
    ],
)
def test_gradients_are_rejected_elsewhere(changes: dict[str, Any]) -> None:
    assert codes(request(**TRAINED | changes)) == {"gradients"}
    assert codes(request(**TRAINED | changes | {"needs_grad": False})) == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"device": Device("cuda", 0, "sm_100")}, "device"),
        ({"K": 40, "V": 64}, "head_dim"),
        ({"K": 64, "V": 100}, "head_dim"),
        ({"K": 256, "V": 64}, "head_dim"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_the_gated_delta_rule_is_served_where_it_has_kernels(changes: dict[str, Any], code: str) -> None:
    """With and without gradients alike."""
    for needs_grad in (True, False):
        r = request("chunk_gated_delta_rule", **TRAINED | changes | {"needs_grad": needs_grad})
        assert codes(r) == {code}


@pytest.mark.parametrize(
    ("changes", "packaged"),
    [
        ({}, True),
        ({"K": 64, "V": 64}, True),
        ({"dtype": "float16"}, True),
        ({"K": 100, "V": 192}, True),
        ({"K": 32, "V": 32}, False),
        ({"K": 64, "V": 128}, False),
        ({"K": 64, "V": 64, "dtype": "float16"}, False),
    ],
)
def test_variants_of_the_gated_delta_rule_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], packaged: bool
) -> None:
    r = request("chunk_gated_delta_rule", **TRAINED | changes)
    assert unsupported_calls.gated_delta_variant(r) is None
    monkeypatch.setattr(unsupported_calls, "_has_compiler", lambda: False)
    reason = unsupported_calls.gated_delta_variant(r)
    assert (reason is None) == packaged
    assert reason is None or reason.code == "unavailable"


def test_declaring_the_backend_imports_nothing_else() -> None:
    """No framework, and none of the backend's other modules."""
    code = """
import sys
from kdacore_cuda import make_backend
make_backend()
assert not {"torch", "cuda", "triton"} & set(sys.modules)
ours = {name for name in sys.modules if name.startswith("kdacore_cuda")}
assert ours == {"kdacore_cuda"}, ours
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_declared_function_exists() -> None:
    """They are named as text, and imported when they are first called."""
    source = Path(kdacore_cuda.__file__).read_text()
    named = re.findall(r'(?:_lazy|_by_kind)\("([\w.]+)", "(\w+)"', source)
    named += [(x, "backward") for x in re.findall(r'"backward", "([\w.]+)"', source)]
    named += [("unsupported_calls", v.__name__) for op in BACKEND.ops.values() for v in op.verifiers]
    named += [
        (module, name)
        for module in ("forms.stages.forward", "jax.forward")
        for name in re.findall(r'_stage\("\w+", "(\w+)"', source)
    ]
    assert len(set(named)) >= 30
    for module, function in named:
        assert callable(getattr(import_module(f"kdacore_cuda.{module}"), function)), (module, function)


def test_explaining_a_call_on_assumed_hardware_needs_no_driver(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "1,8192,64,64,128,128", "--dtype", "bfloat16", "--device", "cuda", "--arch", "sm_90"]
    assert cli.main(["explain", "chunk_kda", *words]) == 0
    out = capsys.readouterr().out
    assert "-> cuda: supported" in out
    driver = _driver_missing()
    said = " ".join(out.split())  # long lines go on in the next
    assert (f"assumed, not here: {driver}" in said) == (driver is not None)


def test_jax_is_served_what_torch_is_served() -> None:
    """Every feature of the doctor's matrix, on the same device, with gradients too."""
    able = feature_matrix.capable(REGISTRY.get("cuda"))
    served: dict[str, set[tuple[str, str]]] = {"torch": set(), "jax": set()}
    for kind in ("torch", "jax"):
        place = feature_matrix.Place(kind, "cuda", "sm_90")  # type: ignore[arg-type]
        for op in (op for op in OPS if op in able.backend.ops):
            for feature in (f for f in feature_matrix.FEATURES if f.applies(op) and kind in f.kinds):
                calls = [
                    feature_matrix.at(c.changed(**feature.change), place)
                    for c in feature_matrix.plain_calls(op)
                ]
                if any(
                    not feature_matrix._refusal(able, call, feature_matrix.request_of, []) for call in calls
                ):
                    name = "gradients" if feature.name == "jit, vmap and grad" else feature.name
                    served[kind].add((op, name))
    only_torch = served["torch"] - served["jax"]
    assert {name for _, name in only_torch} == {"out given", "disable_recompute"}  # JAX has neither
    assert served["jax"] < served["torch"]
    for op in ("chunk_kda", "chunk_gated_delta_rule"):
        assert (op, "gradients") in served["jax"]
