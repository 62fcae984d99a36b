"""The CUDA backend: hand-written kernels, packaged as machine code or compiled by NVRTC. This file
declares it; the other modules are imported by the first call that needs them."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any

from kdacore import ops
from kdacore.hookspecs import hookimpl
from kdacore.lazy import install_line, lazy_function, package_probe
from kdacore.types import Backend, Forward, OpImpl, Request, Requirement, Verifier

VERIFIED = frozenset({"sm_90"})
"""Architectures the conformance suite has run on, all ops
(benchmarks/results/h200/verify-cuda.json); others are checked once, on the machine, before
auto uses them."""


DRIVER = 13000
"""The oldest CUDA version a driver may be of, as ``cuDriverGetVersion`` writes it: 13.0.

NVRTC 13 compiles the packaged cubins, and those compiled on the user's machine. A driver loads
machine code from every minor version of its own major version and from older major versions, never
from newer ones. So a 13.0 driver loads what NVRTC 13.0 and later compiled (this would not hold for
PTX, of which we ship none), and a 12.x driver refuses all of it. Triton, which brings its own
assembler, works there.
"""


@cache
def _driver_missing() -> str | None:
    """Why there is no driver that loads the kernels; None where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        status = driver.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"no CUDA driver: {error}"
    if status:
        return f"no CUDA driver: cuDriverGetVersion returned {status}"
    if number.value < DRIVER:
        found, wanted = _version(number.value), _version(DRIVER)
        return f"the driver is for CUDA {found}; the kernels need {wanted} or later"
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


__version__ = "0.1.0"

_lazy = partial(lazy_function, "kdacore_cuda")


def _verifiers(*names: str) -> tuple[Verifier, ...]:
    return tuple(_lazy("unsupported_calls", name) for name in names)


def _array_library_missing() -> str | None:
    """Torch or JAX: each is enough for calls with its own arrays."""
    missing = [package_probe(name)() for name in ("torch", "jax")]
    return None if None in missing else " and ".join(filter(None, missing))


def _by_kind(module: str, function: str, jax_module: str = "jax.forward") -> Forward:
    """The function of that name for a call's kind of arrays."""
    torch, jax = _lazy(module, function), _lazy(jax_module, function)

    def call(request: Request, *rest: Any) -> Any:
        return (jax if request.kind == "jax" else torch)(request, *rest)

    call.__name__ = call.__qualname__ = function
    return call


_CALLS = _verifiers(*("known_sizes", "xla_version", "architecture", "compiler", "float_dtypes", "grid_size"))
_COMMON = _CALLS + _verifiers("state_dtype")
_RECURRENT = _CALLS + _verifiers("recurrent_state_dtype", "head_dims")
_STAGE = _verifiers(
    *("xla_version", "architecture", "compiler", "stage_dtypes", "stage_chunk"),
    *("sequence_length", "stage_grid_size"),
)
_CHUNK = ("chunk_head_dims", "chunk_forward_dtype", "sequence_length")
_op = partial(OpImpl, form=_lazy("forms.explain", "form"), verified_archs=VERIFIED, batch_invariant=True)


def _stage(op: str, function: str, head_dims: str) -> OpImpl:
    forward = _by_kind("forms.stages.forward", function)
    return _op(forward=forward, serves=ops.STAGE_FEATURES[op], verifiers=_STAGE + _verifiers(head_dims))


def make_backend() -> Backend:
    """The backend named ``cuda``: for each op the features that it serves, and the reasons for which it declines."""
    chunk = _op(
        forward=_by_kind("forms.chunk_forward", "forward"),
        backward=_by_kind("forms.backward.gradients", "backward", "jax.backward"),
        serves=ops.SEQUENCE_FEATURES | ops.POOL_FEATURES | ops.CHECKPOINT_FEATURES | {"out"},
        verifiers=_COMMON + _verifiers(*_CHUNK, "gradients"),
        fast_path=_lazy("forms.chunk_forward", "make_fast_call"),
        fast_gradients=_lazy("forms.backward.gradients", "make_fast_gradients"),
        slices=_lazy("forms.slices.functions", "slice_functions"),
    )
    gated_delta = _op(
        forward=_by_kind("forms.gated_delta.forward", "forward"),
        backward=_by_kind("forms.gated_delta.gradients", "backward", "jax.backward"),
        serves=ops.SEQUENCE_FEATURES | ops.POOL_FEATURES | ops.CHECKPOINT_FEATURES | {"out"},
        verifiers=_COMMON
        + _verifiers(
            *("hopper", "chunk_head_dims", "gated_delta_dtype", "float16_gradients"),
            *("gated_delta_variant", "sequence_length"),
        ),
        fast_path=_lazy("forms.gated_delta.forward", "make_fast_call"),
        fast_gradients=_lazy("forms.gated_delta.gradients", "make_fast_gradients"),
        slices=_lazy("forms.slices.functions", "slice_functions"),
    )
    recurrent = _op(
        forward=_by_kind("forms.recurrent.forward", "forward"),
        serves=ops.SEQUENCE_FEATURES | ops.POOL_FEATURES | ops.RECURRENT_FEATURES | {"out", "records"},
        verifiers=_RECURRENT + _verifiers("recurrent_variant"),
        fast_path=_lazy("forms.recurrent.forward", "make_fast_call"),
    )
    commit = _op(
        forward=_by_kind("forms.commit.forward", "commit_records"),
        serves=frozenset({"grouped_value_heads", "null_index", "state_v_first", "write_indices"})
        | {"conv", "conv_indices", "conv_windows"},
        verifiers=_RECURRENT + _verifiers("recurrent_variant", "window_dtypes"),
    )
    decode = _op(
        forward=_by_kind("forms.decode.forward", "forward", "jax.decode"),
        serves=(ops.SEQUENCE_FEATURES - {"initial_state"})  # always given
        | ops.POOL_FEATURES
        | ops.RECURRENT_FEATURES
        | {
            "out",
            "conv",
            "conv_bias",
            "conv_indices",
            "conv_windows",
            "output_gate",
            "output_norm",
            "records",
        },
        verifiers=_RECURRENT + _verifiers("decode_records"),
        fast_path=_lazy("forms.decode.forward", "make_fast_call"),
    )
    install = "install an NVIDIA driver for CUDA 13 (580 or later)"
    return Backend(
        name="cuda",
        version=__version__,
        kinds=("torch", "jax"),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": gated_delta,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
            "fused_decode_kda": decode,
            "fused_decode_gated_delta_rule": decode,
            "commit_records": commit,
            "kda_chunk_intra": _stage("kda_chunk_intra", "chunk_intra", "intra_head_dim"),
            "kda_recompute_w_u": _stage("kda_recompute_w_u", "recompute_w_u", "recompute_head_dims"),
        },
        summary="hand-written kernels: bfloat16 chunk_kda, on Hopper its backward and chunk_gated_delta_rule with its "
        "own; recurrent ops, two training stages",
        requirements=(
            Requirement("CUDA driver", _driver_missing, install, hardware=True),
            Requirement("torch or JAX", _array_library_missing, install_line("cuda")),
        ),
        rank=100,
        device_types=("cuda",),
        capturable=True,
        traceable=True,
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds this backend by."""
    return [make_backend()]


@hookimpl
def kdacore_kernel_builders() -> list[Any]:
    """The hook ``kdacore build`` finds the kernels by."""
    return [_lazy("build.packaging", "builder")()]
