"""Declarations of the JAX backends, ``xla`` (any platform) and ``pallas`` (TPUs).

No other module of the package is imported until a call needs it.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

from kdacore import config
from kdacore.hookspecs import hookimpl
from kdacore.lazy import install_line, lazy_function
from kdacore.ops import (
    CHECKPOINT_FEATURES,
    GATE_FEATURES,
    POOL_FEATURES,
    RECURRENT_FEATURES,
    SEQUENCE_FEATURES,
    STAGE_FEATURES,
)
from kdacore.types import Backend, OpImpl, Reason, Request, Requirement, Verifier, reads_no_lengths

VERSION = "0.1.0"
MINIMUM_JAX = (0, 10)
VERIFIED = frozenset({""})
"""CPUs, where the conformance suite has run in full. On an H200 six of 501 tests have not ended, so
a GPU counts as compiled only until they have (docs/lab/pallas.md)."""


def _probe_jax() -> str | None:
    """Why no recent enough jax is installed, or None. Read from its metadata, so that nothing is
    imported."""
    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return "jax is not installed"
    if tuple(int(p) for p in found.split(".")[:2]) < MINIMUM_JAX:
        return f"jax {found} is older than {'.'.join(map(str, MINIMUM_JAX))}"
    return None


JAX = Requirement("jax", _probe_jax, install_line("jax"))


_lazy = partial(lazy_function, "kdacore_pallas")


def _tpu_verifiers(*names: str) -> tuple[Verifier, ...]:
    """Functions of :mod:`kdacore_pallas.tpu.verifiers`, imported when they are first called."""
    return tuple([_lazy("tpu.verifiers", name) for name in names])


# --- verifiers of xla: here, as every NumPy call asks them ---------------------------------------


@reads_no_lengths
def no_float64(request: Request) -> Reason | None:
    """float64 needs JAX's x64 mode and gains nothing here: the reference backend serves it."""
    used = {request.dtype, request.state_dtype}
    used |= {spec.dtype for _, spec in request.tensors if spec.dtype.startswith("float")}
    if "float64" in used:
        return Reason("dtype", "float64 is not served", "float64", "float32, bfloat16 or float16")
    return None


@reads_no_lengths
def host_arrays_on_cpu(request: Request) -> Reason | None:
    """NumPy and torch callers are served by JAX's CPU device, so their arrays must be there."""
    if request.kind != "jax" and request.device.type != "cpu":
        return Reason(
            "device", f"{request.kind} arrays are served on the CPU only", str(request.device), "cpu"
        )
    return None


@reads_no_lengths
def not_captured(request: Request) -> Reason | None:
    """JAX cannot run inside another framework's trace."""
    if request.kind == "torch" and request.traced:
        return Reason("traced", "torch.compile cannot trace into JAX", "fake tensors", "eager torch tensors")
    return None


def _xla_op(
    forward: str, backward: str | None, serves: frozenset[str], compiles: bool = False, slices: bool = False
) -> OpImpl:
    module = "xla.entry_points"
    return OpImpl(
        forward=_lazy(module, forward),
        backward=None if backward is None else _lazy(module, backward),
        serves=serves,
        verifiers=(no_float64, host_arrays_on_cpu, not_captured),
        verified_archs=VERIFIED,
        compiles=compiles,
        slices=_lazy("xla.slices", "slice_functions") if slices else None,
    )


_STAGES = {
    "kda_chunk_gate": "chunk_gate",
    "kda_chunk_intra": "chunk_intra",
    "kda_recompute_w_u": "recompute_w_u",
    "delta_rule_chunk_state": "chunk_state",
    "kda_chunk_output": "chunk_output",
}
"""The function of each stage in ``xla.entry_points``."""


_CONVOLUTION = frozenset({"conv", "conv_indices", "conv_windows"})
_AROUND_THE_RECURRENCE = _CONVOLUTION | {"conv_bias", "output_gate", "output_norm"}
_COMMITTING = _CONVOLUTION | {"grouped_value_heads", "null_index", "state_v_first", "write_indices"}


def make_xla() -> Backend:
    """Plain JAX: every op, any platform, traceable; NumPy and torch-CPU arrays when asked for by
    name."""
    whole = SEQUENCE_FEATURES | POOL_FEATURES | {"out"}
    chunk = _xla_op(
        "chunk_forward", "chunk_backward", whole | CHECKPOINT_FEATURES, compiles=True, slices=True
    )
    decoding = whole | RECURRENT_FEATURES | {"records"}
    recurrent = _xla_op("recurrent_forward", "recurrent_backward", decoding)
    decode = _xla_op("decode_forward", None, (decoding - {"initial_state"}) | _AROUND_THE_RECURRENCE)
    return Backend(
        name="xla",
        version=VERSION,
        kinds=("jax", "numpy", "torch"),
        auto_kinds=("jax",),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
            "fused_decode_kda": decode,
            "fused_decode_gated_delta_rule": decode,
            "commit_records": _xla_op("commit_records", None, _COMMITTING),
            "kda_gate": _xla_op("gate_forward", "gate_backward", GATE_FEATURES),
            **{stage: _xla_op(name, None, STAGE_FEATURES[stage]) for stage, name in _STAGES.items()},
        },
        summary="plain JAX on any platform; float32 arithmetic; jit, grad, vmap, shard_map",
        requirements=(JAX,),
        rank=10,
        traceable=True,
    )


def make_pallas() -> Backend:
    """TPU kernels of the chunked ops, forward and backward, and of the recurrent ops over a state
    pool."""
    module = "tpu.entry_points"
    common = ("on_tpu", "known_generation", "tpu_dtype", "tile_alignment")
    chunk = OpImpl(
        forward=_lazy(module, "chunk_forward"),
        backward=_lazy(module, "chunk_backward"),
        serves=SEQUENCE_FEATURES | POOL_FEATURES,
        verifiers=_tpu_verifiers(*common, "chunk_vmem", "chunk_smem"),
        slices=_lazy("tpu.slices", "slice_functions"),
    )
    recurrent = OpImpl(
        forward=_lazy(module, "recurrent_forward"),
        backward=_lazy(module, "recurrent_backward"),
        serves=SEQUENCE_FEATURES | POOL_FEATURES | RECURRENT_FEATURES,
        verifiers=_tpu_verifiers(*common, "recurrent_vmem", "recurrent_smem"),
    )
    return Backend(
        name="pallas",
        version=VERSION,
        kinds=("jax",),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
        },
        summary="Pallas TPU kernels (compiled by the TPU compiler, never yet run on a TPU)",
        requirements=(JAX,),
        rank=20,
        device_types=("*",) if config.get().pallas_interpret else ("tpu",),
        traceable=True,
    )


def make_backends() -> list[Backend]:
    """The backends of this plugin."""
    return [make_xla(), make_pallas()]


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds these backends by."""
    return make_backends()
