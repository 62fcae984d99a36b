"""Random inputs for a call, in any array kind: what the self-check, the conformance suite and benchmarks feed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kdacore.types import ArrayKind

Arrays = dict[str, Any]

GATES = ("random", "init", "slow", "zero", "floor", "mixed", "still", "steep", "cliff")
"""Gate distributions. ``random``: raw N(0,1) with A_log = log U(1,16), fast decay; ``init``: as models are
initialised, slow decay; ``slow``: log decays about -1e-3; ``zero``: about 0; ``floor``: all -5; ``mixed``:
0 and -60; ``still`` and ``steep``: the gates at the ends of float32, ``exp(A_log)`` of 0 and of the largest number,
inputs that are huge and infinite; ``cliff``: inputs of 0 and 1 where the slope is largest and 0."""

_A_LOGS = {
    "still": (-np.inf, 0.5, -104.5, -200.0),
    "steep": (100.0, 88.7, 300.0, np.inf),
    "cliff": (300.0, 88.7),
}
"""``A_log`` of the heads in turn."""
_FAR = (1e4, -1e4, 3e38, -3e38, np.inf, -np.inf)


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; ``lengths`` makes it a pack (then B is 1 and T their sum and ``padding``)."""

    B: int = 1
    T: int = 64
    H: int = 1
    HV: int = 1
    K: int = 16
    V: int = 16
    lengths: tuple[int, ...] = ()
    padding: int = 0
    """Tokens of a pack behind its last sequence, which belong to none."""

    @property
    def N(self) -> int:
        return len(self.lengths) or self.B

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.lengths or (self.T,) * self.B

    @property
    def used(self) -> int:
        """Rows of the token axis that belong to a sequence: the first ones."""
        return self.T - self.padding


def tensors(
    shape: Shape,
    seed: int,
    *,
    gates: str = "random",
    raw_gate: bool = False,
    raw_beta: bool = False,
    scalar_gate: bool = False,
    collinear: bool = False,
) -> Arrays:
    """q, k, v, g, beta (and A_log, dt_bias for a raw gate) as float64 NumPy arrays.

    Without ``raw_gate``, g is the log decay itself. ``collinear`` makes neighbouring keys nearly parallel and
    beta nearly 1, where a careless triangular inverse fails.
    """
    rng = np.random.default_rng(seed)
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    gate_shape = (B, T, HV) if scalar_gate else (B, T, HV, K)
    x = {
        "q": rng.standard_normal((B, T, H, K)),
        "k": rng.standard_normal((B, T, H, K)),
        "v": rng.standard_normal((B, T, HV, V)),
        "beta": rng.standard_normal((B, T, HV)),
    }
    if collinear:
        x["k"] = rng.standard_normal((B, 1, H, K)) + 1e-2 * x["k"]
        x["beta"] = x["beta"] * 0.1 + 6.0
    if not raw_beta:
        x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    if raw_gate:
        x.update(_raw_gate(rng, gates, gate_shape, HV, () if scalar_gate else (K,)))
    else:
        x["g"] = _log_decay(rng, gates, gate_shape)
    return x


def _raw_gate(rng: Any, gates: str, shape: tuple[int, ...], HV: int, tail: tuple[int, ...]) -> Arrays:
    if gates in _A_LOGS:
        return _far_gate(rng, gates, shape, HV, tail)
    A_log = np.log(rng.uniform(1, 16, HV))
    if gates == "init":
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (HV, *tail)))
        bias = dt + np.log(-np.expm1(-dt))  # inverse softplus
        return {"g": 0.5 * rng.standard_normal(shape), "A_log": A_log, "dt_bias": bias}
    bias = 0.5 * rng.standard_normal((HV, *tail))
    if gates == "random":
        return {"g": rng.standard_normal(shape), "A_log": A_log, "dt_bias": bias}
    # The decays of _log_decay, as far as the bounded gate reaches them too.
    x, a = _raw_extremes(rng, gates, shape)
    return {"g": x - bias, "A_log": np.full(HV, np.log(a)), "dt_bias": bias}


def _far_gate(rng: Any, gates: str, shape: tuple[int, ...], HV: int, tail: tuple[int, ...]) -> Arrays:
    """Huge, infinite and usual gate inputs, and some whose decay is moderate in spite of the rate."""
    A_log = np.resize(np.array(_A_LOGS[gates]), HV)
    if gates == "cliff":
        g = rng.choice((0.0, 1.0, -1.0), shape, p=(0.5, 0.25, 0.25))
        return {"g": g, "A_log": A_log, "dt_bias": np.zeros((HV, *tail))}
    bias = 0.5 * rng.standard_normal((HV, *tail))
    rate = np.clip(A_log, -2.0, 88.72).reshape(HV, *(1,) * len(tail))
    inputs = np.stack(
        [
            rng.choice(_FAR, shape),
            rng.standard_normal(shape),
            rng.standard_normal(shape) - rate - bias,
        ]
    )
    which = rng.choice(3, shape, p=(0.3, 0.3, 0.4))
    if tail and tail[0] > 3:
        bias[..., :2] = 2e38, -np.inf
    return {"g": np.take_along_axis(inputs, which[None], axis=0)[0], "A_log": A_log, "dt_bias": bias}


def _raw_extremes(rng: Any, gates: str, shape: tuple[int, ...]) -> tuple[Any, float]:
    """``x`` and ``exp(A_log)`` whose gate is as ``gates`` says."""
    if gates == "slow":
        return np.log(1e-3 * rng.random(shape) + 1e-9), 1.0
    if gates == "zero":
        return np.full(shape, -30.0), 1.0
    if gates == "floor":
        return np.full(shape, 5.0), 1.0
    return np.where(rng.random(shape) < 0.5, -30.0, 3.75), 16.0


def _log_decay(rng: Any, gates: str, shape: tuple[int, ...]) -> Any:
    if gates == "slow":
        return -1e-3 * rng.random(shape)
    if gates == "zero":
        return -1e-7 * rng.random(shape)
    if gates == "floor":
        return np.full(shape, -5.0)
    if gates == "mixed":
        return np.where(rng.random(shape) < 0.5, 0.0, -60.0)
    if gates in _A_LOGS:
        return np.where(rng.random(shape) < 0.3, -np.abs(rng.choice(_FAR, shape)), -rng.random(shape))
    if gates == "init":
        return -np.exp(rng.uniform(np.log(1e-3), np.log(0.5), shape))
    return -5.0 * rng.random(shape) ** 2


def normalise(x: Arrays) -> Arrays:
    """The same with q and k of unit length, as models feed them when the kernel does not normalise."""
    out = dict(x)
    for name in ("q", "k"):
        out[name] = x[name] / np.sqrt((x[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    return out


PER_TOKEN = ("q", "k", "v", "g", "beta", "x", "z")
"""Arguments of the whole ops that have a row for each token."""


def offsets(lengths: tuple[int, ...]) -> Any:
    """``cu_seqlens`` of a pack, int64 NumPy."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def to_kind(x: Any, kind: ArrayKind, dtype: str, device: str = "cpu") -> Any:
    """A NumPy array as an array of another kind and dtype, rounded to nearest even."""
    if kind == "numpy":
        return np.ascontiguousarray(x, dtype=_numpy_dtype(dtype))
    if kind == "torch":
        import torch

        return torch.as_tensor(np.ascontiguousarray(x)).to(device=device, dtype=getattr(torch, dtype))
    import jax
    import jax.numpy as jnp

    host = np.ascontiguousarray(x, dtype=_numpy_dtype(dtype))
    return jnp.asarray(host) if device == "cpu" else jax.device_put(host, jax.devices(device)[0])


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
