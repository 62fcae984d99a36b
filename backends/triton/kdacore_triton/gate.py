"""``kda_gate`` and its backward."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.types import GateGrads, GateInputs, Request
from kdacore_triton.gate_families import GATES
from kdacore_triton.kernel_options import INTERPRETING, dense
from kdacore_triton.kernels.gate import SHRINK, gate_backward_kernel, gate_kernel
from kdacore_triton.launch import Launcher, cdiv

_FORWARD = Launcher(gate_kernel)
_BACKWARD = Launcher(gate_backward_kernel)
_ROWS, _COLS = 16, 128
_SPANS = 256
"""Partial sums per column in the backward: enough programs to fill a GPU, few enough to add up cheaply."""


def _flat(r: Request, x: GateInputs) -> tuple[int, int, int]:
    """Rows, columns and columns per head of the flattened gate."""
    channels = 1 if r.scalar_gate else r.K
    return r.B * r.T, r.HV * channels, channels


def forward(request: Request, inputs: GateInputs) -> torch.Tensor:
    """Natural-log decay of ``inputs.g``, shaped like it, float32."""
    g, A_log, dt_bias = (dense(x) for x in inputs)
    rows, cols, channels = _flat(request, inputs)
    out = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    _FORWARD(
        (cdiv(rows, _ROWS), cdiv(cols, _COLS), 1),
        g, A_log, dt_bias, out, rows, cols, channels, request.lower_bound or 0.0,
        GATE=GATES[request.gate], R=_ROWS, BC=_COLS, num_warps=4,
    )  # fmt: skip
    return out


def backward(request: Request, inputs: GateInputs, dlog: torch.Tensor) -> GateGrads:
    """Gradients from ``dlog``, the gradient of the log decay. Sums are taken in a fixed order."""
    g, A_log, dt_bias = (dense(x) for x in inputs)
    rows, cols, channels = _flat(request, inputs)
    span = max(_ROWS, cdiv(cdiv(rows, _SPANS), _ROWS) * _ROWS)
    spans = cdiv(rows, span)
    # The interpreter rounds to bfloat16 by truncation; there the store is float32 and torch rounds.
    dg = torch.empty(g.shape, dtype=torch.float32 if INTERPRETING else g.dtype, device=g.device)
    drate, dbias = (_partial(x, spans, cols) for x in (A_log, dt_bias))
    _BACKWARD(
        (spans, cdiv(cols, _COLS), 1),
        g, A_log, dt_bias, dlog.contiguous(), dg, drate, dbias, rows, cols, channels, span,
        request.lower_bound or 0.0,
        GATE=GATES[request.gate], R=_ROWS, BC=_COLS, MOST=torch.finfo(g.dtype).max, num_warps=4,
    )  # fmt: skip
    dA = None if drate is None else _total(drate.view(spans, request.HV, channels), (0, 2), A_log)
    db = None if dbias is None else _total(dbias, (0,), dt_bias)
    return GateGrads(dg.to(g.dtype), dA, db)


def _total(partial: torch.Tensor, axes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The sum of the spans' sums, held to the largest finite number. float64 does not overflow on the way."""
    limit = torch.finfo(like.dtype).max
    total = partial.sum(axes, dtype=torch.float64) / SHRINK.value
    return total.clamp_(-limit, limit).view(like.shape).to(like.dtype)


def _partial(parameter: torch.Tensor | None, spans: int, cols: int) -> Any:
    if parameter is None:
        return None
    return torch.empty((spans, cols), dtype=torch.float32, device=parameter.device)
