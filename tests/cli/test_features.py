"""The op x feature matrix: it is what the verifiers say, and its questions are valid calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kdacore import feature_matrix
from kdacore.feature_matrix import FEATURES, Place, at, matrix, places_of, plain_calls, request_of
from kdacore.machine import Accelerator, Machine
from kdacore.ops import OPS
from kdacore.registry import REGISTRY, Registered
from kdacore.types import Backend, OpImpl, Reason, Request

NUMPY_ONLY = Machine((), (), ("numpy",))


def backend_of(verifier: Any, **fields: Any) -> Registered:
    ops = {name: OpImpl(print, print, serves=OPS[name].features, verifiers=(verifier,)) for name in OPS}
    return Registered(
        Backend(name="asked", version="1", kinds=("numpy", "torch", "jax"), ops=ops, **fields), "", ""
    )


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("op", list(OPS))
def test_every_question_is_a_valid_call(op: str, kind: Any) -> None:
    for feature in FEATURES:
        if feature.applies(op) and kind in feature.kinds:
            for call in plain_calls(op):
                request_of(at(call.changed(**feature.change), Place(kind)))


def test_the_reference_serves_everything_but_tracing() -> None:
    answers, raised = matrix([REGISTRY.get("reference")], NUMPY_ONLY)
    assert not raised
    assert {a.op for a in answers} == set(OPS)
    assert {(a.feature, a.text) for a in answers if a.text != "yes"} == {("jit, vmap and grad", "no: traced")}


def writes_elsewhere(request: Request) -> bool:
    more = request.write_indices_ndim or request.write_pool_size or request.checkpoint_count
    return bool(more or request.has("record_update"))


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("feature", "refuses"),
    [
        ("bfloat16", lambda r: r.dtype == "bfloat16"),
        ("unbounded gate", lambda r: r.gate == "softplus"),
        ("grouped heads (GVA)", lambda r: r.HV > r.H),
        ("packed sequences", lambda r: r.packed),
        ("bfloat16 state", lambda r: r.state_dtype == "bfloat16"),
        ("checkpoints", lambda r: bool(r.checkpoint_every)),
        (
            "in-place pool",
            lambda r: r.inplace_state and r.state_indices_ndim == 1 and not writes_elsewhere(r),
        ),
        ("null slots", lambda r: r.null_index == 0),
        ("states from zeros (has_initial_state)", lambda r: r.has("has_initial_state")),
        ("rows to write", lambda r: r.write_indices_ndim == 1 and not r.write_pool_size),
        ("rows to write, one a token", lambda r: r.write_indices_ndim == 2),
        ("pool to write", lambda r: bool(r.write_pool_size)),
        ("checkpoints at chosen tokens", lambda r: bool(r.checkpoint_count)),
        ("records of candidates", lambda r: r.has("record_update") and r.op != "commit_records"),
        ("accepted tokens", lambda r: r.state_indices_ndim == 2 and not r.has("conv_windows")),
        ("read-only pool", lambda r: r.read_only_state),
        ("K = V = 256", lambda r: r.K == r.V == 256),
        ("chunks of 32", lambda r: r.chunk_size == 32),
    ],
)
def test_it_says_what_the_verifiers_say(feature: str, refuses: Any) -> None:
    """A backend that refuses one thing is shown to refuse that and nothing else."""

    def verifier(request: Request) -> Reason | None:
        return Reason("not_that", "not that") if refuses(request) else None

    answers, _ = matrix([backend_of(verifier, traceable=True)], NUMPY_ONLY)
    refused = {a.feature for a in answers if a.text != "yes"}
    assert refused == {feature}
    assert {a.text for a in answers if a.feature == feature} <= {"no: not_that", "yes"}


def test_a_backend_for_some_places_only() -> None:
    def verifier(request: Request) -> Reason | None:
        return Reason("kind", "torch only") if request.kind != "torch" else None

    answers, _ = matrix([backend_of(verifier)], NUMPY_ONLY)
    assert {a.text for a in answers if a.feature == "float32"} == {"torch cpu"}


def test_places_are_this_machine_s_and_the_usual_ones() -> None:
    gpu = Machine((), (Accelerator("torch", "cuda", "sm_120", "a GPU"),), ("numpy", "torch"))
    only_gpus = backend_of(print, device_types=("cuda",)).backend
    only_gpus = dataclasses.replace(only_gpus, kinds=("torch",))
    assert [str(p) for p in places_of(only_gpus, NUMPY_ONLY)] == ["torch cuda sm_90"]
    assert [str(p) for p in places_of(only_gpus, gpu)] == ["torch cuda sm_120"]
    reference = REGISTRY.get("reference").backend
    assert [str(p) for p in places_of(reference, gpu)] == [
        "numpy cpu",
        "torch cpu",
        "torch cuda sm_120",
        "jax cpu",
    ]


def test_the_arch_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdacore import config

    monkeypatch.setenv("KDACORE_ARCH", "sm_100")
    config.refresh()
    assert feature_matrix.arch_of("cuda", "torch", ()) == "sm_100"
    assert feature_matrix.arch_of("cpu", "torch", ()) == ""
