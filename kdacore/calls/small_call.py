"""The small call of a request: the same options, dtypes and head dims on few tokens."""

from __future__ import annotations

from typing import Any, Literal

from kdacore.calls.description import CallDescription, options
from kdacore.calls.pools import Pool
from kdacore.calls.values import Shape
from kdacore.contract.checks import MAX_VERIFY_TOKENS
from kdacore.ops import OPS
from kdacore.types import Request


def call_of_request(request: Request, tokens: int, seed: int = 0) -> CallDescription:
    """A short call that exercises what ``request`` exercises.

    Args:
        request: the call to shrink.
        tokens: tokens of each sequence; a ``fused_recurrent`` call keeps its own count when that is smaller.
        seed: of the numbers.
    """
    opdef = OPS[request.op]
    asked = {name: value for name, value in _options(request).items() if name in opdef.options}
    dtypes = {name: spec.dtype for name, spec in request.tensors}
    pool = _pool(request)
    shape = _shape(request, tokens)
    return CallDescription(
        op=request.op,
        kind=request.kind,
        device="cuda" if request.device.type == "rocm" else request.device.type,
        shape=shape,
        dtype=request.dtype,
        gate_dtype=dtypes.get("g", "float32"),
        beta_dtype=dtypes.get("beta", "float32"),
        bias_dtype=dtypes.get("dt_bias", "float32"),
        state_dtype=dtypes.get("initial_state", dtypes.get("write_pool", "float32")),
        index_dtype=dtypes.get("state_indices", dtypes.get("cu_seqlens", "int64")),
        requires_grad=request.needs_grad,
        A_log="A_log" in dtypes,
        dt_bias="matrix" if "dt_bias" in dtypes else "",
        initial_state="initial_state" in dtypes,
        pool=pool,
        out="out" in dtypes,
        one_decay=opdef.family == "commit" and request.scalar_gate,
        conv_state_given="conv_state" in dtypes,
        conv_width=_taps(request),
        conv_bias="conv_bias" in dtypes,
        conv_indices="conv_indices" in dtypes,
        conv_windows="conv_windows" in dtypes,
        z="z" in dtypes,
        norm=_norm(request),
        weight_dtype=dtypes.get("conv_weight", dtypes.get("norm_weight", "float32")),
        options=options(**asked),
        seed=seed,
    )


def _taps(request: Request) -> int:
    """Taps of the convolution; 0 without one."""
    if request.has("conv_weight"):
        return request.spec("conv_weight").shape[1]
    if request.has("conv_windows"):
        return request.spec("conv_windows").shape[2] + 1
    return 4 if request.has("conv_state") else 0


def _norm(request: Request) -> Literal["", "vector", "heads"]:
    if not request.has("norm_weight"):
        return ""
    return "heads" if len(request.spec("norm_weight").shape) == 2 else "vector"


def _pool(request: Request) -> Pool | str:
    """How the call uses pools, all its sequences having slots."""
    pool = Pool(
        indices=request.state_indices_ndim,
        inplace=request.inplace_state,
        read_only=request.read_only_state,
        reads=request.has("initial_state"),
        null=request.null_index >= 0,
        has_state=request.has("has_initial_state"),
        writes=request.write_indices_ndim,
        separate=bool(request.write_pool_size),
        checkpoints=bool(request.checkpoint_count),
        records=request.has("record_update"),
    )
    return pool if pool.indices or pool.has_state or pool.writes else ""


def _shape(request: Request, tokens: int) -> Shape:
    family = OPS[request.op].family
    recurrent = family in ("recurrent", "decode", "commit")
    if family == "decode" or request.has("record_update"):
        tokens = min(tokens, MAX_VERIFY_TOKENS)
    T = min(request.T, tokens) if recurrent and not request.packed else tokens
    lengths = (T - 1, 0, 1) if request.packed else ()
    heads = min(request.H, 2)
    values = heads * (request.HV // request.H)
    return Shape(1 if lengths else min(request.B, 2), T, heads, values, request.K, request.V, lengths)


def _options(request: Request) -> dict[str, Any]:
    """The options that a request was made of, by their public names."""
    return {
        "scale": request.scale,
        "output_final_state": request.output_final_state,
        "use_qk_l2norm_in_kernel": request.qk_l2norm,
        "use_gate_in_kernel": request.gate != "log",
        "use_beta_sigmoid_in_kernel": request.beta_sigmoid,
        "allow_neg_eigval": request.neg_eigval,
        "safe_gate": request.safe_gate,
        "lower_bound": request.lower_bound,
        "state_v_first": request.state_v_first,
        "disable_recompute": request.disable_recompute,
        "checkpoint_every": request.checkpoint_every or None,
        "inplace_state": request.inplace_state,
        "read_only_state": request.read_only_state,
        "null_index": 0 if request.null_index >= 0 else None,
        "norm_eps": request.norm_eps or OPS[request.op].defaults.get("norm_eps"),
        "norm_activation": request.norm_activation or OPS[request.op].defaults.get("norm_activation"),
        "chunk_size": request.chunk_size,
    }
