"""Inputs of a benchmark case, made where they are used: the sizes that matter are slow to make on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.bench.cases import Case
from kdacore.calls.description import CallDescription, specs
from kdacore.calls.description import options as described
from kdacore.calls.requests import request_with
from kdacore.calls.values import Shape, offsets, to_kind
from kdacore.ops import OPS
from kdacore.oracle.gate import sigmoid
from kdacore.oracle.host_values import to_float64
from kdacore.types import Request, TensorSpec

Arrays = dict[str, Any]
SEED = 2510


def has_pool(case: Case) -> bool:
    """Do its states lie in a pool?"""
    return case.pool and OPS[case.op].family == "recurrent"


def options(case: Case) -> dict[str, Any]:
    """The options of the public call."""
    if case.plain:
        return {}
    given: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": case.gate_inside,
        "use_beta_sigmoid_in_kernel": case.gate_inside,
        "output_final_state": True,
    }
    if case.gate == "sigmoid" and case.gate_inside:
        given.update(safe_gate=True, lower_bound=-5.0)
    if case.disable_recompute:
        given["disable_recompute"] = True
    if case.state_v_first:
        given["state_v_first"] = True
    if has_pool(case):
        given["inplace_state"] = True
    return given


def call_of(case: Case, device: str, arch: str = "") -> CallDescription:
    """The case's call, described as everywhere else."""
    pool = has_pool(case)
    return CallDescription(
        op=case.op,
        kind=case.kind,
        device=device,
        arch=arch,
        shape=Shape(case.B, case.T, case.H, case.value_heads, case.K, case.V, case.lengths),
        dtype=case.dtype,
        gate_dtype=case.gate_dtype or (case.dtype if case.gate_inside else "float32"),
        beta_dtype=case.dtype,
        index_dtype="int32" if pool else "int64",
        state_dtype=case.state_dtype,
        requires_grad=case.trains,
        initial_state=case.initial_state,
        pool="inplace" if pool else "",
        pool_rows=case.N if pool else 0,
        options=described(**options(case)),
        seed=SEED,
    )


def make(case: Case, gates: str, device: str) -> Arrays:
    """The array arguments of the public call, of the case's kind and dtype, on ``device``.

    The shapes and dtypes are those of the described call; the numbers are drawn where they are used.
    """
    wanted = specs(call_of(case, device))
    normal = _torch_normal(device) if case.kind == "torch" else _numpy_normal(case, device)
    rng = np.random.default_rng(SEED)
    spread = {"g": 0.5 if gates == "init" else 1.0}
    x = {name: normal(wanted[name], spread.get(name, 1.0)) for name in ("q", "k", "v", "g", "beta")}

    def convert(name: str, values: Any) -> None:
        x[name] = to_kind(values, case.kind, wanted[name].dtype, device)

    if case.plain:  # as models have them; the call does not normalise
        k = to_float64(x["k"])
        convert("k", k / np.linalg.norm(k, axis=-1, keepdims=True))
    heads, *channels = wanted["g"].shape[2:]
    A_log = np.log(rng.uniform(1, 16, heads))
    dt_bias = _bias(rng, gates, (heads, *channels))
    if case.gate_inside:
        convert("A_log", A_log)
        convert("dt_bias", dt_bias)
    else:
        rates = np.exp(A_log).reshape(heads, *(1,) * len(channels))
        convert("g", -rates * np.logaddexp(0.0, to_float64(x["g"]) + dt_bias))
        convert("beta", sigmoid(to_float64(x["beta"])))
    if "cu_seqlens" in wanted:
        convert("cu_seqlens", offsets(case.lengths))
    if "initial_state" in wanted:
        rows, *one = wanted["initial_state"].shape
        convert("initial_state", rng.standard_normal((1, *one)).astype(np.float32))
        x["initial_state"] = _repeated(x["initial_state"], rows, case.kind)
    if "state_indices" in wanted:
        convert("state_indices", np.arange(rows))
    return x


def _repeated(state: Any, rows: int, kind: str) -> Any:
    """The same state for every sequence, copied where it lies."""
    return state.repeat(rows, 1, 1, 1) if kind == "torch" else state.repeat(rows, axis=0)


def _bias(rng: Any, gates: str, shape: tuple[int, ...]) -> Any:
    if gates == "init":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
        return step + np.log(-np.expm1(-step))  # inverse softplus
    return 0.5 * rng.standard_normal(shape)


def _torch_normal(device: str) -> Any:
    import torch

    generator = torch.Generator(device).manual_seed(SEED)

    def normal(spec: TensorSpec, spread: float) -> Any:
        values = torch.randn(spec.shape, generator=generator, device=device)
        return (spread * values).to(getattr(torch, spec.dtype))

    return normal


def _numpy_normal(case: Case, device: str) -> Any:
    rng = np.random.default_rng(SEED)

    def normal(spec: TensorSpec, spread: float) -> Any:
        x = np.float32(spread) * rng.standard_normal(spec.shape, dtype=np.float32)
        return to_kind(x, case.kind, spec.dtype, device)

    return normal


def request(op: str, case: Case, arrays: Arrays) -> Request:
    """The validated request of the case's call of ``op``, without gradients."""
    return request_with(op, {**arrays, **options(case)})


def output_gradient(case: Case, arrays: Arrays) -> Any:
    """The gradient of ``o`` that training is timed with; torch alone."""
    import torch

    v = arrays["v"]
    generator = torch.Generator(v.device).manual_seed(SEED + 1)
    return torch.randn(v.shape, generator=generator, device=v.device).to(v.dtype)


def nbytes(arrays: Arrays) -> int:
    """Bytes of all arrays together."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays.values())
