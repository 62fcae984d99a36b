"""The Triton backend. This file declares it; the other modules are imported by the first call that needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from kdacore.hookspecs import hookimpl
from kdacore.lazy import install_line, lazy_function, package_probe
from kdacore.ops import (
    CHECKPOINT_FEATURES,
    GATE_FEATURES,
    POOL_FEATURES,
    RECURRENT_FEATURES,
    SEQUENCE_FEATURES,
    STAGE_FEATURES,
)
from kdacore.types import Backend, OpImpl, Requirement, Verifier

VERSION = "0.1.0"
VERIFIED = frozenset({"sm_90"})
"""Architectures the GPU tests have run on; for the others the kernels compile."""

DECODE_FEATURES = frozenset(
    {"conv", "conv_bias", "conv_indices", "conv_windows", "output_gate", "output_norm"}
)
"""What the fused decode ops have beside the recurrent ones."""

COMMIT_FEATURES = frozenset(
    {
        "conv",
        "conv_indices",
        "conv_windows",
        "grouped_value_heads",
        "null_index",
        "state_v_first",
        "write_indices",
    }
)

_lazy = partial(lazy_function, "kdacore_triton")
_NAMES = ("hardware", "dtypes", "size", "head_dims", "key_dim", "state", "compiler", "norm_dims")
_verify = SimpleNamespace(**{name: _lazy("verifiers", name) for name in _NAMES})
"""The functions of :mod:`kdacore_triton.verifiers`, imported by the first request that reaches one of them."""


def _op(
    forward: Callable[..., Any],
    *more: Verifier,
    serves: frozenset[str],
    backward: Callable[..., Any] | None = None,
    fast_path: Callable[..., Any] | None = None,
    slices: Callable[..., Any] | None = None,
    form: Callable[..., Any] | None = None,
) -> OpImpl:
    return OpImpl(
        forward=forward,
        backward=backward,
        serves=serves,
        verifiers=(_verify.hardware, _verify.dtypes, _verify.size, *more),
        verified_archs=VERIFIED,
        batch_invariant=True,
        fast_path=fast_path,
        slices=slices,
        form=form,
    )


def _stage(op: str, function: str, *more: Verifier) -> OpImpl:
    return _op(_lazy("stages", function), *more, serves=STAGE_FEATURES[op])


def make_backend() -> Backend:
    """The backend named ``triton``: every op, torch tensors, forward and backward."""
    whole = (_verify.head_dims, _verify.state, _verify.compiler)
    chunk_backward = _lazy("chunk_backward", "backward")
    chunk = _op(
        _lazy("chunk_forward", "forward"),
        *whole,
        serves=SEQUENCE_FEATURES | POOL_FEATURES | CHECKPOINT_FEATURES | {"out"},
        backward=chunk_backward,
        slices=_lazy("slices", "slice_functions"),
        form=_lazy("chunk_forward_choice", "form"),
    )
    decoding = SEQUENCE_FEATURES | POOL_FEATURES | RECURRENT_FEATURES | {"out", "records"}
    recurrent = _op(
        _lazy("recurrent", "forward"),
        *whole,
        serves=decoding,
        backward=chunk_backward,
        fast_path=_lazy("recurrent", "fast_path"),
    )
    decode = _op(
        _lazy("decode", "forward"),
        *whole,
        _verify.norm_dims,
        serves=(decoding - {"initial_state"}) | DECODE_FEATURES,
        fast_path=_lazy("decode", "fast_path"),
    )
    return Backend(
        name="triton",
        version=VERSION,
        kinds=("torch",),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
            "fused_decode_kda": decode,
            "fused_decode_gated_delta_rule": decode,
            "commit_records": _op(
                _lazy("commit", "commit_records"),
                *whole,
                serves=COMMIT_FEATURES,
            ),
            "kda_gate": _op(
                _lazy("gate", "forward"), serves=GATE_FEATURES, backward=_lazy("gate", "backward")
            ),
            "kda_chunk_gate": _stage("kda_chunk_gate", "chunk_gate", _verify.key_dim),
            "kda_chunk_intra": _stage("kda_chunk_intra", "chunk_intra", _verify.key_dim),
            "kda_recompute_w_u": _stage("kda_recompute_w_u", "recompute_w_u", _verify.head_dims),
            "delta_rule_chunk_state": _stage("delta_rule_chunk_state", "chunk_state", *whole),
            "kda_chunk_output": _stage("kda_chunk_output", "chunk_output", _verify.head_dims),
        },
        summary="portable GPU kernels: training, prefill and decode; CPU tensors with TRITON_INTERPRET=1",
        requirements=(
            Requirement("torch", package_probe("torch"), install_line("triton")),
            Requirement("Triton", package_probe("triton"), install_line("triton")),
        ),
        rank=50,
        device_types=("cuda", "rocm", "cpu"),
        auto_device_types=("cuda", "rocm"),
        capturable=True,
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds this backend by."""
    return [make_backend()]


@hookimpl
def kdacore_config_tuners() -> list[Any]:
    """The hook ``kdacore tune configs`` finds the kernels' launch configurations by."""
    return [_lazy("tune_jobs", "tuner")()]
