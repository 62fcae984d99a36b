"""The five stage ops: each against its float64 oracle, and all of them together against the
recurrence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdacore.oracle import stages as oracle_stages
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import (
    Backend,
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    IntraInputs,
    RecomputeInputs,
)

Make = Callable[..., Any]
Error = Callable[[Any, Any], float]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"HV": 6, "gate": "softplus"},
    {"gate": "sigmoid", "lower_bound": -5.0, "chunk_size": 16},
    {"lengths": [70, 0, 1, 64, 65], "HV": 4, "chunk_size": 32},
    {"lengths": [17, 0, 33], "chunk_size": 16, "state_v_first": True},
    {"gates": "mixed"},
    {"gates": "minus60", "initial": False},
]


def pipeline(stage: Callable[[str, Any], Any], call: Any) -> tuple[dict[str, Any], Any, Any]:
    """Every intermediate, the output and the final state of the five stages, each run by ``stage``."""
    x, cu = call.inputs, call.inputs.cu_seqlens
    gc = stage("kda_chunk_gate", ChunkGateInputs(x.g, x.A_log, x.dt_bias, cu))
    intra = stage("kda_chunk_intra", IntraInputs(x.q, x.k, gc, x.beta, cu))
    wu = stage("kda_recompute_w_u", RecomputeInputs(x.k, x.v, x.beta, gc, intra.Akk, x.q, cu))
    state = stage("delta_rule_chunk_state", ChunkStateInputs(wu.kg, wu.w, wu.u, gc, x.initial_state, cu))
    o = stage("kda_chunk_output", ChunkOutputInputs(x.q, state.v_new, gc, intra.Aqk, state.h, cu))
    found = {"gc": gc, **intra._asdict(), **wu._asdict(), "h": state.h, "v_new": state.v_new}
    return found, o, state.final_state


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pipeline(
    options: dict[str, Any], kind: str, make_call: Make, backend: Backend, error: Error
) -> None:
    call = make_call(**{"B": 2, "T": 130, "H": 2, "K": 12, "V": 10, "op": "kda_chunk_gate", **options})

    def oracle(name: str, inputs: Any) -> Any:
        return getattr(oracle_stages, f"oracle_{ORACLES[name]}")(call.request, inputs)

    exact, o, final = pipeline(oracle, call)
    whole = oracle_forward(call.request, call.inputs)
    assert error(o, whole.o) < 1e-12 and error(final, whole.final_state) < 1e-12

    other = call.of_kind(kind)
    request = dataclasses.replace(other.request)
    found, o, final = pipeline(lambda name, inputs: backend.ops[name].forward(request, inputs), other)
    for name, value in found.items():
        assert tuple(value.shape) == exact[name].shape, name
        assert error(value, exact[name]) < 3e-5, name
    assert error(o, whole.o) < 3e-5 and error(final, whole.final_state) < 3e-5


ORACLES = {
    "kda_chunk_gate": "chunk_gate",
    "kda_chunk_intra": "chunk_intra",
    "kda_recompute_w_u": "recompute_w_u",
    "delta_rule_chunk_state": "chunk_state",
    "kda_chunk_output": "chunk_output",
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_stage_on_exact_inputs_of_half_precision(
    dtype: str, make_call: Make, backend: Backend, error: Error
) -> None:
    """Every stage of the backend is fed the oracle's intermediates, rounded to float32."""
    call = make_call(T=70, H=1, HV=2, K=12, V=10, dtype=dtype, op="kda_chunk_gate")

    def both(name: str, inputs: Any) -> Any:
        rounded = type(inputs)(
            *(a.astype(np.float32) if a is not None and a.dtype == np.float64 else a for a in inputs)
        )
        want = getattr(oracle_stages, f"oracle_{ORACLES[name]}")(call.request, rounded)
        got = backend.ops[name].forward(call.request, rounded)
        wants, gots = (x if isinstance(x, tuple) else (x,) for x in (want, got))
        for w, g in zip(wants, gots, strict=True):
            assert error(g, w) < 2e-6, name
        return want

    pipeline(both, call)


@pytest.mark.exhaustive
def test_stages_in_jax(make_call: Make, backend: Backend, error: Error) -> None:
    call = make_call(lengths=[20, 0, 17], H=1, HV=2, K=8, V=8, chunk_size=16, op="kda_chunk_gate")
    whole = oracle_forward(call.request, call.inputs)
    other = call.of_kind("jax")
    _, o, final = pipeline(lambda name, inputs: backend.ops[name].forward(other.request, inputs), other)
    assert error(o, whole.o) < 2e-5 and error(final, whole.final_state) < 2e-5


def test_unused_columns_and_chunks_are_zero(make_call: Make, backend: Backend) -> None:
    call = make_call(lengths=[20, 0, 17], H=1, K=8, V=8, chunk_size=16, op="kda_chunk_gate")
    found, _, _ = pipeline(lambda name, inputs: backend.ops[name].forward(call.request, inputs), call)
    for name in ("Aqk", "Akk"):
        pairs = to_float64(found[name])[0, :, 0]
        assert not pairs[16:20, 4:].any() and not pairs[36:37, 1:].any(), name
        assert pairs[19, 3] != 0
        assert not np.triu(pairs[:16], 1).any()
    assert call.request.num_chunks == 5 and not to_float64(found["h"])[0, 4:].any()


def test_chunk_size_changes_no_result(make_call: Make, backend: Backend, error: Error) -> None:
    call = make_call(T=100, K=8, V=8, op="kda_chunk_gate")
    results = []
    for size in (16, 32, 64):
        request = dataclasses.replace(call.request, chunk_size=size)
        _, o, _ = pipeline(lambda name, x, r=request: backend.ops[name].forward(r, x), call)
        results.append(o)
    assert error(results[0], results[2]) < 1e-6 and error(results[1], results[2]) < 1e-6
