"""Inputs of a benchmark case, made where they are used: the sizes that matter are slow to make on the host."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from kdacore import api
from kdacore.bench.cases import Case
from kdacore.calls.values import offsets, to_kind
from kdacore.dispatch import validate
from kdacore.ops import OPS
from kdacore.types import Request

Arrays = dict[str, Any]
SEED = 2510


def options(case: Case) -> dict[str, Any]:
    """The options of the public call."""
    given: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
    }
    if case.gate == "sigmoid":
        given.update(safe_gate=True, lower_bound=-5.0)
    if case.disable_recompute:
        given["disable_recompute"] = True
    if case.op == "fused_recurrent_kda":
        given["inplace_state"] = True
    return given


def make(case: Case, gates: str, device: str) -> Arrays:
    """The array arguments of the public call, of the case's kind and dtype, on ``device``."""
    B, T, H, HV, K, V = case.B, case.T, case.H, case.value_heads, case.K, case.V
    normal = _torch_normal(case, device) if case.kind == "torch" else _numpy_normal(case, device)
    spread = 0.5 if gates == "init" else 1.0
    x = {
        "q": normal((B, T, H, K), 1.0),
        "k": normal((B, T, H, K), 1.0),
        "v": normal((B, T, HV, V), 1.0),
        "g": normal((B, T, HV, K), spread),
        "beta": normal((B, T, HV), 1.0),
    }
    rng = np.random.default_rng(SEED)
    x["A_log"] = to_kind(np.log(rng.uniform(1, 16, HV)), case.kind, "float32", device)
    x["dt_bias"] = to_kind(_bias(rng, gates, (HV, K)), case.kind, "float32", device)
    if case.lengths:
        x["cu_seqlens"] = to_kind(offsets(case.lengths), case.kind, "int64", device)
    if case.op == "fused_recurrent_kda":
        state = rng.standard_normal((1, HV, K, V)).astype(np.float32)
        x["initial_state"] = to_kind(np.repeat(state, case.N, axis=0), case.kind, "float32", device)
        x["state_indices"] = to_kind(np.arange(case.N), case.kind, "int32", device)
    return x


def _bias(rng: Any, gates: str, shape: tuple[int, ...]) -> Any:
    if gates == "init":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
        return step + np.log(-np.expm1(-step))  # inverse softplus
    return 0.5 * rng.standard_normal(shape)


def _torch_normal(case: Case, device: str) -> Any:
    import torch

    generator = torch.Generator(device).manual_seed(SEED)
    dtype = getattr(torch, case.dtype)

    def normal(shape: tuple[int, ...], spread: float) -> Any:
        return (spread * torch.randn(shape, generator=generator, device=device)).to(dtype)

    return normal


def _numpy_normal(case: Case, device: str) -> Any:
    rng = np.random.default_rng(SEED)

    def normal(shape: tuple[int, ...], spread: float) -> Any:
        x = np.float32(spread) * rng.standard_normal(shape, dtype=np.float32)
        return to_kind(x, case.kind, case.dtype, device)

    return normal


def request(op: str, case: Case, arrays: Arrays) -> Request:
    """The validated request of the case's call of ``op``, without gradients."""
    opdef = OPS[op]
    given = options(case)
    parameters = inspect.signature(getattr(api, op)).parameters
    values = tuple(given.get(name, parameters[name].default) for name in opdef.options)
    return validate.build_request(opdef, opdef.inputs(**arrays), values)[0]


def output_gradient(case: Case, arrays: Arrays) -> Any:
    """The gradient of ``o`` that training is timed with; torch alone."""
    import torch

    v = arrays["v"]
    generator = torch.Generator(v.device).manual_seed(SEED + 1)
    return torch.randn(v.shape, generator=generator, device=v.device).to(v.dtype)


def nbytes(arrays: Arrays) -> int:
    """Bytes of all arrays together."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays.values())
