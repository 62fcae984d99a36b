"""Gates at the ends of float32 and NaN in one sequence: plain JAX, and the TPU kernels interpreted."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, check_backward, check_forward, output_grads, to_jax

import kdacore
from kdacore.calls.values import Shape, tensors
from kdacore.oracle.gate import oracle_gate
from kdacore.testing import cases as conformance
from kdacore.testing.matrix import plan
from kdacore.testing.suite import run_case
from kdacore.types import GateInputs, OutputGrads, Request
from kdacore_pallas.tpu import chunk_backward, chunk_forward, recurrent
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.xla import chunk_forward_gpu
from kdacore_pallas.xla.gate import kda_gate

INTERPRET = Launch(interpret=True)
PICKED = (
    "chunk_kda-accuracy-still_pack-jax-float32",
    "chunk_kda-gradients-cliff_sigmoid-jax-float32",
    "fused_recurrent_kda-accuracy-steep_pack-jax-float32",
    "kda_gate-gradients-bounded_cliff-jax-float32",
    "kda_gate-gradients-steep-jax-float32",
    "kda_chunk_gate-accuracy-steep_softplus-jax-float32",
    "fused_recurrent_gated_delta_rule-nan_containment-batch-jax-float32",
)
MORE = (
    "chunk_kda-gradients-steep_softplus-jax-float32",
    "chunk_gated_delta_rule-accuracy-still_sigmoid-jax-float32",
    "kda_gate-gradients-bounded_steep-jax-float32",
    "kda_gate-gradients-still-jax-float32",
    "kda_chunk_intra-accuracy-steep_gates-jax-float32",
    "chunk_kda-nan_containment-base-jax-float32",
)


@cache
def suite() -> dict[str, conformance.Case]:
    return {c.id: c for c in plan("xla", device="cpu", level="quick", kinds=("jax",)).cases}


@pytest.mark.parametrize("name", [*PICKED, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in MORE)])
def test_plain_jax(name: str) -> None:
    result = run_case(suite()[name])
    assert result.status == "served", result.message


def call_of(case: Case, gates: str) -> tuple[Request, Any]:
    """The case's call with gates at the ends."""
    request, inputs = build(case)
    shape = Shape(request.B, request.T, request.H, request.HV, request.K, request.V)
    x = tensors(shape, 1, gates=gates, raw_gate=True, scalar_gate=case.scalar)
    given = {n: np.asarray(x[n], np.float32) for n in ("g", "A_log", "dt_bias")}
    return request, inputs._replace(**given)


SOFTPLUS, SIGMOID = {"gate": "softplus"}, {"gate": "sigmoid", "lower_bound": -5.0}
TPU = {
    "still": Case(lengths=(5, 0, 14), HV=2, K=20, V=16, **SIGMOID),  # type: ignore[arg-type]
    "steep": Case(T=20, HV=4, K=20, V=16, **SOFTPLUS),  # type: ignore[arg-type]
    "cliff": Case(T=20, HV=2, K=16, V=16, **SIGMOID),  # type: ignore[arg-type]
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "gates", ["still", *(pytest.param(g, marks=pytest.mark.exhaustive) for g in ("steep", "cliff"))]
)
def test_tpu_kernels(gates: str) -> None:
    request, inputs = call_of(TPU[gates], gates)
    grads = output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))

    @jax.jit
    def run(x: Any) -> Any:
        out = chunk_forward.forward(request, x, request.H, INTERPRET)
        return out, chunk_backward.backward(request, x, (), d, request.H, INTERPRET)

    out, found = run(to_jax(inputs))
    check_forward(out, request, inputs, factor=2)
    check_backward(found, request, inputs, grads, factor=2)


@pytest.mark.parametrize("gates", ["still", "steep"])
def test_tpu_recurrent(gates: str) -> None:
    options = SIGMOID if gates == "still" else SOFTPLUS
    request, inputs = call_of(Case(op="fused_recurrent_kda", B=2, T=3, HV=4, K=16, V=16, **options), gates)  # type: ignore[arg-type]
    out = jax.jit(lambda x: recurrent.forward(request, x, INTERPRET))(to_jax(inputs))
    check_forward(out, request, inputs, factor=2)


@pytest.mark.parametrize("gates", ["still", pytest.param("steep", marks=pytest.mark.exhaustive)])
def test_gpu_form(gates: str) -> None:
    case = Case(T=130, HV=4, K=32, dtype="bfloat16", **(SIGMOID if gates == "still" else SOFTPLUS))  # type: ignore[arg-type]
    request, inputs = call_of(case, gates)
    check_forward(
        jax.jit(lambda x: chunk_forward_gpu.forward(request, x))(to_jax(inputs)), request, inputs, 2
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "initial_state"])
def test_a_nan_stays_in_its_sequence_on_tpus(name: str) -> None:
    """Three sequences in one block of rows."""
    _, inputs, run = pack_of_three()
    clean = run(to_jax(inputs))
    spoilt = getattr(inputs, name).copy()
    spoilt[(1, 0) if name == "initial_state" else (0, 24, 0)] = np.nan
    found = run(to_jax(inputs._replace(**{name: spoilt})))
    assert np.isnan(np.asarray(found[0].o)[0, 24, 0]).any()
    others = np.r_[0:5, 25:44]
    for a, b in zip((found[0].o, *found[1][:5]), (clean[0].o, *clean[1][:5]), strict=True):
        assert np.array_equal(np.asarray(a)[:, others], np.asarray(b)[:, others])
    for a, b in (
        (found[0].final_state, clean[0].final_state),
        (found[1].initial_state, clean[1].initial_state),
    ):
        assert np.array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])


@cache
def pack_of_three() -> tuple[Request, Any, Any]:
    request, inputs = build(Case(lengths=(5, 20, 19), HV=2, K=16, V=16, **SOFTPLUS))  # type: ignore[arg-type]
    d = OutputGrads(*(jnp.asarray(x) for x in output_grads(request)))

    def run(x: Any) -> Any:
        out = chunk_forward.forward(request, x, request.H, INTERPRET)
        return out, chunk_backward.backward(request, x, (), d, request.H, INTERPRET)

    return request, inputs, jax.jit(run)


@pytest.mark.parametrize("A_log", [-np.inf, -104.5, 88.7, 100.0, np.inf])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gate(A_log: float, lower_bound: float | None) -> None:
    """Every huge input with every rate."""
    options = SOFTPLUS if lower_bound is None else SIGMOID
    request, _ = build(Case(T=9, HV=1, K=1, V=1, **options))  # type: ignore[arg-type]
    g = np.array([0, 1e4, -1e4, 3e38, -3e38, np.inf, -np.inf, -88.0, -100.0], np.float32).reshape(1, 9, 1, 1)
    inputs = GateInputs(g, np.full(1, A_log, np.float32), np.zeros((1, 1), np.float32))
    got = kda_gate(request, GateInputs(*map(jnp.asarray, inputs)))
    np.testing.assert_allclose(got, oracle_gate(request, inputs), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(
    "op",
    [
        "chunk_kda",
        "fused_recurrent_kda",
        pytest.param("chunk_gated_delta_rule", marks=pytest.mark.exhaustive),
        pytest.param("fused_recurrent_gated_delta_rule", marks=pytest.mark.exhaustive),
    ],
)
def test_given_log_decays_without_end(op: str, backend: str) -> None:
    """What is given may be as low as it likes: everything is forgotten there, and nothing becomes NaN."""
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((1, 70, 2, 20), dtype=np.float32) for n in ("q", "k", "v")}
    x["beta"] = rng.random((1, 70, 2), dtype=np.float32)
    g = -rng.random((1, 70, 2, 20), dtype=np.float32)
    offsets = np.asarray([0, 35, 35, 70], np.int32)
    more = {
        "cu_seqlens": offsets,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "backend": backend,
    }

    def run(lowest: float) -> list[Any]:
        given = g.copy()
        given[:, ::3, :, ::2] = lowest
        given[:, [0, 34, 69]] = lowest
        with np.errstate(all="raise"):
            return list(getattr(kdacore, op)(**x, g=given if "kda" in op else given[..., 0], **more)[:2])

    for lowest in (-np.inf, -float(np.finfo(np.float32).max)):
        for got, want in zip(run(lowest), run(-500.0), strict=True):
            assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)
